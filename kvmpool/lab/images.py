"""What the lab's guests boot: the Linux image with kvmpool's shim and the example programs, and the firmware image.

Compiled things are kept in the cache under a hash of what they are made from.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmpool.errors import NotFound
from kvmpool.lab import initramfs, nvrtc, process
from kvmpool.lab.folder import cache_folder
from kvmpool.lab.kernel import kernel
from kvmpool.native import native

_GUEST = Path(__file__).with_name("guest")
_COMPILE_S = 120.0  # a second on an idle machine


@dataclass(frozen=True, slots=True)
class LinuxImage:
    """`initrd` is the archive itself: it is small and differs whenever the shim does."""

    kernel: Path
    initrd: bytes


def linux(extra: Sequence[Path] = ()) -> LinuxImage:
    """The Linux guest with the shim, the programs and these. Raises NotFound where something is not built."""
    chosen = kernel()
    libraries = (native("shim"), native("shim-nvml"))
    return LinuxImage(chosen.image, initramfs.build(chosen, libraries, (*programs(), *extra)))


def linux_kernel() -> Path:
    return kernel().image


def programs() -> tuple[Path, ...]:
    """The example CUDA programs, which find libcuda.so.1 when they run, and their kernels as PTX."""
    folder = _GUEST / "programs"
    headers = [path.read_bytes() for path in sorted(folder.glob("*.h"))]
    built = []
    for source in sorted(folder.glob("*.c")):

        def compile_it(target: Path, source: Path = source) -> None:
            flags = ("-O2", "-std=gnu11", "-Wall")
            process.run(["gcc", *flags, "-o", target, source, "-ldl", "-lm"], timeout_s=_COMPILE_S)

        built.append(_kept(source.stem, [source.read_bytes(), *headers], compile_it))
    for source in sorted(folder.glob("*.cu")):
        text = source.read_text(encoding="utf-8")
        built.append(_kept(f"{source.stem}.ptx", [text.encode()], _ptx_writer(source.name, text)))
    return tuple(built)


def _ptx_writer(name: str, text: str) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        target.write_bytes(nvrtc.ptx(name, text))

    return write


def firmware() -> Path:
    """The ROM of the guest without an operating system (guest/firmware)."""
    folder = _GUEST / "firmware"
    sources = [folder / name for name in ("start.S", "main.c")]
    script = folder / "firmware.ld"

    def compile_it(target: Path) -> None:
        elf = target.with_suffix(".elf")
        flags = "-m32 -march=i386 -Os -ffreestanding -fno-pic -fno-pie -fno-stack-protector -nostdlib -static"
        tidy = "-fno-asynchronous-unwind-tables -Wall -Wextra -Werror -Wl,--build-id=none -Wl,-m,elf_i386"
        process.run(
            ["gcc", *flags.split(), *tidy.split(), f"-Wl,-T,{script}", "-o", elf, *sources], timeout_s=_COMPILE_S
        )
        process.run(["objcopy", "-O", "binary", "--gap-fill", "0", elf, target], timeout_s=_COMPILE_S)
        elf.unlink()

    return _kept("firmware.bin", [path.read_bytes() for path in (*sources, script)], compile_it)


def memlock() -> Path:
    """The library with which libvirtd takes QEMU's limit of pinned memory for raised (memlock.c)."""
    source = Path(__file__).with_name("memlock.c")

    def compile_it(target: Path) -> None:
        process.run(["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, source], timeout_s=_COMPILE_S)

    return _kept("memlock.so", [source.read_bytes()], compile_it)


def _kept(name: str, inputs: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """The file that `make` writes from `inputs`, made once; its folder tells versions apart, its name stays `name`."""
    digest = hashlib.sha256()
    for data in (Path(__file__).read_bytes(), *inputs):
        digest.update(hashlib.sha256(data).digest())
    folder = cache_folder() / "built" / digest.hexdigest()[:16]
    target = folder / name
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
            beside = Path(scratch) / name
            make(beside)
            if not beside.exists():
                raise NotFound(f"{name} was not made. Next: see what gcc says")
            os.replace(beside, target)
    return target
