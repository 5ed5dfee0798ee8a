"""Extracting the kernel, and the order of its modules."""

from __future__ import annotations

import lzma
import struct
import subprocess
from pathlib import Path

import pytest

from kvmpool.lab.kernel import decompressed, modules

_IMAGE = b"\x7fELF" + bytes(range(256)) * 40


def _bzimage(payload: bytes) -> bytes:
    """As far as boot.rst says where the payload is: 2 setup sectors, the payload 64 bytes into the rest."""
    header = bytearray(3 * 512 + 64)
    header[0x1F1] = 2
    struct.pack_into("<II", header, 0x248, 64, len(payload))
    return bytes(header) + payload + b"\0" * 100


def _lz4(data: bytes) -> bytes:
    packed = subprocess.run(["lz4", "-l", "-c"], input=data, capture_output=True, check=True).stdout
    return packed + struct.pack("<I", len(data))  # as the kernel's build appends it


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(lzma.compress(_IMAGE, check=lzma.CHECK_CRC32), id="xz"),
        pytest.param(lzma.compress(_IMAGE, check=lzma.CHECK_CRC32) + struct.pack("<I", len(_IMAGE)), id="xz-with-size"),
        pytest.param(_lz4(_IMAGE), id="lz4"),
    ],
)
def test_the_vmlinux_comes_out_of_a_bzimage(payload: bytes) -> None:
    assert decompressed(_bzimage(payload)) == _IMAGE


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x28\xb5\x2f\xfd" + b"x" * 60, id="zstd"),
        pytest.param(lzma.compress(b"not an ELF file"), id="not-elf"),
    ],
)
def test_a_payload_that_cannot_be_extracted_leaves_the_bzimage_to_boot(payload: bytes) -> None:
    assert decompressed(_bzimage(payload)) is None


def _module(tree: Path, name: str, depends: str, packed: bool = False) -> None:
    data = b"\x7fELF....\0license=GPL\0depends=" + depends.encode() + b"\0name=" + name.encode() + b"\0"
    path = tree / f"drivers/{name}.ko{'.xz' if packed else ''}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(data) if packed else data)


def test_a_module_comes_after_all_that_it_depends_on(tmp_path: Path) -> None:
    _module(tmp_path, "virtio", "")
    _module(tmp_path, "virtio-ring", "virtio")
    _module(tmp_path, "net_failover", "failover", packed=True)
    _module(tmp_path, "failover", "")
    _module(tmp_path, "virtio_net", "virtio,virtio_ring,net_failover")
    names = [path.name.split(".")[0] for path in modules(tmp_path, ["virtio_net", "virtio", "built_in"])]
    assert sorted(names) == ["failover", "net_failover", "virtio", "virtio-ring", "virtio_net"]
    for before, after in [("virtio", "virtio-ring"), ("failover", "net_failover"), ("net_failover", "virtio_net")]:
        assert names.index(before) < names.index(after)
