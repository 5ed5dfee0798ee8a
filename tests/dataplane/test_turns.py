"""Claims of one card get their shares of it, or their hard limit; a launch that never ends is ended alone."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvmpool.native import native
from kvmpool.softgpu.faults import Fault
from kvmpool.softgpu.state import CardSpec, create, inject, read
from tests.dataplane.plane import NATIVE, UUID, Plane, status, wait_until

pytestmark = [pytest.mark.native, pytest.mark.alone]

CARD = "GPU-00000001-aaaa-4bbb-8ccc-dddddddddddd"
SECONDS = 5.0


@dataclass
class Claim:
    """A claim of the soft card: its own folder, relay and worker."""

    plane: Plane
    programs: list[subprocess.Popen[str]] = field(default_factory=list)

    def status(self) -> dict[str, object]:
        return status(self.plane.worker_socket())

    def start(self, program: Path, *arguments: object) -> subprocess.Popen[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(native("shim").parent),
            "KVMPOOL_NO_VSOCK": "1",
            "KVMPOOL_ENDPOINT": self.plane.endpoint,
        }
        words = [str(program), *map(str, arguments)]
        made = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.programs.append(made)
        return made

    def end(self) -> None:
        for program in self.programs:
            program.kill()
            program.wait()
        self.plane.end()


class Pool:
    """One soft card and what claims it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o711)
        create(folder / "soft", [CardSpec(0, CARD, "0000:41:00.0", "Soft GPU", 1024)])
        self.program = folder / "saturate"
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1"]
        shim = f"-L{native('shim').parent}"
        source = str(NATIVE / "saturate.c")
        subprocess.run(["gcc", *flags, source, shim, "-l:libcuda.so.1", "-o", str(self.program)], check=True)
        programs = folder / "programs"
        (programs).mkdir()
        for name in ("worker", "relay"):
            (programs / f"kvmpool-{name}").symlink_to(native(name))
        (programs / "fake").symlink_to(native("softgpu-cuda").parent)
        self.programs = programs
        self.claims: list[Claim] = []

    def claim(self, *options: str) -> Claim:
        """Named options replace those of a worker that a test gets by default."""
        number = len(self.claims)
        folder = self.folder / f"claim{number}"
        folder.mkdir()
        plane = Plane(folder, self.programs, {"KVMPOOL_SOFTGPU": str(self.folder / "soft")})
        words = plane.worker_options(memory_mib=128)
        words[words.index("--dir") + 1] = str(folder / "workers")
        words[words.index("--card") + 1] = CARD
        (folder / "workers").mkdir()
        (self.folder / "turns").mkdir(exist_ok=True)
        (folder / "workers" / "turns").symlink_to(self.folder / "turns")  # one host's claims lie in one folder
        at = words.index("--compute")
        del words[at : at + 2]
        plane.spawn("kvmpool-worker", *words, *options)
        plane.relay()
        assert plane.point() == "OK"
        self.claims.append(Claim(plane))
        return self.claims[-1]

    def busy_ms(self) -> dict[int, float]:
        """By session, as the card itself counts."""
        (card,) = read(self.folder / "soft")
        return {process.pid: process.busy_ns / 1e6 for process in card.processes}


@pytest.fixture
def pool(short_dir: Path) -> Iterator[Pool]:
    made = Pool(short_dir)
    yield made
    for claim in made.claims:
        claim.end()


def run(
    pool: Pool, claims: list[Claim], seconds: float = SECONDS, rounds: int = 1_000_000, graphs: tuple[int, ...] = ()
) -> list[float]:
    """Saturate all at once; the card's busy percent of each claim over `seconds`, and all results were right.

    The claims numbered in `graphs` launch graphs of three kernels, the others kernels; all have about as much ahead.
    """
    ways = [("3", "graph") if number in graphs else ("8",) for number in range(len(claims))]
    programs = [claim.start(pool.program, seconds + 1, rounds, *way) for claim, way in zip(claims, ways, strict=True)]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    pids = [int(claim.status()["processes"][0]["pid"]) for claim in claims]  # type: ignore[index]
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
    time.sleep(0.5)
    before, since = pool.busy_ms(), time.monotonic()
    time.sleep(seconds)
    after, took = pool.busy_ms(), time.monotonic() - since
    for program in programs:
        out, _ = program.communicate(timeout=30)
        assert program.returncode == 0, out
        assert "wrong=0" in out
    return [(after[pid] - before[pid]) / took / 10 for pid in pids]


