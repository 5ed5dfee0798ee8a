"""Real programs over the whole way: shim, relay, worker, session, soft card; and what each sees when a part goes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvmpool.core.model import Binding, CardId, ClaimKey, DomainUuid, Generation, HostName, RelaySeen, WorkerSeen
from kvmpool.dataplane.relays import ProcessRelays
from kvmpool.dataplane.workers import Confinement, ProcessWorkers, virtual_pci, virtual_uuid
from kvmpool.errors import CardLost
from kvmpool.lab import images
from kvmpool.native import native
from kvmpool.softgpu.faults import Fault
from kvmpool.softgpu.state import CardSpec, create, inject
from tests.dataplane.plane import UUID, gone, wait_until

pytestmark = pytest.mark.native

CARDS = tuple(CardId(f"GPU-{n:08x}-aaaa-4bbb-8ccc-dddddddddddd") for n in (1, 2))
CLAIM = ClaimKey(DomainUuid(UUID), "gpu0")


def binding(generation: int, card: int, memory_mib: int = 256) -> Binding:
    """`vm0/gpu0#generation` on that card."""
    host = HostName("h0")
    return Binding(CLAIM, Generation(generation), "vm0", host, CARDS[card], host, memory_mib, memory_mib, 50, 100)


@dataclass
class Host:
    """What kvmpoold has in its hands, without kvmpoold."""

    folder: Path
    workers: ProcessWorkers
    relays: ProcessRelays

    def serve(self, what: Binding) -> tuple[WorkerSeen, RelaySeen]:
        """Start its worker, open the relay, point it."""

        async def story() -> tuple[WorkerSeen, RelaySeen]:
            worker = await self.workers.start(what)
            relay = await self.relays.open(CLAIM.domain, "vm0", ["gpu0"], "")
            await self.relays.point(CLAIM.domain, "gpu0", what.generation, worker.address, what.memory_mib)
            return worker, relay

        return asyncio.run(story())

    def guest(self, **changes: str) -> dict[str, str]:
        """The environment of a program in the guest."""
        files = self.folder / "guests" / UUID
        return {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(native("shim").parent),
            "KVMPOOL_NO_VSOCK": "1",
            "KVMPOOL_ENDPOINT": (files / "endpoint").read_text(),
            "KVMPOOL_TOKEN": (files / "token").read_text(),
            **changes,
        }

    def run(self, program: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        path = next(path for path in images.programs() if path.name == program)
        kernels = next(path for path in images.programs() if path.name == "kernels.ptx")
        environment = self.guest(KVMPOOL_KERNELS=str(kernels), **changes)
        return subprocess.run(
            [path, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
        )


@pytest.fixture(params=["tcp:127.0.0.1:0", "unix"], ids=["tcp", "unix"])
def host(request: pytest.FixtureRequest, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    soft = short_dir / "soft"
    create(soft, [CardSpec(n, CARDS[n], f"0000:4{n + 1}:00.0", "Soft GPU", 1024) for n in (0, 1)])
    monkeypatch.setenv("KVMPOOL_SOFTGPU", str(soft))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(native("softgpu-cuda").parent))
    workers = ProcessWorkers(short_dir / "workers", confinement=Confinement(memory_mib=8192, tasks=1024))
    relays = ProcessRelays(short_dir / "relays", short_dir / "guests", listen=request.param)
    yield Host(short_dir, workers, relays)

    async def end() -> None:
        for relay in await relays.list():
            await relays.close(relay.domain)
        for worker in await workers.list():
            await workers.stop(worker.claim, worker.generation, worker.pid)

    asyncio.run(end())


def test_programs_compute_right_and_see_the_claims_gpu(host: Host) -> None:
    host.serve(binding(1, 0))
    seen = host.run("deviceQuery")
    assert seen.returncode == 0, seen.stderr
    assert f"uuid: GPU-{virtual_uuid(CLAIM)}" in seen.stdout
    assert f"pci: {virtual_pci(CLAIM)}" in seen.stdout
    assert "memory MiB: 256" in seen.stdout
    for program in ("vectorAdd", "matrixMul"):
        done = host.run(program)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_next_process_after_a_failover_finds_the_same_gpu_on_the_other_card(host: Host) -> None:
    first, relay = host.serve(binding(1, 0))
    before = host.run("deviceQuery")
    inject(host.folder / "soft", 0, Fault.parse("xid 79"))
    lost = host.run("vectorAdd")
    assert lost.returncode != 0
    with pytest.raises(CardLost):
        asyncio.run(host.workers.start(binding(2, 0)))
    second, same = host.serve(binding(3, 1))
    assert (second.pid != first.pid, same.endpoint, same.pid) == (True, relay.endpoint, relay.pid)
    wait_until(lambda: gone(first.pid), 1.0)
    assert host.run("deviceQuery").stdout == before.stdout
    done = host.run("vectorAdd")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_running_program_loses_its_gpu_and_goes_on_with_the_next(host: Host) -> None:
    host.serve(binding(1, 0))
    outcome: list[subprocess.CompletedProcess[str]] = []
    program = threading.Thread(target=lambda: outcome.append(host.run("loop", "4", "50")))
    program.start()
    wait_until(lambda: asyncio.run(host.workers.list())[0].sessions == 1, 5.0)
    asyncio.run(asyncio.sleep(1.0))
    inject(host.folder / "soft", 0, Fault.parse("lost"))
    asyncio.run(host.relays.unpoint(CLAIM.domain, "gpu0", "its card failed"))
    host.serve(binding(2, 1))
    program.join(60)
    (done,) = outcome
    assert done.returncode == 0, done.stdout + done.stderr  # its last round was right, and no round was wrong
    # 46: its worker was gone (CUDA_ERROR_DEVICE_UNAVAILABLE); 999: the dying card's own last word came first
    assert "(46)" in done.stderr or "(999)" in done.stderr


HOLDER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def must(code):
    if code:
        sys.exit(f"failed: {code}")
context, at, other = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
must(cuda.cuInit(0))
must(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
for line in sys.stdin:
    verb, number = line.split()
    if verb == "take":
        print(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(int(number) << 20)), flush=True)
    if verb == "check":
        data = bytes([int(number)]) * (1 << 20)
        back = ctypes.create_string_buffer(1 << 20)
        must(cuda.cuMemcpyHtoD_v2(at, data, ctypes.c_size_t(1 << 20)))
        must(cuda.cuMemcpyDtoH_v2(back, at, ctypes.c_size_t(1 << 20)))
        print(back.raw == data, flush=True)
"""


