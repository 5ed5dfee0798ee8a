"""The doctor as a whole: order, speed, checks that break or hang, and how a person reads it."""

from __future__ import annotations

import json
import threading
import time

import pytest

from kvmpool.cli import doctor as command
from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.doctor.run import CHECKS, findings
from tests.cli.served import kvmpool
from tests.doctor.place import Machine


def test_all_checks_answer_in_order_within_two_seconds(machine: Machine) -> None:
    begun = time.monotonic()
    found = list(findings(machine.place()))
    assert time.monotonic() - begun < 2
    assert [f.area for f in found] == [area for area, _ in CHECKS]
    assert len({(f.area, f.title) for f in found}) == len(CHECKS)


def test_a_check_that_breaks_or_hangs_is_a_fail_and_the_others_go_on(machine: Machine) -> None:
    gate = threading.Event()

    def hangs(place: Place) -> Finding:
        gate.wait(30)
        return Finding("gpu", "hangs", Level.PASS)

    def breaks(place: Place) -> Finding:
        raise ZeroDivisionError("oh")

    def sound(place: Place) -> Finding:
        return Finding("host", "sound", Level.PASS)

    checks = (("gpu", hangs), ("gpu", breaks), ("host", sound))
    first, second, third = findings(machine.place(), checks, deadline_s=0.3)
    gate.set()
    assert (first.level, first.detail) == (Level.FAIL, "no answer in 0.3 s")
    assert (second.title, second.level) == ("breaks", Level.FAIL)
    assert "ZeroDivisionError" in second.detail
    assert third.level is Level.PASS


@pytest.fixture
def _on_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(command, "Place", lambda **_: machine.place())
    return machine


@pytest.mark.usefixtures("_on_machine")
def test_a_person_reads_a_line_a_check_with_its_remedy_below() -> None:
    ran = kvmpool("doctor")
    assert ran.code == 1
    lines = ran.out.splitlines()
    at = next(i for i, line in enumerate(lines) if "NVML" in line)
    assert lines[at].endswith(": FAIL (not found)")
    assert lines[at + 1].strip().startswith("Next: install the NVIDIA driver")
    assert sum(" : " in line for line in lines) == len(CHECKS)
    columns = {line.index(" : ") for line in lines if " : " in line}
    assert len(columns) == 1
    assert lines[-1].endswith("FAIL")


@pytest.mark.usefixtures("_on_machine")
def test_a_program_reads_the_same_as_json() -> None:
    ran = kvmpool("doctor", "-o", "json")
    rows = json.loads(ran.out)
    assert ran.code == 1
    assert len(rows) == len(CHECKS)
    assert all(row["remedy"] for row in rows if row["level"] != "PASS")


def test_without_a_fail_the_exit_code_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    warned = Finding("host", "sound", Level.WARN, "almost", "look again")
    monkeypatch.setattr(command, "findings", lambda _: iter([warned]))
    ran = kvmpool("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith("0 PASS, 1 WARN, 0 FAIL\n")
