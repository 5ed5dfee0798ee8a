"""Stream-ordered allocation, pools, memory a program maps itself: as on the card's own driver, and what it costs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.plane import status
from tests.dataplane.remote import Remote, remote
from tests.dataplane.shim import NATIVE, SOURCES
from tests.dataplane.waiting import wait_until
from tests.softgpu.driver import KERNELS
from tests.softgpu.nvrtc import ptx

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with remote(tmp_path_factory.mktemp("memory")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("cases")
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    command = ["gcc", *flags, NATIVE / "memory_cases.c", "-o", folder / "memory_cases", "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    (folder / "kernels.ptx").write_text(ptx(KERNELS, "compute_75"))
    return [folder / "memory_cases", folder / "kernels.ptx"]


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
@pytest.mark.parametrize("case", ["order", "streams", "pools", "vmm"])
def test_same_results(place: Remote, program: list[Path], case: str, way: str) -> None:
    card_is_free = "what the session before held is free: the card's own driver tells of all its processes"
    wait_until(lambda: status(place.plane.worker_socket())["sessions"] == 0, 10.0, card_is_free)
    direct, guest = place.direct([*program, case]), place.guest([*program, case], KVMPOOL_SHM=way)
    assert (direct.code, direct.errors) == (0, ""), direct
    assert len(direct.lines) > 2
    assert guest.lines == direct.lines, guest
    assert guest.code == 0


def test_the_order_of_a_stream_holds(place: Remote, program: list[Path]) -> None:
    told = place.guest([*program, "order"]).lines
    assert told == ["same_place=1", "kernel_wrote=77", "rest=1", "second=0", "freed_twice=1", "synchronise=0"]


def test_memory_that_a_pool_has_costs_no_trip_and_new_memory_one(place: Remote, program: list[Path]) -> None:
    none, many = (place.guest([*program, "loop"], LOOPS=loops) for loops in ("0", "300"))
    assert none.code == many.code == 0, many
    assert many.stats["round_trips"] == none.stats["round_trips"]
    assert many.stats["frames"] - none.stats["frames"] == 300, "the memsets"
