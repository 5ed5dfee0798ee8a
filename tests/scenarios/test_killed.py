"""I11: killing the daemon between any two effects ends in the same state as not killing it; enumerated, not sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmpool.daemon.perform import POINTS
from kvmpool.sim.crash import every_point
from kvmpool.sim.scenario import read

# Of cards that are passed through: stories of their own.
_PLUGS = {"attach-device", "detach-device", "tell-force-unplug", "force-unplug", "power-on"}
STORIES = (
    "card-dies",
    "daemon-killed-at-each-step",
    "no-capacity-then-capacity",
    "passthrough-card-dies",
    "passthrough-card-is-reset",
)


@pytest.mark.parametrize("name", STORIES)
def test_a_kill_at_any_point_ends_the_same(name: str) -> None:
    survived, wrong = every_point(read(Path(__file__).parent / name), visits=2)
    assert not wrong
    assert len(survived) >= 30
    if name == "passthrough-card-dies":
        assert {"before-attach-device", "after-detach-device"} <= {point.partition("/")[0] for point in survived}


def test_the_stories_pass_every_point_of_a_life() -> None:
    """What they do not pass is what they cannot do: lose a host, trip the breaker, grow a long event log,
    switch modes, reset cards."""
    story = read(Path(__file__).parent / "daemon-killed-at-each-step")
    passed = {point.partition("/")[0] for point in every_point(story, visits=1)[0]}
    other = {"lose", "trip-breaker", "forget-events", "record-mode", "switch-mode", "reset-card"} | _PLUGS
    assert {p for p in POINTS if p.partition("-")[2] not in other} <= passed
