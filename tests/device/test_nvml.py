"""NVML as on a real host: loaded by soname in a process of its own, over soft cards, or a driver that is broken."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmpool.errors import NotFound
from kvmpool.native import native
from kvmpool.softgpu import state
from kvmpool.softgpu.faults import Fault
from kvmpool.softgpu.state import CardSpec
from tests.device.trees import add_card

pytestmark = pytest.mark.native

A, B = "0000:41:00.0", "0000:42:00.0"
ID_A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
ID_B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
SPECS = [CardSpec(0, ID_A, A, "Soft H100", 8192), CardSpec(1, ID_B, B, "Soft H100", 4096)]


class Child:
    """tests/device/nvml_child.py with `library`'s folder in its loader path."""

    def __init__(self, root: Path, library: Path, *, log: bool = True, **environment: str) -> None:
        env = os.environ | {"LD_LIBRARY_PATH": str(library), "KVMPOOL_SOFTGPU": str(root)} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.nvml_child", str(root), "log" if log else "nolog"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).parents[2],
        )
        self._said: dict[str, queue.Queue[tuple[float, Any]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, command: str, kind: str = "", timeout_s: float = 30) -> Any:
        self.tell(command)
        return self.hear(kind or command.split()[0], timeout_s)[1]

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def hear(self, kind: str, timeout_s: float = 10) -> tuple[float, Any]:
        return self._queue(kind).get(timeout=timeout_s)

    def signals(self, for_s: float) -> list[dict[str, Any]]:
        """All that come within that time."""
        time.sleep(for_s)
        found = []
        while not self._queue("signal").empty():
            found.append(self._queue("signal").get()[1])
        return found

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=20)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, at, value = json.loads(line)
            self._queue(kind).put((at, value))

    def _queue(self, kind: str) -> queue.Queue[tuple[float, Any]]:
        with self._lock:
            return self._said.setdefault(kind, queue.Queue())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    state.create(tmp_path, SPECS)
    return tmp_path


def library() -> Path:
    try:
        return native("softgpu-nvml").parent
    except NotFound as error:
        pytest.skip(str(error))


@pytest.fixture
def child(root: Path) -> Iterator[Child]:
    child = Child(root, library())
    yield child
    assert child.end() == 0


def test_the_inventory_is_what_driver_and_bus_show(child: Child) -> None:
    one, two = child.ask("inventory")
    assert (one["id"], one["address"], one["model"], one["memory_mib"]) == (ID_A, A, "Soft H100", 8192)
    assert (one["driver"], one["compute_capability"], one["fault"], one["present"]) == ("nvidia", "9.0", "", True)
    assert (two["id"], two["memory_mib"]) == (ID_B, 4096)


def test_a_well_card_answers_a_probe(child: Child) -> None:
    child.ask("inventory")
    probe = child.ask(f"probe {ID_A} 2")
    assert (probe["type"], probe["ok"], probe["lost"], probe["recovery_action"]) == ("ProbeSignal", True, False, 0)


def test_a_lost_card_is_lost_and_its_neighbour_is_well(child: Child, root: Path) -> None:
    child.ask("inventory")
    state.inject(root, 0, Fault.parse("lost"))
    probe = child.ask(f"probe {ID_A} 2")
    assert (probe["ok"], probe["lost"]) == (False, True)
    assert child.ask(f"probe {ID_B} 2")["ok"]
    one, two = child.ask("inventory")
    assert one["id"] == ID_A
    assert one["fault"]
    assert two["fault"] == ""
    state.inject(root, 0, Fault.parse("heal"))
    assert child.ask(f"probe {ID_A} 2")["ok"]
    assert child.ask("inventory")[0]["fault"] == ""


def test_a_card_that_is_lost_to_nvml_alone_is_lost_too(child: Child, root: Path) -> None:
    child.ask("inventory")
    state.inject(root, 0, Fault.parse("lost"))
    (root / "sys/bus/pci/devices" / A / "config").write_bytes(
        (root / "sys/bus/pci/devices" / B / "config").read_bytes()
    )
    probe = child.ask(f"probe {ID_A} 2")
    assert (probe["ok"], probe["lost"], probe["text"]) == (False, True, "NVML: GPU is lost")
    assert child.ask("inventory")[0]["id"] == ID_A


