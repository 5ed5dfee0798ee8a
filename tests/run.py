"""`make test`: the whole suite in three parts, their sum, and a look at what they left behind.

The first part shares the CPUs; the second (labs with real libvirtd and QEMU, and what measures time) runs alone; the
third is the VFIO lab.
Everything is under one temporary folder, whose name every process inherits: what outlives the run is found by it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

PARTS = {
    "not e2e and not alone": ("-n", "auto", "--dist", "worksteal"),
    "(e2e or alone) and not vfio": (),
    # Two of the VFIO lab's hosts beside each other: each emulates one CPU, and waits a lot.
    "vfio and not slow_vfio": ("-n", "2", "--dist", "loadfile"),
}
DEADLINE_S = 35 * 60.0
_FUZZ_S = {True: "240", False: "30"}  # for all targets together: in continuous integration, at home


def main() -> int:
    """Exit status: 0 only where every test passed and nothing is left."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as for ^C
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored, and its
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children would too
    scratch = Path(tempfile.mkdtemp(prefix="kt", dir="/tmp"))  # short: unix sockets are made below it
    scratch.chmod(0o755)  # as /tmp: QEMU and a test's other users reach their own
    counts: Counter[str] = Counter()
    failed: list[str] = []
    try:
        for number, (marks, options) in enumerate(PARTS.items()):
            print(f"== {marks} ==", flush=True)
            report = scratch / f"{number}.xml"
            try:
                failed += _part(report, marks, options, scratch, started + DEADLINE_S)
            finally:
                failed += _read(report, counts)
                report.unlink(missing_ok=True)
    except KeyboardInterrupt:
        failed.append("interrupted")
    finally:
        left = [*_processes(scratch), *_mounts(scratch), *_files(scratch)]
        failed += [f"left behind: {each}" for each in sorted(left)]
        shutil.rmtree(scratch, ignore_errors=True)
    for line in failed:
        print(f"FAILED {line}")
    seconds = time.monotonic() - started
    words = ", ".join(f"{counts[what]} {what}" for what in ("failed", "error", "passed", "skipped") if counts[what])
    print(f"== {words or 'no tests'} in {seconds:.0f}s ({seconds / 60:.1f} min) ==")
    return 1 if failed or not counts["passed"] else 0


def _part(report: Path, marks: str, options: Iterable[str], scratch: Path, deadline: float) -> list[str]:
    """Run one part; what is wrong with the run itself, as the tests' own failures are in the report."""
    fuzz_s = os.environ.get("KVMPOOL_FUZZ_S") or _FUZZ_S[os.environ.get("CI") == "true"]
    environment = {**os.environ, "TMPDIR": str(scratch), "KVMPOOL_FUZZ_S": fuzz_s}
    command = [sys.executable, "-m", "pytest", "-m", marks, *options, "--durations=15", f"--junitxml={report}"]
    pytest = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        code = pytest.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return [f"{marks}: not done {DEADLINE_S:.0f} s after the start"]
    finally:
        _end(pytest)
    return [] if code in (0, 1) else [f"{marks}: pytest ended with {code}"]


def _end(pytest: subprocess.Popen[bytes]) -> None:
    """Nothing where it has ended; else it gets a minute to say what it was at and to clean up."""
    if pytest.poll() is None:
        pytest.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            pytest.wait(60)
        pytest.kill()
        pytest.wait()


def _read(report: Path, counts: Counter[str]) -> list[str]:
    """Count a part's results; the names of what failed."""
    failed = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            result = next((word for tag, word in _RESULTS.items() if tag in kinds), "passed")
            counts[result] += 1
            if result in ("failed", "error"):
                failed.append(f"{case.get('classname')}::{case.get('name')}")
    return failed


_RESULTS = {"failure": "failed", "error": "error", "skipped": "skipped"}


def _processes(scratch: Path) -> list[str]:
    """Processes that a test started and nobody ended; they are ended now."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={scratch}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                left.append(f"process {folder.name}: {words}")
                os.kill(int(folder.name), signal.SIGKILL)
    return left


def _mounts(scratch: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [f"mount {line.split()[4]}" for line in lines if str(scratch) in line]


def _files(scratch: Path) -> list[str]:
    """pytest's own folder is no surprise."""
    return [f"file {path}" for path in scratch.iterdir() if not path.name.startswith("pytest-of-")]


if __name__ == "__main__":
    sys.exit(main())
