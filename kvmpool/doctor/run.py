"""Runs the checks side by side and tells them in order. One that breaks or hangs is a FAIL of its own.

The threads are daemons: a driver that never answers must not keep the doctor from leaving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvmpool.doctor import gpu, host, libvirt, passthrough, pool
from kvmpool.doctor.finding import PROGRAM_DEADLINE_S, Finding, Level, Place

Check = Callable[[Place], Finding]

CHECKS: tuple[tuple[str, Check], ...] = tuple(
    (area.AREA, check) for area in (host, libvirt, gpu, passthrough, pool) for check in area.CHECKS
)
DEADLINE_S = PROGRAM_DEADLINE_S + 1  # of all checks together: a program's own deadline speaks first


def findings(
    place: Place, checks: tuple[tuple[str, Check], ...] = CHECKS, deadline_s: float = DEADLINE_S
) -> Iterator[Finding]:
    """Every finding, area by area, each as soon as it and those before it are known."""
    jobs = [_Job(area, check) for area, check in checks]
    for job in jobs:
        threading.Thread(target=job.run, args=(place,), daemon=True).start()
    until = time.monotonic() + deadline_s
    for job in jobs:
        job.done.wait(max(0.0, until - time.monotonic()))
        yield job.finding or _fault(job, f"no answer in {deadline_s:g} s", "look at dmesg for a driver that hangs")


@dataclass(slots=True)
class _Job:
    area: str
    check: Check
    finding: Finding | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, place: Place) -> None:
        try:
            self.finding = self.check(place)
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            self.finding = _fault(self, f"the check itself failed: {error!r}", "report it as a fault of kvmpool")
        self.done.set()


def _fault(job: _Job, detail: str, remedy: str) -> Finding:
    return Finding(job.area, job.check.__name__.replace("_", " "), Level.FAIL, detail, remedy)
