"""ProcessRelays: the endpoint a guest dials stays the same while relays, workers and this side come and go."""

from __future__ import annotations

import asyncio
import grp
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmpool.core.model import DomainUuid, Generation
from kvmpool.dataplane import lock
from kvmpool.dataplane.relays import ProcessRelays
from kvmpool.dataplane.windows import Windows
from kvmpool.errors import Unreachable
from tests.dataplane.plane import UUID, Guest, Plane, gone, wait_until

pytestmark = pytest.mark.native

DOMAIN = DomainUuid(UUID)


def made(plane: Plane, listen: str = "tcp:127.0.0.1:0", group: str = "") -> ProcessRelays:
    program = plane.programs / "kvmpool-relay"
    return ProcessRelays(
        plane.folder / "relays", plane.folder / "guests", listen=listen, guest_group=group, program=program
    )


@pytest.fixture
def relays(plane: Plane) -> Iterator[ProcessRelays]:
    yield made(plane)
    for seen in asyncio.run(made(plane).list()):
        log = plane.folder / "relays" / seen.domain / "relay.log"
        text = log.read_text()
        assert "Sanitizer" not in text, text
        assert "runtime error" not in text, text
        asyncio.run(made(plane).close(seen.domain))


def guest_file(plane: Plane, name: str) -> Path:
    return plane.folder / "guests" / UUID / name


def test_an_opened_relay_listens_and_the_guests_files_say_where(plane: Plane, relays: ProcessRelays) -> None:
    async def story() -> None:
        seen = await relays.open(DOMAIN, "vm0", ["gpu0"], "")
        assert seen.endpoint.startswith("tcp:127.0.0.1:")
        assert not seen.endpoint.endswith(":0")
        assert guest_file(plane, "endpoint").read_text() == seen.endpoint
        token = guest_file(plane, "token").read_text()
        assert len(bytes.fromhex(token)) == 16
        assert stat.S_IMODE(guest_file(plane, "token").stat().st_mode) == 0o640
        assert await relays.list() == (seen,)
        again = await relays.open(DOMAIN, "vm0", ["gpu0", "gpu1"], seen.endpoint)
        assert again == seen
        assert guest_file(plane, "token").read_text() == token
        await relays.close(DOMAIN)
        assert gone(seen.pid)
        assert not guest_file(plane, "token").parent.exists()
        assert not (plane.folder / "relays" / UUID).exists()
        await relays.close(DOMAIN)  # idempotent
        fresh = await relays.open(DOMAIN, "vm0", ["gpu0"], "")
        assert fresh.pid != seen.pid
        assert guest_file(plane, "token").read_text() != token

    asyncio.run(story())


def test_an_endpoint_that_a_killed_opener_did_not_write_is_written_at_the_next_look(
    plane: Plane, relays: ProcessRelays
) -> None:
    seen = asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], ""))
    guest_file(plane, "endpoint").unlink()
    assert asyncio.run(made(plane).list()) == (seen,)
    assert guest_file(plane, "endpoint").read_text() == seen.endpoint


def test_a_guest_is_served_over_tcp_with_its_token_only(plane: Plane, relays: ProcessRelays) -> None:
    plane.worker()
    seen = asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], ""))
    asyncio.run(relays.point(DOMAIN, "gpu0", Generation(1), f"unix:{plane.worker_socket()}", 64))
    (pointed,) = asyncio.run(relays.list())
    assert pointed.points == {"gpu0": 1}
    with Guest(seen.endpoint) as right:
        assert right.greet(token=guest_file(plane, "token").read_text()).status == 0
        assert asyncio.run(relays.list())[0].sessions == 1
        for wrong in ("", "0" * 32, guest_file(plane, "token").read_text()[:-1]):
            with Guest(seen.endpoint) as stranger:
                welcome = stranger.greet(token=wrong)
                assert (welcome.status, welcome.text) == (-13, "vm0: wrong token")
                assert stranger.ended(1.0)
        assert right.ask("undisturbed") == "undisturbed"


