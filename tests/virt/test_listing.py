"""Which process is a domain's QEMU: only one that was started for that very domain, whatever a pid file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmpool.core.model import DomainUuid
from kvmpool.virt.listing import qemu_pid

UUID = DomainUuid("5c1f0a52-2f3b-4a4e-9b68-0d6f3f2d7c11")
QEMU = ("qemu-system-x86_64", "-name", "guest=vm0", "-uuid", UUID, "-nodefaults")


def found(folder: Path, text: str, words: tuple[str, ...], name: str = "vm0") -> int:
    (folder / "4711").mkdir()
    (folder / "4711" / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (folder / "vm0.pid").write_text(text)
    return qemu_pid(name, UUID, folder, folder)


def test_the_qemu_of_a_domain_is_found(tmp_path: Path) -> None:
    assert found(tmp_path, "4711", QEMU) == 4711


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4712", QEMU),  # it has ended
        ("4711", ("sleep", "60")),  # it has ended, and the number is somebody else's
        ("4711", ("grep", UUID)),
        ("4711", tuple(UUID.replace("5c", "6c") if word == UUID else word for word in QEMU)),
        ("", QEMU),  # libvirt is writing it
        ("-1\n", QEMU),
        ("4711", ()),  # a zombie
    ],
)
def test_a_process_that_is_not_surely_it_is_none(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    assert found(tmp_path, text, words) == 0


def test_a_domain_without_a_pid_file_has_no_known_process(tmp_path: Path) -> None:
    assert found(tmp_path, "4711", QEMU, name="vm1") == 0
