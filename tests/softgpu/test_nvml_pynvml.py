"""NVML as pynvml sees it: real pynvml in a process of its own, which finds libnvidia-ml.so.1 by its soname."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from kvmpool.softgpu import state
from kvmpool.softgpu.faults import Fault
from tests.softgpu.driver import SPECS, Case, healthy_cards, libraries, python_environment, run

pytestmark = pytest.mark.native

NAMES = Path(state.__file__).parent / "src/nvml_names.txt"
PRELUDE = """
import json, sys, time
import pynvml as n
def error(call, *args):
    try:
        call(*args)
    except n.NVMLError as failure:
        return failure.value
    return 0
def say(value):
    print(json.dumps(value), flush=True)
n.nvmlInit()
cards = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_cards(tmp_path)


class Observer:
    """A Python process that runs `code` after PRELUDE."""

    def __init__(self, root: Path, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            env=python_environment(root),
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )

    def said(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process ended without saying anything"
        return json.loads(line)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


def ask(root: Path, code: str) -> Any:
    """The one value `code` says."""
    observer = Observer(root, code)
    said = observer.said()
    observer.end()
    return said


def test_identity_is_the_state_file_s(root: Path) -> None:
    said = ask(
        root,
        """
        say([[n.nvmlDeviceGetIndex(c), n.nvmlDeviceGetName(c), n.nvmlDeviceGetUUID(c), n.nvmlDeviceGetPciInfo(c).busId,
              n.nvmlDeviceGetMemoryInfo(c).total >> 20] for c in cards])
        """,
    )
    assert said == [[spec.index, spec.model, spec.uuid, f"0000{spec.pci_address}", spec.memory_mib] for spec in SPECS]


def test_versions_and_lookups(root: Path) -> None:
    said = ask(
        root,
        f"""
        by_uuid = n.nvmlDeviceGetHandleByUUID("{SPECS[1].uuid}")
        by_address = n.nvmlDeviceGetHandleByPciBusId("{SPECS[1].pci_address}")
        say([n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion(), n.nvmlDeviceGetIndex(by_uuid),
             n.nvmlDeviceGetIndex(by_address), error(n.nvmlDeviceGetHandleByUUID, "GPU-none"),
             error(n.nvmlDeviceGetHandleByIndex, 2), n.nvmlDeviceGetCudaComputeCapability(cards[0])])
        """,
    )
    assert said == [state.DRIVER_VERSION, 13000, 1, 1, 6, 2, [9, 0]]


def test_what_gpustat_and_nvitop_ask_is_answered(root: Path) -> None:
    said = ask(
        root,
        """
        c = cards[0]
        say([error(n.nvmlDeviceGetTemperature, c, 0), error(n.nvmlDeviceGetUtilizationRates, c),
             error(n.nvmlDeviceGetEncoderUtilization, c), error(n.nvmlDeviceGetDecoderUtilization, c),
             error(n.nvmlDeviceGetPowerUsage, c), error(n.nvmlDeviceGetEnforcedPowerLimit, c),
             error(n.nvmlDeviceGetComputeRunningProcesses, c), error(n.nvmlDeviceGetGraphicsRunningProcesses, c),
             error(n.nvmlDeviceGetClockInfo, c, 1), error(n.nvmlDeviceGetMaxClockInfo, c, 2),
             error(n.nvmlDeviceGetPerformanceState, c), error(n.nvmlDeviceGetDisplayActive, c),
             error(n.nvmlDeviceGetDisplayMode, c), error(n.nvmlDeviceGetPersistenceMode, c),
             error(n.nvmlDeviceGetTotalEccErrors, c, 1, 0), error(n.nvmlDeviceGetComputeMode, c),
             error(n.nvmlDeviceGetSerial, c), error(n.nvmlDeviceGetBAR1MemoryInfo, c),
             error(n.nvmlDeviceGetPcieThroughput, c, 0), error(n.nvmlDeviceGetMemoryInfo, c, n.nvmlMemory_v2),
             error(n.nvmlDeviceGetBrand, c), error(n.nvmlDeviceGetVbiosVersion, c)])
        """,
    )
    assert said == [0] * 22


def test_what_a_soft_card_has_not_is_not_supported(root: Path) -> None:
    said = ask(
        root,
        """
        c = cards[0]
        say([error(n.nvmlDeviceGetMigMode, c), error(n.nvmlDeviceGetFanSpeed, c),
             error(n.nvmlDeviceGetNvLinkState, c, 0), error(n.nvmlDeviceGetSupportedVgpus, c)])
        """,
    )
    assert said == [3] * 4


def test_processes_with_their_memory_and_name(root: Path) -> None:
    case = Case(root, "hold", "300")
    assert case.line() == "0"
    code = """
        found = n.nvmlDeviceGetComputeRunningProcesses(cards[0])
        say([[p.pid, p.usedGpuMemory >> 20, n.nvmlSystemGetProcessName(p.pid)] for p in found]
            + [n.nvmlDeviceGetMemoryInfo(cards[0]).used >> 20, n.nvmlDeviceGetMemoryInfo(cards[1]).used])
        """
    (pid, mib, name), used, other = ask(root, code)
    assert (pid, mib, used, other) == (case.process.pid, 309, 309, 0), "9 MiB are its context's"
    assert name.endswith("softgpu_cases")
    case.kill()
    assert ask(root, code) == [0, 0]


def test_utilization_follows_the_kernels(root: Path) -> None:
    observer = Observer(
        root,
        """
        def sample():
            time.sleep(0.15)
            return n.nvmlDeviceGetUtilizationRates(cards[0]).gpu
        sample()
        say(sample())
        sys.stdin.readline()
        say([n.nvmlDeviceGetUtilizationRates(cards[0]).gpu, n.nvmlDeviceGetUtilizationRates(cards[1]).gpu])
        """,
    )
    assert observer.said() == 0
    start = time.monotonic()
    run(root, "default_stream")
    observer.tell("")
    gpu, other = observer.said()
    expected = state.read(root)[0].busy_ns / 1e7 / (time.monotonic() - start)
    assert other == 0
    assert expected > 5
    assert 0.5 * expected - 2 < gpu < 2 * expected + 2
    observer.end()


def test_an_event_wait_without_event_times_out(root: Path) -> None:
    code = """
        events = n.nvmlEventSetCreate()
        n.nvmlDeviceRegisterEvents(cards[0], n.nvmlEventTypeXidCriticalError, events)
        start = time.monotonic()
        code = error(n.nvmlEventSetWait_v2, events, 200)
        say([code, time.monotonic() - start])
        """
    code_, waited_s = ask(root, code)
    assert code_ == 10
    assert 0.19 < waited_s < 5


LISTEN = """
    events = n.nvmlEventSetCreate()
    for card in cards:
        n.nvmlDeviceRegisterEvents(card, n.nvmlEventTypeXidCriticalError, events)
    say("listening")
    for _ in range(int(sys.stdin.readline())):
        event = n.nvmlEventSetWait_v2(events, 5000)
        address = n.cast(event.device, n.c_void_p).value
        which = [i for i, card in enumerate(cards) if n.cast(card, n.c_void_p).value == address]
        say([event.eventType, event.eventData, which, time.monotonic()])
    say(error(n.nvmlEventSetWait_v2, events, 0))
    """


def test_every_listener_gets_every_xid_with_its_card(root: Path) -> None:
    state.inject(root, 0, Fault.parse("xid 13"))  # before anybody listened: not told
    listeners = [Observer(root, LISTEN) for _ in range(2)]
    for listener in listeners:
        assert listener.said() == "listening"
        listener.tell("3")
    time.sleep(0.1)
    start = time.monotonic()
    for card, xid in ((0, 31), (1, 48), (0, 79)):
        state.inject(root, card, Fault.parse(f"xid {xid}"))
    for listener in listeners:
        got = sorted(listener.said() for _ in range(3))
        assert [event[:3] for event in got] == [[8, 31, [0]], [8, 48, [1]], [8, 79, [0]]]
        assert max(event[3] for event in got) - start < 2
        assert listener.said() == 10
        listener.end()


def test_a_kernel_s_fault_reaches_the_listeners(root: Path) -> None:
    listener = Observer(root, LISTEN)
    assert listener.said() == "listening"
    listener.tell("1")
    Case(root, "sticky", "trap", "719").end()
    assert listener.said()[:3] == [8, 13, [0]]
    assert listener.said() == 10
    listener.end()


def test_a_lost_card_answers_15_and_the_other_goes_on(root: Path) -> None:
    observer = Observer(
        root,
        """
        say("ready")
        sys.stdin.readline()
        say([error(n.nvmlDeviceGetName, cards[0]), error(n.nvmlDeviceGetMemoryInfo, cards[0]),
             error(n.nvmlDeviceGetHandleByIndex, 0), error(n.nvmlDeviceGetFieldValues, cards[0], [230]),
             n.nvmlDeviceGetName(cards[1]), n.nvmlDeviceGetCount()])
        sys.stdin.readline()
        say(n.nvmlDeviceGetName(cards[0]))
        """,
    )
    assert observer.said() == "ready"
    state.inject(root, 0, Fault.parse("lost"))
    observer.tell("")
    assert observer.said() == [15, 15, 15, 15, "SoftGPU 1", 2]
    state.inject(root, 0, Fault.parse("heal"))
    observer.tell("")
    assert observer.said() == "SoftGPU 0"
    observer.end()


@pytest.mark.parametrize(
    ("fault", "action", "errors"),
    [("xid 31", 0, 0), ("xid 48", 1, 1), ("xid 94", 4, 1), ("xid 154 recovery=2", 2, 0), ("ecc", 1, 1)],
)
def test_recovery_action_and_ecc_count(root: Path, fault: str, action: int, errors: int) -> None:
    state.inject(root, 0, Fault.parse(fault))
    code = """
        values = n.nvmlDeviceGetFieldValues(cards[0], [230, 4, 100000])
        say([[v.nvmlReturn for v in values], values[0].value.uiVal, values[1].value.ullVal,
             n.nvmlDeviceGetTotalEccErrors(cards[0], n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC)])
        """
    assert ask(root, code) == [[0, 0, 3], action, errors, errors]


def test_use_before_init_and_after_shutdown(root: Path) -> None:
    said = ask(
        root,
        """
        n.nvmlInit()
        n.nvmlShutdown()
        first = error(n.nvmlDeviceGetName, cards[0])
        n.nvmlShutdown()
        say([first, error(n.nvmlDeviceGetName, cards[0]), error(n.nvmlShutdown)])
        """,
    )
    assert said == [0, 1, 1]


def test_without_a_folder_the_driver_is_not_loaded(tmp_path: Path) -> None:
    code = "import pynvml\ntry:\n    pynvml.nvmlInit()\nexcept pynvml.NVMLError as failure:\n    print(failure.value)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=python_environment(tmp_path / "none"),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.stdout.strip() == "9"


def test_every_listed_name_is_exported() -> None:
    library = libraries() / "libnvidia-ml.so.1"
    table = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    exported = {line.split()[2] for line in table.splitlines()}
    wanted = {line.split()[0] for line in NAMES.read_text().splitlines() if not line.startswith("#")}
    assert wanted <= exported
    assert {name for name in exported if not name.startswith("nvml")} == set()
