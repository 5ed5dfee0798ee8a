"""The state file: C and Python agree on its layout; faults change it, the kernel log and sysfs as one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from kvmpool.errors import NotFound, Refused
from kvmpool.softgpu import layout, state, sysfs
from kvmpool.softgpu.faults import Fault, Kind

SRC = Path(state.__file__).parent / "src"
SPECS = tuple(
    state.CardSpec(i, f"GPU-0000000{i}-1111-2222-3333-444444444444", f"0000:4{i + 1}:00.0", "kvmpool SoftGPU", 1024)
    for i in range(2)
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    state.create(tmp_path, SPECS)
    return tmp_path


def config(root: Path, index: int = 0) -> bytes:
    return (sysfs.device_dir(root, SPECS[index].pci_address) / "config").read_bytes()


@pytest.mark.native
def test_c_and_python_agree_on_every_field(tmp_path: Path) -> None:
    structs = {"sg_card": layout.CardBytes, "sg_slot": layout.SlotBytes, "sg_event": layout.EventBytes}
    lines, expected = [], []
    for name, kind in structs.items():
        for field in kind._fields_:
            lines.append(f'printf("%zu\\n", __builtin_offsetof(struct {name}, {field[0]}));')
            expected.append(getattr(kind, field[0]).offset)
        lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
        expected.append(ctypes.sizeof(kind))
    source = tmp_path / "offsets.c"
    body = "".join(lines)
    source.write_text(f'#include <stdio.h>\n#include "{SRC}/state.h"\nint main(void) {{ {body} return 0; }}\n')
    subprocess.run(["gcc", "-o", tmp_path / "offsets", source], check=True)
    printed = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected
    header = (SRC / "state.h").read_text()
    for name in ("VERSION", "SLOTS", "EVENTS", "MAX_CARDS"):
        assert f"SG_{name} {getattr(layout, name)}" in header


def test_created_cards_read_back_healthy(root: Path) -> None:
    cards = state.read(root)
    assert [card.spec for card in cards] == list(SPECS)
    assert not any(card.lost or card.ecc or card.hang or card.slow or card.processes for card in cards)
    assert config(root)[:4] == bytes.fromhex("de103023")
    assert len(config(root)) == 4096


def test_xid_79_loses_one_card_and_heal_brings_it_back(root: Path) -> None:
    state.inject(root, SPECS[0].uuid, Fault.parse("xid 79"))
    lost, other = state.read(root)
    assert (lost.lost, lost.last_xid, other.lost) == (True, 79, False)
    assert config(root) == b"\xff" * 4096
    assert config(root, 1) != b"\xff" * 4096
    state.inject(root, 0, Fault.parse("heal"))
    assert not state.read(root)[0].lost
    assert config(root)[:2] == b"\xde\x10"


def test_each_xid_is_one_kmsg_record_in_order(root: Path) -> None:
    for xid in (13, 79, 48):
        state.inject(root, 1, Fault(Kind.XID, xid))
    lines = (root / "kmsg").read_text().splitlines()
    assert [line.split(",")[1] for line in lines] == ["0", "1", "2"]
    assert lines[1].split(";")[1].startswith("NVRM: Xid (PCI:0000:42:00): 79, pid='<unknown>', name=<unknown>, GPU has")


def test_an_application_xid_hurts_nothing(root: Path) -> None:
    state.inject(root, 0, Fault(Kind.XID, 31))
    card = state.read(root)[0]
    assert (card.lost, card.ecc, card.recovery_action, card.last_xid) == (False, False, 0, 31)


def test_recovery_action_can_be_given(root: Path) -> None:
    state.inject(root, 0, Fault.parse("xid 154 recovery=2"))
    assert state.read(root)[0].recovery_action == 2
    assert "154, GPU recovery action changed from 0x0 (None) to 0x2" in (root / "kmsg").read_text()


@pytest.mark.parametrize("text", ["", "xid", "xid 0", "xid x", "xid 79 recovery=9", "explode", "lost now", "xid 1 2 3"])
def test_no_such_fault_is_refused_with_the_allowed_ones(text: str) -> None:
    with pytest.raises(Refused, match=r"use xid N"):
        Fault.parse(text)


def test_unknown_card_and_unknown_folder_are_named(root: Path) -> None:
    with pytest.raises(NotFound, match=r"no soft card 7 in .*0\.\.1"):
        state.inject(root, 7, Fault(Kind.LOST))
    with pytest.raises(NotFound, match="has no soft cards"):
        state.read(root / "elsewhere")


def test_a_file_of_another_version_is_refused(root: Path) -> None:
    path = root / "cards/0.card"
    path.write_bytes(path.read_bytes()[:4] + b"\x63" + path.read_bytes()[5:])
    with pytest.raises(Refused, match="no soft card of version 1"):
        state.read(root)


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 16},
        {"uuid": "GPU-x"},
        {"pci_address": "41:00.0"},
        {"memory_mib": 0},
    ],
)
def test_an_impossible_card_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    good = {"index": 0, "uuid": SPECS[0].uuid, "pci_address": "0000:41:00.0", "model": "m", "memory_mib": 1}
    with pytest.raises(Refused):
        state.create(tmp_path, [state.CardSpec(**{**good, **changes})])  # type: ignore[arg-type]
