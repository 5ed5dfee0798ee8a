"""Plays every story and compares its log. `pytest tests/scenarios --regenerate` writes the logs anew: read the diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmpool.sim.scenario import play, read

STORIES = sorted(p.parent for p in Path(__file__).parent.glob("*/steps.txt"))


@pytest.mark.parametrize("folder", STORIES, ids=lambda p: p.name)
def test_the_story_goes_as_told(folder: Path, request: pytest.FixtureRequest) -> None:
    told = "\n".join(play(read(folder))) + "\n"
    golden = folder / "log.expect"
    if request.config.getoption("--regenerate"):
        golden.write_text(told)
    assert told == golden.read_text()


def test_there_are_the_stories_that_we_promise() -> None:
    promised = {
        "card-dies",
        "card-flaps",
        "breaker-opens",
        "host-pauses",
        "daemon-killed-at-each-step",
        "no-capacity-then-capacity",
        "claim-withdrawn-while-rebinding",
        "xid-154-overrides",
        "passthrough-card-dies",
        "passthrough-guest-is-silent",
        "passthrough-cold",
        "passthrough-falls-back",
        "passthrough-waits",
        "passthrough-card-is-reset",
        "passthrough-at-boot",
        "passthrough-boot-cold",
    }
    assert promised <= {p.name for p in STORIES}


@pytest.mark.parametrize("folder", STORIES, ids=lambda p: p.name)
def test_a_story_says_what_it_is_about(folder: Path) -> None:
    assert (folder / "README").read_text().strip()
