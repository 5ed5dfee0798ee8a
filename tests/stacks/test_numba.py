"""numba-cuda's own tests, on the card's driver and through shim, relay and worker: the same ones pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dataplane.remote import remote
from tests.stacks.stack import python

pytestmark = [pytest.mark.native, pytest.mark.stacks, pytest.mark.slow, pytest.mark.timeout(600)]

# Chosen by time: a module of numba's costs softgpu up to a minute. With each, how many of its tests pass at least.
MODULES = {
    "cudadrv.test_events": 3,
    "cudadrv.test_context_stack": 9,
    "cudadrv.test_cuda_driver": 16,
    "cudadrv.test_cuda_memory": 12,
    "cudapy.test_boolean": 1,
    "cudapy.test_casting": 12,
    "cudapy.test_constmem": 8,
    "cudapy.test_globals": 1,
    "cudapy.test_idiv": 2,
    "cudapy.test_lang": 3,
    "cudapy.test_localmem": 10,
    "cudapy.test_mandel": 1,
    "cudapy.test_sync": 19,
}
# Host memory that the card sees: a card in another machine cannot (CAN_MAP_HOST_MEMORY says 0).
KNOWN = {"test_host_alloc (numba.cuda.tests.cudadrv.test_cuda_memory.TestCudaMemory.test_host_alloc)": ("ok", "ERROR")}
_RESULT = re.compile(r"^(test\w+ \([\w.]+\)).*?\.\.\. (ok|FAIL|ERROR|skipped|expected failure)", re.M | re.S)


def results(text: str) -> dict[str, str]:
    return dict(_RESULT.findall(text))


@pytest.mark.parametrize("module", MODULES)
def test_the_same_tests_of_numba_pass_remoted(tmp_path: Path, module: str) -> None:
    command: list[str | Path] = [python("numba_cuda"), "-W", "ignore", "-m", "numba.runtests", "-v"]
    command.append(f"numba.cuda.tests.{module}")
    with remote(tmp_path, 1024) as place:
        words = [place.direct(command, 300).errors, place.guest(command, 300).errors]
    direct, guest = map(results, words)
    assert sum(result == "ok" for result in direct.values()) >= MODULES[module], words[0]
    both = {name: (direct.get(name), guest.get(name)) for name in direct | guest}
    differ = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    assert differ == {name: pair for name, pair in KNOWN.items() if f"numba.cuda.tests.{module}." in name}
