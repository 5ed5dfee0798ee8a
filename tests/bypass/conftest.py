"""The world of the bypass suite; around each attack the neighbour computes, and afterwards the claim is whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bypass.world import CLAIM_MIB, LEFT_MIB, World, undisturbed, world
from tests.dataplane.plane import wait_until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("bypass")) as made:
        yield made


@pytest.fixture
def attack(place: World) -> Iterator[World]:
    """What every attempt is held to: a neighbour with the same bits, and afterwards exactly the claim to be had.

    Relay and worker are still the same then.
    """
    processes = [process.pid for claim in (place.attacker, place.neighbour) for process in claim.plane.processes]
    with undisturbed(place):
        yield place
        assert place.taken_mib() <= CLAIM_MIB
    wait_until(lambda: place.attacker.used() == 0, 5.0, "nothing of the attempt holds memory")
    after = place.hog()
    assert (after["granted"], after["code"]) == (LEFT_MIB, 2), "all of the claim, and no more"
    alive = [process.poll() for claim in (place.attacker, place.neighbour) for process in claim.plane.processes]
    assert alive == [None] * len(processes)
