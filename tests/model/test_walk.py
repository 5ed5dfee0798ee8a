"""The seeded walk over the whole pool, and the proof that it finds bugs."""

from __future__ import annotations

import pytest

from kvmpool.sim.walk import walk
from tests.model.planted import BUGS, PLUG_BUGS, Bug

SEEDS = 200
PASSTHROUGH_SEEDS = 100
_CHUNK = 10
_HUNT = 60  # walks a planted bug may take to be found


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, _CHUNK))
def test_no_walk_breaks_a_law(first: int) -> None:
    for seed in range(first, first + _CHUNK):
        result = walk(seed)
        assert not result.failure, f"seed {seed}: {result.failure}\n" + "\n".join(result.steps[-30:])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PASSTHROUGH_SEEDS, _CHUNK))
def test_no_walk_with_cards_that_are_passed_through_breaks_a_law(first: int) -> None:
    for seed in range(first, first + _CHUNK):
        result = walk(seed, passthrough=True)
        assert not result.failure, f"seed {seed}: {result.failure}\n" + "\n".join(result.steps[-30:])


def test_the_same_seed_walks_the_same_way() -> None:
    assert walk(7) == walk(7)
    assert walk(7, passthrough=True) == walk(7, passthrough=True)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with bug.planted():
        found = any(walk(seed).failure for seed in range(1000, 1000 + _HUNT))
    assert found, f"{_HUNT} walks did not find it: {bug.name}"


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLUG_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_a_plug_is_found(bug: Bug) -> None:
    with bug.planted():
        found = any(walk(seed, passthrough=True).failure for seed in range(1000, 1000 + _HUNT))
    assert found, f"{_HUNT} walks did not find it: {bug.name}"


def test_enough_bugs_are_planted() -> None:
    assert len({bug.name for bug in BUGS}) >= 10