def test_a_killed_relay_is_reopened_where_it_was_with_the_same_token(plane: Plane, relays: ProcessRelays) -> None:
    worker = plane.worker(1)
    seen = asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], ""))
    asyncio.run(relays.point(DOMAIN, "gpu0", Generation(1), f"unix:{plane.worker_socket()}", 64))
    token = guest_file(plane, "token").read_text()
    with Guest(seen.endpoint) as guest:
        guest.greet(token=token)
        os.kill(seen.pid, signal.SIGKILL)
        assert guest.ended(1.0)
    wait_until(lambda: worker.poll() is not None, 1.0)
    assert asyncio.run(relays.list()) == ()
    again = asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], seen.endpoint))
    assert (again.endpoint, again.points) == (seen.endpoint, {})
    assert guest_file(plane, "token").read_text() == token
    plane.worker(2)
    asyncio.run(relays.point(DOMAIN, "gpu0", Generation(2), f"unix:{plane.worker_socket(2)}", 64))
    with Guest(again.endpoint) as guest:
        assert guest.greet(token=token).status == 0


def test_a_new_life_of_a_domain_gets_a_new_token_whatever_was_left(plane: Plane, relays: ProcessRelays) -> None:
    seen = asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], ""))
    old = guest_file(plane, "token").read_text()
    os.kill(seen.pid, signal.SIGKILL)
    wait_until(lambda: asyncio.run(relays.list()) == ())
    fresh = asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], ""))
    token = guest_file(plane, "token").read_text()
    assert token != old
    with Guest(fresh.endpoint) as guest:
        assert guest.greet(token=old).status == -13


def test_pointing_at_no_worker_is_unreachable_and_unpointing_nothing_is_fine(
    plane: Plane, relays: ProcessRelays
) -> None:
    async def story() -> None:
        await relays.unpoint(DOMAIN, "gpu0", "no relay lives")
        await relays.open(DOMAIN, "vm0", ["gpu0"], "")
        with pytest.raises(Unreachable, match="its worker of generation 9 is not reached: No such file"):
            await relays.point(DOMAIN, "gpu0", Generation(9), f"unix:{plane.folder}/nobody.sock", 64)
        await relays.unpoint(DOMAIN, "gpu0", "its card failed")
        (seen,) = await relays.list()
        assert seen.points == {}

    asyncio.run(story())


def test_a_worker_that_accepts_and_says_nothing_is_lost_after_two_seconds(plane: Plane, relays: ProcessRelays) -> None:
    asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], ""))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        (plane.folder / "m").mkdir()
        folder = os.open(plane.folder / "m", os.O_PATH)
        mute.bind(f"/proc/self/fd/{folder}/mute.sock")
        os.close(folder)
        mute.listen()
        with pytest.raises(Unreachable, match="its worker did not answer in 2 s"):
            asyncio.run(relays.point(DOMAIN, "gpu0", Generation(1), f"unix:{plane.folder}/m/mute.sock", 64))


def test_an_address_that_is_taken_is_one_line(plane: Plane, relays: ProcessRelays) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"its relay does not listen at {endpoint}: .*Address already in use"):
            asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], endpoint))
    assert asyncio.run(relays.list()) == ()


def test_unix_and_vsock_endpoints_are_chosen_by_configuration(plane: Plane, relays: ProcessRelays) -> None:
    async def story() -> None:
        seen = await made(plane, "unix").open(DOMAIN, "vm0", ["gpu0"], "")
        assert seen.endpoint == f"unix:{plane.folder}/relays/{UUID}/guest.sock"
        await relays.close(DOMAIN)
        seen = await made(plane, "vsock").open(DOMAIN, "vm0", ["gpu0"], "")
        assert seen.endpoint == "vsock:2:9960"

    asyncio.run(story())


def test_the_guests_files_belong_to_the_group_of_its_machine(plane: Plane, relays: ProcessRelays) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    asyncio.run(made(plane, group=group).open(DOMAIN, "vm0", ["gpu0"], ""))
    assert guest_file(plane, "token").stat().st_gid == os.getgid()
    asyncio.run(relays.close(DOMAIN))
    with pytest.raises(Unreachable, match="the guest's token cannot be written"):
        asyncio.run(made(plane, group="no-such-group").open(DOMAIN, "vm0", ["gpu0"], ""))


def test_a_relay_that_hangs_is_closed_all_the_same(plane: Plane, relays: ProcessRelays) -> None:
    async def story() -> None:
        seen = await relays.open(DOMAIN, "vm0", ["gpu0"], "")
        os.kill(seen.pid, signal.SIGSTOP)
        (hung,) = await relays.list()
        assert (hung.pid, hung.endpoint, hung.points) == (seen.pid, seen.endpoint, {})
        await relays.close(DOMAIN)
        assert gone(seen.pid)

    asyncio.run(story())


