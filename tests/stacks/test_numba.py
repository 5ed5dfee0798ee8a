"""numba-cuda's own tests, on the card's driver and through shim, relay and worker: the same ones pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dataplane.remote import remote
from tests.stacks.stack import python

pytestmark = [pytest.mark.native, pytest.mark.stacks, pytest.mark.slow, pytest.mark.timeout(600)]

# Chosen by time: a module of numba's costs softgpu up to a minute. What prints from kernels is left out: the words of a
# kernel come out where its driver is.
MODULES = (
    "cudadrv.test_events",
    "cudadrv.test_context_stack",
    "cudadrv.test_streams",
    "cudadrv.test_cuda_driver",
    "cudadrv.test_cuda_memory",
    "cudapy.test_boolean",
    "cudapy.test_casting",
    "cudapy.test_constmem",
    "cudapy.test_globals",
    "cudapy.test_idiv",
    "cudapy.test_lang",
    "cudapy.test_localmem",
    "cudapy.test_mandel",
    "cudapy.test_sync",
)
# Host memory that the card sees: a card in another machine cannot (CAN_MAP_HOST_MEMORY says 0).
KNOWN = {"test_host_alloc (numba.cuda.tests.cudadrv.test_cuda_memory.TestCudaMemory.test_host_alloc)": ("ok", "ERROR")}
_RESULT = re.compile(r"^(test\w+ \([\w.]+\)).*?\.\.\. (ok|FAIL|ERROR|skipped|expected failure)", re.M | re.S)


def results(text: str) -> dict[str, str]:
    return dict(_RESULT.findall(text))


def test_the_same_tests_of_numba_pass_remoted(tmp_path: Path) -> None:
    command: list[str | Path] = [python("numba_cuda"), "-W", "ignore", "-m", "numba.runtests", "-v"]
    command += [f"numba.cuda.tests.{name}" for name in MODULES]
    with remote(tmp_path, 1024) as place:
        direct = results(place.direct(command, 300).errors)
        guest = results(place.guest(command, 300).errors)
    assert sum(result == "ok" for result in direct.values()) > 90
    both = {name: (direct.get(name), guest.get(name)) for name in direct | guest}
    assert {name: pair for name, pair in both.items() if pair[0] != pair[1]} == KNOWN
