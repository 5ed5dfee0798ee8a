"""How long a guest is without its GPU: from the fault until the next binding is ready and its relay points there."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

from kvmpool.lab.folder import Folder
from kvmpool.lab.pool import Lab
from tests.bench.figure import line
from tests.e2e.pool import Pool, until, vm

RUNS = 50
GOAL_S = 2.0


def run() -> bool:
    """Print median and maximum over RUNS failovers in a lab; whether the goal is met."""
    parent = Path(tempfile.mkdtemp(prefix="kp-"))
    lab = Lab(Folder(parent / "lab"))
    try:
        pool = Pool(lab, lab.up())
        taken = [_failover_s(pool) for _ in range(RUNS)]
    finally:
        lab.down()
        shutil.rmtree(parent)
    middle, worst = statistics.median(taken), max(taken)
    text = f"Xid 79 to the next binding served, {RUNS} runs"
    return line(text, f"median {middle:.2f} s, maximum {worst:.2f} s", f"maximum <= {GOAL_S:g} s", worst <= GOAL_S)


def _failover_s(pool: Pool) -> float:
    pool.reset()
    pool.start(vm(memory_mib=16), firmware=True)
    before = pool.ready_binding()
    began = time.monotonic()
    pool.lab.fault(str(before["card"]).partition("/")[2], "xid 79")
    until(lambda: (now := pool.binding()) and now["generation"] > before["generation"], 30.0, "no failover")
    return time.monotonic() - began