def test_closing_a_relay_that_has_died_removes_what_it_left(plane: Plane, relays: ProcessRelays) -> None:
    seen = asyncio.run(relays.open(DOMAIN, "vm0", ["gpu0"], ""))
    os.kill(seen.pid, signal.SIGKILL)
    wait_until(lambda: asyncio.run(relays.list()) == ())
    assert guest_file(plane, "token").exists()
    asyncio.run(relays.close(DOMAIN))
    assert not (plane.folder / "relays" / UUID).exists()
    assert not guest_file(plane, "token").parent.exists()


def test_a_relay_whose_domain_ended_waits_for_who_watches_it_and_serves_the_next_life(
    plane: Plane, relays: ProcessRelays
) -> None:
    async def story() -> None:
        await relays.open(DOMAIN, "vm0", ["gpu0"], "")
        for _ in range(2):
            domain = await asyncio.create_subprocess_exec("sleep", "60")
            await relays.follow(DOMAIN, domain.pid)
            assert (await relays.list())[0].follows == domain.pid
            domain.kill()
            await domain.wait()
            await asyncio.sleep(0.3)
            assert (await relays.list())[0].follows == domain.pid  # known: no reason to follow it anew
        with pytest.raises(Unreachable, match="is not there to follow"):
            await relays.follow(DOMAIN, domain.pid)
        relays._unwatch(DOMAIN)
        assert await lock.wait_free(plane.folder / "relays" / UUID / "relay.lock", 1.0)

    asyncio.run(story())


def test_a_relay_follows_its_domains_process_without_anybody(plane: Plane, relays: ProcessRelays) -> None:
    async def story() -> None:
        await relays.open(DOMAIN, "vm0", ["gpu0"], "")
        domain = await asyncio.create_subprocess_exec("sleep", "60")
        await relays.follow(DOMAIN, domain.pid)
        (seen,) = await relays.list()
        assert seen.follows == domain.pid
        relays._unwatch(DOMAIN)  # as a kvmpoold that ends does
        (seen,) = await relays.list()
        assert seen.follows == 0
        domain.kill()
        await domain.wait()
        assert await lock.wait_free(plane.folder / "relays" / UUID / "relay.lock", 1.0)

    asyncio.run(story())


def test_a_domain_s_shared_memory_is_there_before_its_qemu_and_goes_with_its_relay(plane: Plane) -> None:
    group, shm = grp.getgrgid(os.getgid()).gr_name, plane.folder / "shm"
    shm.mkdir()
    file = shm / f"kvmpool-{UUID}"
    file.write_text("what a stranger put there for QEMU to open")
    file.chmod(0o666)
    stranger = file.open("rb")

    async def story() -> None:
        relays = ProcessRelays(
            plane.folder / "relays",
            plane.folder / "guests",
            listen="unix",
            guest_group=group,
            program=plane.programs / "kvmpool-relay",
            windows=Windows(group, shm),
        )
        seen = await relays.open(DOMAIN, "vm0", ["gpu0"], "", 8)
        ours = file.stat()
        assert (stat.S_IMODE(ours.st_mode), ours.st_size, ours.st_nlink) == (0o660, 8 << 20, 1)
        with stranger:
            assert os.fstat(stranger.fileno()).st_nlink == 0, "nobody finds that one any more"
        with file.open("rb") as head:
            assert head.read(16) == b"kvmpool window 1"
        os.kill(seen.pid, signal.SIGKILL)
        wait_until(lambda: gone(seen.pid), 5.0, "the relay is killed")
        assert file.exists(), "QEMU has it open"
        await relays.open(DOMAIN, "vm0", ["gpu0"], seen.endpoint, 8)
        assert file.stat().st_ino == ours.st_ino
        await relays.close(DOMAIN)
        assert not file.exists()

    asyncio.run(story())


def test_shared_memory_that_cannot_be_made_is_told(plane: Plane) -> None:
    with pytest.raises(Unreachable, match="its shared memory .* cannot be made"):
        Windows("", plane.folder / "nowhere").prepare(DOMAIN, 8, new=True)