@contextmanager
def holder(host: Host) -> Iterator[Callable[[str], str]]:
    """A guest process that takes memory when told to; gives a function that tells it and returns its answer."""
    words = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(words, env=host.guest(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        into, out = process.stdin, process.stdout

        def tell(line: str) -> str:
            into.write(line + "\n")
            into.flush()
            return out.readline().strip()

        yield tell
        into.close()
        assert process.wait(10) == 0


def test_memory_beyond_the_claim_is_refused_to_one_process_and_its_neighbour_goes_on(host: Host) -> None:
    host.serve(binding(1, 0, memory_mib=256))
    with holder(host) as good:
        assert good("take 100") == "0"
        with holder(host) as greedy:
            assert greedy("take 200") == "2"  # CUDA_ERROR_OUT_OF_MEMORY
            assert greedy("take 1000000") == "2"
            assert good("check 7") == "True"
            assert greedy("take 50") == "0"
            assert greedy("check 9") == "True"
            assert good("take 150") == "2"  # together they hold what the claim has
        wait_until(lambda: asyncio.run(host.workers.list())[0].sessions == 1, 2.0)
        assert good("take 100") == "0"  # what the other held is free again


def test_nothing_of_a_killed_starter_is_missed_by_a_running_program(host: Host) -> None:
    script = """
import asyncio, os, signal, sys
from pathlib import Path
from kvmpool.dataplane.relays import ProcessRelays
from kvmpool.dataplane.workers import ProcessWorkers
from tests.dataplane.test_failover import Host, binding
folder = Path(sys.argv[1])
workers = ProcessWorkers(folder / "workers")
relays = ProcessRelays(folder / "relays", folder / "guests", listen="tcp:127.0.0.1:0")
Host(folder, workers, relays).serve(binding(1, 0))
print("served", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    words = [sys.executable, "-c", script, str(host.folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        assert starter.stdout.readline() == "served\n"
        with holder(host) as program:
            assert program("take 10") == "0"
            starter.stdin.write("now\n")
            starter.stdin.flush()
            assert starter.wait(10) == -signal.SIGKILL
            assert program("check 3") == "True"
            (worker,) = asyncio.run(host.workers.list())
            (relay,) = asyncio.run(host.relays.list())
            assert (worker.serving, worker.sessions, relay.points) == (True, 1, {"gpu0": 1})
    assert host.run("vectorAdd").returncode == 0


def test_each_session_says_what_it_travels_over(host: Host) -> None:
    _, relay = host.serve(binding(1, 0))
    with holder(host) as program:
        assert program("take 1") == "0"
        (worker,) = asyncio.run(host.workers.list())
    assert worker.transports == ("shm" if relay.endpoint.startswith("unix:") else "tcp",)


def test_a_wrong_token_is_told_to_the_program(host: Host) -> None:
    host.serve(binding(1, 0))
    done = host.run("deviceQuery", KVMPOOL_TOKEN="0" * 32)
    assert done.returncode != 0
    assert "100" in done.stderr


def test_a_guest_process_killed_with_sigkill_frees_its_memory_within_a_second(host: Host) -> None:
    host.serve(binding(1, 0))
    path = next(path for path in images.programs() if path.name == "loop")
    kernels = next(path for path in images.programs() if path.name == "kernels.ptx")
    environment = host.guest(KVMPOOL_KERNELS=str(kernels))
    with subprocess.Popen([path, "0", "1000"], env=environment, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert asyncio.run(host.workers.list())[0].sessions == 1
        program.kill()
        wait_until(lambda: asyncio.run(host.workers.list())[0].sessions == 0, 1.0)
    assert asyncio.run(host.workers.list())[0].memory_used_mib == 0
