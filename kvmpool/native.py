"""Where the built C programs and shared data files are: in a wheel, an editable install or a source checkout.

Knows nothing of what they do.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kvmpool.errors import NotFound

_PACKAGE = Path(__file__).parent

# name -> (path below kvmpool/_native in a wheel, path below build/ in a checkout)
_NATIVE = {
    "shim": ("shim/libcuda.so.1", "kvmpool/dataplane/libcuda.so.1"),
    "shim-nvml": ("shim/libnvidia-ml.so.1", "kvmpool/dataplane/libnvidia-ml.so.1"),
    "worker": ("bin/kvmpool-worker", "kvmpool/dataplane/kvmpool-worker"),
    "relay": ("bin/kvmpool-relay", "kvmpool/dataplane/kvmpool-relay"),
    "acceptor": ("bin/kvmpool-acceptor", "kvmpool/dataplane/kvmpool-acceptor"),
    "softgpu-cuda": ("softgpu/libcuda.so.1", "kvmpool/softgpu/libcuda.so.1"),
    "softgpu-nvml": ("softgpu/libnvidia-ml.so.1", "kvmpool/softgpu/libnvidia-ml.so.1"),
}


def native(name: str) -> Path:
    """Absolute path of a built program or library. Raises NotFound, naming how to build it."""
    wheel, checkout = _NATIVE[name]
    for path in (_PACKAGE / "_native" / wheel, _PACKAGE.parent / "build" / checkout):
        if path.exists():
            return path
    editable = resources.files("kvmpool").joinpath("_native", *wheel.split("/"))
    if editable.is_file():
        return Path(str(editable))
    raise NotFound(f"{wheel} is not built. Next: make build")


def data(folder: str, name: str) -> Path:
    """Absolute path of a file of `hooks/` or `xml/`. Raises NotFound."""
    for path in (_PACKAGE / "_data" / folder / name, _PACKAGE.parent / folder / name):
        if path.exists():
            return path
    raise NotFound(f"{folder}/{name} is missing from this installation. Next: install kvmpool again")