@pytest.mark.parametrize("log", [True, False])
def test_an_xid_is_told_at_once_and_once_by_log_and_nvml(root: Path, log: bool) -> None:
    child = Child(root, library(), log=log)
    child.ask("inventory")
    child.tell("signals")
    time.sleep(1.2)
    for xid in (31, 79):
        sent = time.monotonic()
        state.inject(root, 1, Fault.parse(f"xid {xid}"))
        at, signal = child.hear("signal")
        lost = []
        while signal["type"] != "XidSignal":  # that NVML has lost the card may be heard first
            lost.append(signal)
            at, signal = child.hear("signal")
        assert at - sent < 1.0
        assert (signal["card"], signal["xid"]) == (ID_B, xid)
    later = child.signals(2.0)
    assert [signal["xid"] for signal in later if signal["type"] == "XidSignal"] == []
    assert any(signal["type"] == "ProbeSignal" and signal["lost"] for signal in lost + later)  # NVML's word after 79
    assert child.end() == 0


def test_nvmls_recovery_action_follows_an_xid(child: Child, root: Path) -> None:
    child.ask("inventory")
    child.tell("signals")
    time.sleep(1.2)
    state.inject(root, 0, Fault.parse("xid 109 recovery=1"))
    assert child.hear("signal")[1]["xid"] == 109
    verdict = child.hear("signal")[1]
    assert (verdict["type"], verdict["recovery_action"]) == ("ProbeSignal", 1)
    assert child.ask(f"probe {ID_A} 2")["recovery_action"] == 1


def test_a_card_that_leaves_the_bus_is_not_present(child: Child, root: Path) -> None:
    child.ask("inventory")
    (root / "sys/bus/pci/devices" / A).rename(root / "elsewhere")
    one, two = child.ask("inventory")
    assert (one["id"], one["present"]) == (ID_A, False)
    assert (two["present"], two["fault"]) == (True, "")
    assert child.ask(f"probe {ID_A} 2")["lost"]


def test_a_card_nobody_knows_is_unknown_and_not_failed(child: Child) -> None:
    child.ask("inventory")
    probe = child.ask("probe GPU-cccccccc-0000-0000-0000-000000000003 2")
    assert (probe["type"], probe["text"]) == ("UnknownSignal", "NVML does not know the card")


# --- broken drivers ---------------------------------------------------------------------------------------------------

_BROKEN = """
#include <stdlib.h>
#include <unistd.h>
static int answer(void) {
    const char *mode = getenv("NVML_MODE");
    if (mode && mode[0] == 'h') for (;;) pause();
    return mode ? atoi(mode) : 0;
}
int nvmlInitWithFlags(unsigned flags) { (void)flags; return answer(); }
const char *nvmlErrorString(int code) { (void)code; return "bad\\nnews \\x1b[31m"; }
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "nvml.c").write_text(_BROKEN)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("18", "driver and NVML have different versions"),
        ("9", "the NVIDIA driver is not loaded"),
        ("4", "NVML refuses us: no permission"),
        ("0", "libnvidia-ml.so.1 is too old"),
    ],
)
def test_a_driver_that_serves_nobody_makes_cards_unknown_and_never_failed(
    tmp_path: Path, broken: Path, mode: str, says: str
) -> None:
    add_card(tmp_path, A)
    child = Child(tmp_path, broken, log=False, NVML_MODE=mode)
    (card,) = child.ask("inventory")
    assert says in card["fault"]
    assert card["present"]
    probe = child.ask(f"probe {ID_A} 1")
    assert probe["type"] == "UnknownSignal"
    assert says in probe["text"]
    assert child.end() == 0


def test_an_error_nobody_knows_fails_the_probe_in_one_printable_line(tmp_path: Path, broken: Path) -> None:
    add_card(tmp_path, A)
    child = Child(tmp_path, broken, log=False, NVML_MODE="777")
    probe = child.ask(f"probe {ID_A} 1")
    assert (probe["type"], probe["ok"]) == ("ProbeSignal", False)
    assert probe["text"].isprintable()
    assert child.end() == 0


def test_no_library_at_all_is_said_by_name(tmp_path: Path) -> None:
    add_card(tmp_path, A)
    child = Child(tmp_path, tmp_path, log=False)
    (card,) = child.ask("inventory")
    assert card["fault"] == "libnvidia-ml.so.1 is not installed"
    assert child.end() == 0


def test_a_driver_that_hangs_blocks_neither_the_loop_nor_the_end(tmp_path: Path, broken: Path) -> None:
    add_card(tmp_path, A)
    child = Child(tmp_path, broken, log=False, NVML_MODE="hang")
    child.tell("signals")
    child.ask("tick", timeout_s=30)  # it is up
    for _ in range(3):
        child.tell("inventory")
        child.tell(f"probe {ID_A} 0.5")
    begun = time.monotonic()
    assert child.ask("tick", timeout_s=30) is None
    assert time.monotonic() - begun < 2  # less than the inventory's deadline
    for _ in range(3):
        probe = child.hear("probe", 10)[1]
        assert (probe["ok"], probe["timed_out"]) == (False, True)
        (card,) = child.hear("inventory", 10)[1]
        assert "did not answer within 2 s" in card["fault"]
    assert child.end() == 0
