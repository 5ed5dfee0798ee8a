"""Checks of the NVIDIA side: the driver's libraries and the kernel log."""

from __future__ import annotations

import ctypes
import os

from kvmpool.doctor.finding import Finding, Level, Place

AREA = "gpu"
_INSTALL = "install the NVIDIA driver; to try without a GPU: kvmpool lab up"
_NVML_ERRORS = {
    9: "the driver is not loaded",
    18: "driver and library have different versions: a driver upgrade without a reboot",
}


def cuda_library(place: Place) -> Finding:
    title = "CUDA driver library (libcuda.so.1)"
    try:
        place.load("libcuda.so.1")
    except OSError as error:
        return Finding(AREA, title, Level.FAIL, _why(error), _INSTALL)
    return Finding(AREA, title, Level.PASS)


def nvml_library(place: Place) -> Finding:
    title = "NVML (libnvidia-ml.so.1)"
    try:
        nvml = place.load("libnvidia-ml.so.1")
    except OSError as error:
        return Finding(AREA, title, Level.FAIL, _why(error), _INSTALL)
    code = nvml.nvmlInit_v2()
    if code:
        return Finding(
            AREA, title, Level.FAIL, _NVML_ERRORS.get(code, f"nvmlInit answers {code}"), "nvidia-smi; dmesg | grep NVRM"
        )
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    if not count.value:
        return Finding(AREA, title, Level.WARN, "the driver shows no card", "nvidia-smi; lspci -d 10de:")
    return Finding(AREA, title, Level.PASS, "1 card" if count.value == 1 else f"{count.value} cards")


def kernel_log(place: Place) -> Finding:
    title = "kernel log (/dev/kmsg)"
    if os.access(place.at("/dev/kmsg"), os.R_OK):
        return Finding(AREA, title, Level.PASS)
    remedy = "run as root; in a container give it /dev/kmsg. Xids then come from NVML alone"
    return Finding(AREA, title, Level.WARN, "cannot be read", remedy)


def _why(error: OSError) -> str:
    """The loader's sentence, without the library's name, which the title has."""
    return "not found" if "No such file" in str(error) else str(error).partition(": ")[2] or str(error)


CHECKS = (cuda_library, nvml_library, kernel_log)
