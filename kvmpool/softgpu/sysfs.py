"""A soft card's folder in a fake sysfs: what a real card shows under /sys/bus/pci/devices/ADDRESS.

Plain files, no mocks: inventory and health code is pointed at the tree by its movable root.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

CONFIG_BYTES = 4096
VENDOR = 0x10DE
DEVICE = 0x2330  # H100 SXM5: what a compute capability 9.0 card is
SUBSYSTEM_DEVICE = 0x16C1
CLASS = 0x030200  # 3D controller
_BARS = ((0x9200000000, 16 << 20), (0x8000000000, 128 << 30), (0x9201000000, 32 << 20))  # registers, memory, aperture


def device_dir(root: Path, address: str) -> Path:
    """The card's folder below the softgpu folder `root`."""
    return root / "sys/bus/pci/devices" / address


def create_device(root: Path, address: str, numa_node: int, iommu_group: int) -> None:
    """Make (or remake) the folder of the card at `address`, bound to the driver `nvidia`."""
    bus = root / "sys/bus/pci"
    driver = bus / "drivers/nvidia"
    group = root / f"sys/kernel/iommu_groups/{iommu_group}"
    for folder in (driver, bus / "drivers/vfio-pci", group / "devices", device_dir(root, address)):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("bind", "unbind", "new_id", "remove_id"):
        (driver / name).touch()
        (bus / "drivers/vfio-pci" / name).touch()
    (bus / "drivers_probe").touch()
    (bus / "rescan").touch()
    folder = device_dir(root, address)
    for name, text in _texts(address, numa_node).items():
        _replace(folder / name, text.encode())
    _replace(folder / "config", config_space())
    _link(folder / "driver", "../../drivers/nvidia")
    _link(driver / address, f"../../devices/{address}")
    _link(folder / "iommu_group", f"../../../../kernel/iommu_groups/{iommu_group}")
    _link(group / "devices" / address, f"../../../../bus/pci/devices/{address}")


def lose_device(root: Path, address: str) -> None:
    """The card no longer answers on the bus: reads of its config space give all ones."""
    _replace(device_dir(root, address) / "config", b"\xff" * CONFIG_BYTES)


def find_device(root: Path, address: str) -> None:
    """Its config space reads again."""
    _replace(device_dir(root, address) / "config", config_space())


def remove_device(root: Path, address: str) -> None:
    """The address leaves the bus."""
    (root / "sys/bus/pci/drivers/nvidia" / address).unlink(missing_ok=True)
    shutil.rmtree(device_dir(root, address), ignore_errors=True)


def config_space() -> bytes:
    """4 KiB: a type 0 header, then PM (0x40), MSI (0x48), PCIe endpoint with FLR (0x60), and extended AER (0x100)."""
    config = bytearray(CONFIG_BYTES)
    struct.pack_into("<HHHH", config, 0x00, VENDOR, DEVICE, 0x0006, 0x0010)  # memory + bus master; capability list
    struct.pack_into("<I", config, 0x08, CLASS << 8 | 0xA1)
    for index, (start, _size) in enumerate(_BARS):
        kind = 0x4 if index == 0 else 0xC  # 64 bit; the large ones prefetchable
        struct.pack_into("<Q", config, 0x10 + 8 * index, start | kind)
    struct.pack_into("<HH", config, 0x2C, VENDOR, SUBSYSTEM_DEVICE)
    config[0x34] = 0x40
    config[0x3C:0x3E] = bytes((0xFF, 1))
    struct.pack_into("<BBH", config, 0x40, 0x01, 0x48, 0x0003)
    struct.pack_into("<BBH", config, 0x48, 0x05, 0x60, 0x0080)
    struct.pack_into("<BBH", config, 0x60, 0x10, 0x00, 0x0002)
    struct.pack_into("<I", config, 0x64, 0x10008000)  # function level reset, role-based error reporting
    struct.pack_into("<I", config, 0x6C, 0x00456105)  # link: 32 GT/s x16
    struct.pack_into("<H", config, 0x72, 0x1105)
    struct.pack_into("<I", config, 0x100, 0x00020001)  # AER, last
    return bytes(config)


def _texts(address: str, numa_node: int) -> dict[str, str]:
    none = f"0x{0:016x} 0x{0:016x} 0x{0:016x}"
    resource = []
    for start, size in _BARS:
        resource += [f"0x{start:016x} 0x{start + size - 1:016x} 0x000000000014220c", none]
    resource += [none] * 7
    ids = f"{VENDOR:04X}:{DEVICE:04X}"
    modalias = f"pci:v{VENDOR:08X}d{DEVICE:08X}sv{VENDOR:08X}sd{SUBSYSTEM_DEVICE:08X}bc03sc02i00"
    uevent = f"DRIVER=nvidia\nPCI_CLASS={CLASS:X}\nPCI_ID={ids}\n"
    uevent += f"PCI_SUBSYS_ID={VENDOR:04X}:{SUBSYSTEM_DEVICE:04X}\nPCI_SLOT_NAME={address}\nMODALIAS={modalias}\n"
    return {
        "vendor": f"0x{VENDOR:04x}\n",
        "device": f"0x{DEVICE:04x}\n",
        "class": f"0x{CLASS:06x}\n",
        "revision": "0xa1\n",
        "subsystem_vendor": f"0x{VENDOR:04x}\n",
        "subsystem_device": f"0x{SUBSYSTEM_DEVICE:04x}\n",
        "numa_node": f"{numa_node}\n",
        "resource": "\n".join(resource) + "\n",
        "uevent": uevent,
        "modalias": modalias + "\n",
        "driver_override": "(null)\n",
        "enable": "1\n",
        "power_state": "D0\n",
        "irq": "16\n",
        "local_cpulist": "0-1\n",
        "reset_method": "flr bus\n",
        "current_link_speed": "32.0 GT/s PCIe\n",
        "current_link_width": "16\n",
        "max_link_speed": "32.0 GT/s PCIe\n",
        "max_link_width": "16\n",
        "aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0\n",
        "aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0\n",
        "aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 0\n",
        "remove": "",
        "reset": "",
        "rescan": "",
    }


def _replace(path: Path, data: bytes) -> None:
    """A reader sees the old bytes or the new ones."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    temporary.rename(path)


def _link(path: Path, target: str) -> None:
    if not path.is_symlink():
        os.symlink(target, path)
