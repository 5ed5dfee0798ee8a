"""`kvmpool lab` says what it cannot do, and what to do next, before it changes anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvmpool.cli.lab import lab
from kvmpool.errors import Denied, NotFound, Refused, Unreachable
from kvmpool.lab.folder import Folder, State
from kvmpool.lab.process import ProcessId

_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")


def test_the_commands_are_there() -> None:
    told = CliRunner().invoke(lab, ["--help"]).output
    for command in ("up", "down", "status", "fault", "run", "demo"):
        assert f"\n  {command} " in told


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    error = CliRunner().invoke(lab, ["up", "--dir", str(tmp_path)]).exception
    assert isinstance(error, Denied)
    assert "sudo" in str(error)


@_ROOT
@pytest.mark.parametrize("words", [["status"], ["run", "vm0", "--", "true"], ["fault", "0", "xid", "79"]])
def test_without_a_lab_it_says_how_to_get_one(tmp_path: Path, words: list[str]) -> None:
    command, *rest = words
    error = CliRunner().invoke(lab, [command, "--dir", str(tmp_path / "none"), *rest]).exception
    assert isinstance(error, NotFound)
    assert "kvmpool lab up" in str(error)


@_ROOT
def test_down_without_a_lab_is_no_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(lab, ["down", "--dir", str(tmp_path / "none")])
    assert done.exit_code == 0
    assert "no lab in" in done.output


@_ROOT
def test_a_fault_that_does_not_exist_lists_those_that_do(tmp_path: Path) -> None:
    error = CliRunner().invoke(lab, ["fault", "--dir", str(tmp_path), "0", "explode"]).exception
    assert isinstance(error, Refused)
    assert "xid N" in str(error)


@_ROOT
def test_the_status_of_a_lab_whose_host_is_dead_says_down(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "lab")
    with folder.created():
        folder.write(State({"h0": ProcessId(1, 1)}, up=True))
    done = CliRunner().invoke(lab, ["status", "--dir", str(folder.path), "-o", "json"])
    assert json.loads(done.output)["host"] == "down"
    assert CliRunner().invoke(lab, ["down", "--dir", str(folder.path)]).output == "the lab is gone\n"
    assert not folder.path.exists()


def _vfio_folder(path: Path) -> Folder:
    """Of a VFIO lab whose host has died."""
    folder = Folder(path)
    with folder.created():
        folder.write(State({"l1": ProcessId(1, 1)}, up=True, vfio=True))
    return folder


@_ROOT
def test_a_vfio_lab_whose_host_is_dead_is_shown_and_taken_down(tmp_path: Path) -> None:
    folder = _vfio_folder(tmp_path / "lab")
    shown = CliRunner().invoke(lab, ["status", "--dir", str(folder.path), "-o", "json"])
    body = json.loads(shown.output)
    assert body["host"] == "down"
    assert [card["name"] for card in body["cards"]] == ["gpu0", "gpu1", "gpu2", "gpu3", "gpu4"]
    for words in (["exec", "--", "true"], ["fault", "gpu1", "remove"], ["guest", "vm0"]):
        command, *rest = words
        error = CliRunner().invoke(lab, [command, "--dir", str(folder.path), *rest]).exception
        assert isinstance(error, Unreachable)
        assert "kvmpool lab up --vfio" in str(error)
    assert CliRunner().invoke(lab, ["down", "--dir", str(folder.path)]).output == "the lab is gone\n"
    assert not folder.path.exists()


@_ROOT
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "vm0", "--", "true"], "no operating system"),
        (["fault", "gpu1", "explode"], "falls-off"),
        (["fault", "gpu1", "xid", "79"], "falls-off"),
    ],
)
def test_what_a_vfio_lab_cannot_do_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    folder = _vfio_folder(tmp_path / "lab")
    command, *rest = words
    error = CliRunner().invoke(lab, [command, "--dir", str(folder.path), *rest]).exception
    assert isinstance(error, Refused)
    assert says in str(error)


@_ROOT
@pytest.mark.parametrize("words", [["reboot"], ["guest", "vm0", "--card", "gpu1"], ["guest", "vm0", "--deaf"]])
def test_what_only_a_vfio_lab_can_do_is_refused_elsewhere(tmp_path: Path, words: list[str]) -> None:
    folder = Folder(tmp_path / "lab")
    with folder.created():
        folder.write(State({"h0": ProcessId(1, 1)}, up=True))
    command, *rest = words
    error = CliRunner().invoke(lab, [command, "--dir", str(folder.path), *rest]).exception
    assert isinstance(error, Refused)
    assert "kvmpool lab up --vfio" in str(error)