def test_two_claims_of_30_and_70_get_30_and_70(pool: Pool) -> None:
    shares = run(pool, [pool.claim("--compute", "30"), pool.claim("--compute", "70")], 10.0)
    print(shares)
    assert sum(shares) > 80
    of_all = [share * 100 / sum(shares) for share in shares]
    assert of_all == pytest.approx([30, 70], abs=5)


def test_a_claim_that_is_alone_gets_all_of_the_card(pool: Pool) -> None:
    (share,) = run(pool, [pool.claim("--compute", "30")])
    print(share)
    assert share > 80


def test_a_hard_limit_holds_for_a_claim_that_is_alone(pool: Pool) -> None:
    claim = pool.claim("--compute", "10", "--compute-limit", "25")
    (share,) = run(pool, [claim], 10.0)
    print(share)
    assert share == pytest.approx(25, abs=2.5)
    assert claim.status()["compute_limit_percent"] == 25


@pytest.mark.parametrize("graphs", [(0,), (1,), (0, 1)], ids=["30 by graphs", "70 by graphs", "both"])
def test_launches_of_graphs_count_as_much_as_their_kernels(pool: Pool, graphs: tuple[int, ...]) -> None:
    shares = run(pool, [pool.claim("--compute", "30"), pool.claim("--compute", "70")], 10.0, graphs=graphs)
    print(shares)
    assert sum(shares) > 80
    assert [share * 100 / sum(shares) for share in shares] == pytest.approx([30, 70], abs=5)


def test_a_hard_limit_holds_for_graphs(pool: Pool) -> None:
    (share,) = run(pool, [pool.claim("--compute", "10", "--compute-limit", "25")], 10.0, graphs=(0,))
    print(share)
    assert share == pytest.approx(25, abs=2.5)


def test_what_one_does_not_use_goes_to_the_other(pool: Pool) -> None:
    limited, soft = pool.claim("--compute", "20", "--compute-limit", "20"), pool.claim("--compute", "20")
    shares = run(pool, [limited, soft])
    print(shares)
    assert shares[0] == pytest.approx(20, abs=4)
    assert shares[1] > 60


def test_a_launch_that_never_ends_is_ended_and_its_neighbour_goes_on(pool: Pool) -> None:
    hung = pool.claim("--launch-timeout-ms", "500")
    program = hung.start(pool.program, "hang", 10)
    wait_until(lambda: program.poll() is not None, 20.0)
    assert program.communicate()[0] == "first=0 then=0\n"
    neighbour = hung.start(pool.program, 1, 1000)
    assert neighbour.stdout is not None
    assert neighbour.stdout.readline() == "ready\n"  # it has launched: on a card that hangs it would be ended too
    inject(pool.folder / "soft", 0, Fault.parse("hang"))
    program = hung.start(pool.program, "hang", 10)
    out, _ = program.communicate(timeout=30)
    assert out.startswith("first=702 ")
    assert "did not end in 500 ms" in hung.plane.log(hung.plane.processes[0])
    inject(pool.folder / "soft", 0, Fault.parse("heal"))
    out, _ = neighbour.communicate("\n", timeout=30)
    assert "wrong=0" in out


def test_the_page_of_a_cards_turns_is_nobodys_but_the_hosts(pool: Pool) -> None:
    pool.claim()
    page = pool.folder / "turns" / CARD
    assert page.stat().st_mode & 0o777 == 0o600
    assert UUID
