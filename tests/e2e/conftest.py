"""A lab for the end-to-end tests: real libvirtd, QEMU, kvmpoold, workers and relays; only the cards are soft."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmpool.errors import NotFound
from kvmpool.lab import process
from kvmpool.lab.folder import Folder
from kvmpool.lab.pool import Lab
from kvmpool.native import native
from tests.e2e.hostdev import Bench
from tests.e2e.pool import Pool

_POOL = pytest.StashKey[Pool]()
_BENCH = pytest.StashKey[Bench]()
_SOURCES = Path(__file__).with_name("programs")
_PROGRAMS = ("libvirtd", "virtlogd", "virsh", "qemu-system-x86_64", "busybox", "nsenter", "ip", "gcc")


def _missing() -> str:
    """What this machine lacks for a lab, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    if absent := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"needs {', '.join(absent)}"
    try:
        for name in ("shim", "shim-nvml", "worker", "relay", "softgpu-cuda", "softgpu-nvml"):
            native(name)
    except NotFound as error:
        return str(error)
    return ""


@pytest.fixture(scope="session", autouse=True)
def _machine_can_run_a_lab() -> None:
    if missing := _missing():
        pytest.skip(missing)


@pytest.fixture
def lab_folder() -> Iterator[Path]:
    """A folder for a lab of the test's own, which is gone after the test whatever happened."""
    parent = Path(tempfile.mkdtemp(prefix="kp-"))
    yield parent / "lab"
    Lab(Folder(parent / "lab")).down()
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture(scope="session")
def _session_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    parent = Path(tempfile.mkdtemp(prefix="kp-"))
    lab = Lab(Folder(parent / "lab"))
    try:
        pool = Pool(lab, lab.up(programs=_compiled(parent)))
        request.config.stash[_POOL] = pool
        yield pool
    finally:
        lab.down()
        shutil.rmtree(parent)


def _compiled(target: Path) -> tuple[Path, ...]:
    """The tests' own guest programs."""
    hog, loader, monitor, pinned = (target / name for name in ("hog", "loader", "monitor", "pinned"))
    gcc = ["gcc", "-O2", "-Wall", "-Werror"]
    process.run([*gcc, "-o", hog, _SOURCES / "hog.c", native("shim")], timeout_s=60)
    # ld warns that a static program's dlopen needs the same glibc at run time: the guest has it
    process.run(["gcc", "-O2", "-static", "-o", loader, _SOURCES / "loader.c"], timeout_s=60)
    process.run([*gcc, "-o", monitor, _SOURCES / "monitor.c"], timeout_s=60)
    process.run([*gcc, "-o", pinned, _SOURCES / "pinned.c", native("shim")], timeout_s=60)
    return hog, loader, monitor, pinned


@pytest.fixture
def pool(_session_pool: Pool) -> Pool:
    """The session's lab as a test may expect it: no domains, both cards healthy, every daemon running."""
    _session_pool.reset()
    _session_pool.forget_logs()
    return _session_pool


@pytest.fixture
def pool_without_kvmpoold(_session_pool: Pool) -> Pool:
    """The session's lab with no domain running, no kvmpoold, new cards and an empty store."""
    _session_pool.end_domains()
    _session_pool.forget_everything()
    _session_pool.forget_logs()
    return _session_pool


@pytest.fixture(scope="session")
def _session_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    parent = Path(tempfile.mkdtemp(prefix="kp-"))
    lab = Lab(Folder(parent / "lab"))
    try:
        bench = Bench(lab, lab.up(passthrough=True))
        request.config.stash[_BENCH] = bench
        yield bench
    finally:
        lab.down()
        shutil.rmtree(parent)


@pytest.fixture
def bench(_session_bench: Bench) -> Bench:
    """The session's lab host that passes cards through: no domains, both cards healthy on vfio-pci."""
    _session_bench.clean()
    _session_bench.forget_logs()
    return _session_bench


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure in a lab shows what its daemons said during the test."""
    report = yield
    names = getattr(item, "fixturenames", ())
    for lab in (item.config.stash.get(_POOL, None), item.config.stash.get(_BENCH, None)):
        if report.failed and lab is not None and ("bench" in names) is isinstance(lab, Bench):
            report.sections.extend(lab.logs())
    return report
