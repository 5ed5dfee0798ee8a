"""kill -9 between any two steps of a mode switch, and of what undoes it: the card ends on exactly one driver."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvmpool.core.model import Mode
from kvmpool.device.vfio import POINTS, VfioModes
from tests.device.switching import AUDIO, TWIN, A, Bench

PASS, VGPU, OFF = Mode.PASSTHROUGH, Mode.VGPU, Mode.OFF
DRIVERS = {
    VGPU: {A: "nvidia", AUDIO: "snd_hda_intel", TWIN: "nvidia"},
    PASS: {A: "vfio-pci", AUDIO: "vfio-pci", TWIN: "nvidia"},
    OFF: {A: "", AUDIO: "", TWIN: "nvidia"},
}
WAYS = ((VGPU, PASS), (PASS, VGPU), (VGPU, OFF), (OFF, PASS))
Act = Callable[[VfioModes], Awaitable[object]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.bus:
        yield made


def passed(bench: Bench, act: Act) -> list[tuple[str, int]]:
    """Every point that `act` passes, with which time it is."""
    points: list[str] = []
    asyncio.run(_run(act(bench.modes(points.append))))
    return [(point, points[: index + 1].count(point)) for index, point in enumerate(points)]


async def _run(awaited: Awaitable[object]) -> None:
    await awaited


def killed(bench: Bench, act: Act, point: str, visit: int) -> bool:
    """A process that does `act` and is killed at the `visit`-th passage of `point`; False where it never came there."""
    pid = os.fork()
    if pid == 0:
        counted: Counter[str] = Counter()

        def checkpoint(reached: str) -> None:
            counted[reached] += 1
            if reached == point and counted[reached] == visit:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            asyncio.run(_run(act(bench.modes(checkpoint))))
        finally:
            os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    bench.bus.settle()  # the kernel has done what was written, whoever has died since
    return died


def to(bench: Bench, mode: Mode) -> Act:
    card = bench.card()
    return lambda modes: modes.switch(card, mode)


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_a_switch_killed_anywhere_is_ended_or_undone(bench: Bench, old: Mode, new: Mode) -> None:
    asyncio.run(_run(to(bench, old)(bench.modes())))
    before = bench.everything()
    for point, visit in passed(bench, to(bench, new)):
        asyncio.run(_run(to(bench, old)(bench.modes())))
        assert bench.drivers() == DRIVERS[old]
        assert killed(bench, to(bench, new), point, visit), f"{point} was not reached"
        lines = asyncio.run(bench.modes().recover())
        where = f"{old.value} -> {new.value}, killed at {point}, passage {visit}: {lines}"
        assert bench.drivers() in (DRIVERS[old], DRIVERS[new]), where
        assert bench.modes().journal.under_way() == (), where
        if bench.drivers() == DRIVERS[old]:
            assert bench.everything()[:3] == before[:3], where
        asyncio.run(_run(to(bench, new)(bench.modes())))
        assert bench.drivers() == DRIVERS[new], where


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_what_undoes_a_switch_may_be_killed_too(bench: Bench, old: Mode, new: Mode) -> None:
    def recover(modes: VfioModes) -> Awaitable[object]:
        return modes.recover()

    for point, visit in (("after-unbind", 1), ("after-probe", 1)):
        asyncio.run(_run(to(bench, old)(bench.modes())))
        if not killed(bench, to(bench, new), point, visit):
            continue
        second = passed(bench, recover)
        for at, nth in second:
            asyncio.run(_run(to(bench, old)(bench.modes())))
            assert killed(bench, to(bench, new), point, visit)
            assert killed(bench, recover, at, nth), f"{at} was not reached"
            asyncio.run(bench.modes().recover())
            assert bench.drivers() == DRIVERS[old], f"killed at {point}, then at {at}, passage {nth}"
            assert bench.modes().journal.under_way() == ()


def test_every_point_is_passed_by_one_of_the_ways(bench: Bench) -> None:
    reached: set[str] = set()
    for mode in (PASS, VGPU):
        reached |= {point for point, _ in passed(bench, to(bench, mode))}
    assert reached == set(POINTS)
