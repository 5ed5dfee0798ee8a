"""The guests' kernels: Debian's packages, downloaded and unpacked into the cache, never installed.

The cloud one is small and boots faster; the full one has 9p, VFIO and PCI's own hot plug. Under TCG an uncompressed
vmlinux, started by PVH, is a second faster than a bzImage that unpacks itself in the guest.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvmpool.errors import Unreachable
from kvmpool.lab import process
from kvmpool.lab.folder import cache_folder

_DOWNLOAD_S = 300.0  # 27 MB; the full one 70 MB
_UNPACK_S = 60.0
_XZ_MAGIC, _LZ4_MAGIC, _ELF_MAGIC = b"\xfd7zXZ\0", b"\x02\x21\x4c\x18", b"\x7fELF"


class Flavour(Enum):
    """Debian's metapackage for it, which names the version."""

    CLOUD = "linux-image-cloud-amd64"
    FULL = "linux-image-amd64"


_KEPT = {Flavour.CLOUD: "kernel", Flavour.FULL: "kernel-full"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel package. `image` is what QEMU boots: vmlinux where it could be extracted, else vmlinuz."""

    version: str
    image: Path
    tree: Path  # CLOUD: lib/modules/VERSION/kernel; FULL: lib/modules/VERSION, with what modprobe reads


def kernel(flavour: Flavour = Flavour.CLOUD) -> Kernel:
    """The cached kernel, or the one that apt would install now. Raises Unreachable with apt's words."""
    kept = cache_folder() / _KEPT[flavour]
    kept.mkdir(exist_ok=True)
    if not (found := sorted(path for path in kept.iterdir() if not path.name.startswith("."))):
        found = [_download(kept, flavour)]
    return _kernel_in(found[-1])


def _kernel_in(folder: Path) -> Kernel:
    image = folder / "vmlinux"
    return Kernel(folder.name, image if image.exists() else folder / "vmlinuz", folder / "modules")


def _download(kept: Path, flavour: Flavour) -> Path:
    """Unpack the package beside its final place and rename: a cut download leaves no half kernel."""
    depends = process.run(["apt-cache", "depends", flavour.value], timeout_s=30).stdout
    package = re.search(r"Depends: (linux-image-(\S+))", depends)
    if package is None:
        raise Unreachable(f"apt does not know {flavour.value}. Next: apt-get update")
    with tempfile.TemporaryDirectory(dir=kept, prefix=".new-") as text:
        scratch = Path(text)
        scratch.chmod(0o755)  # else apt warns that its own user may not write there
        process.run(["sh", "-c", 'cd "$1" && apt-get download "$2"', "sh", scratch, package[1]], timeout_s=_DOWNLOAD_S)
        archive = next(scratch.glob("*.deb"))
        process.run(["dpkg-deb", "-x", archive, scratch / "unpacked"], timeout_s=_UNPACK_S)
        version, unpacked, made = package[2], scratch / "unpacked", scratch / "made"
        made.mkdir()
        shutil.move(unpacked / f"boot/vmlinuz-{version}", made / "vmlinuz")
        shutil.move(_modules_of(unpacked, version, flavour), made / "modules")
        if (image := decompressed((made / "vmlinuz").read_bytes())) is not None:
            (made / "vmlinux").write_bytes(image)
        with suppress(OSError):  # another lab was faster
            os.replace(made, kept / version)
    return kept / version


def _modules_of(unpacked: Path, version: str, flavour: Flavour) -> Path:
    tree = unpacked / "lib/modules" / version
    if flavour is Flavour.CLOUD:
        return tree / "kernel"
    process.run(["depmod", "-b", unpacked, version], timeout_s=_UNPACK_S)  # as the package does when it is installed
    return tree


def decompressed(bzimage: bytes) -> bytes | None:
    """The vmlinux inside a bzImage (Linux, Documentation/x86/boot.rst: setup_sects at 0x1f1, payload_offset at 0x248).

    None where its compression is neither xz nor lz4, or it holds no ELF file: then the bzImage itself is booted.
    """
    setup_sectors = bzimage[0x1F1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = bzimage[start : start + length]
    if payload.startswith(_XZ_MAGIC):
        image = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(_LZ4_MAGIC) and shutil.which("lz4"):
        image = _lz4(payload[:-4])  # the last four bytes are the size of the result, for the kernel's own decompressor
    else:
        return None
    return image if image.startswith(_ELF_MAGIC) else None


def _lz4(payload: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        packed, image = Path(folder, "packed"), Path(folder, "image")
        packed.write_bytes(payload)
        process.run(["lz4", "-q", "-d", packed, image], timeout_s=_UNPACK_S)
        return image.read_bytes()


def modules(tree: Path, wanted: Iterable[str]) -> tuple[Path, ...]:
    """The files of the `wanted` modules and of what they depend on, in an order in which insmod takes them.

    A wanted module that is no file is built into the kernel (or not in this version) and is left out.
    """
    files = {_module_name(path): path for path in tree.rglob("*.ko*")}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered or name not in files:
            return
        for dependency in _depends(files[name]):
            add(dependency)
        ordered[name] = files[name]

    for name in wanted:
        add(name)
    return tuple(ordered.values())


def module_bytes(path: Path) -> bytes:
    """The module as insmod wants it: uncompressed."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _module_name(path: Path) -> str:
    return path.name.split(".ko")[0].replace("-", "_")


def _depends(path: Path) -> list[str]:
    """From the module's .modinfo section: `depends=a,b`."""
    found = re.search(rb"\0depends=([^\0]*)\0", module_bytes(path))
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []
