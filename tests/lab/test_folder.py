"""A lab's folder: its state survives, a foreign folder is never touched, removal can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmpool.errors import NotFound, Refused
from kvmpool.lab.folder import Folder, State
from kvmpool.lab.process import ProcessId


def test_the_state_is_read_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "lab")
    with folder.created():
        assert folder.read() == State()
    state = State({"h0": ProcessId(12, 3456), "h1": None}, up=True)
    folder.write(state)
    assert folder.read() == state


def test_a_folder_that_holds_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(Refused, match="is not empty"), Folder(tmp_path).created():
        pass
    with pytest.raises(NotFound), Folder(tmp_path).opened():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_whose_creation_was_cut_off_is_an_empty_lab(tmp_path: Path) -> None:
    (tmp_path / "state.json.new").write_text("{")
    folder = Folder(tmp_path)
    assert folder.read() == State()
    folder.remove()
    assert not tmp_path.exists()


def test_removal_takes_the_state_last(tmp_path: Path) -> None:
    """A removal that is cut off leaves a folder whose state still names every process."""
    folder = Folder(tmp_path / "lab")
    with folder.created():
        pass
    (folder.path / "h0/run").mkdir(parents=True)
    (folder.path / "h0/link").symlink_to(tmp_path)
    folder.remove()
    assert not folder.path.exists()
    assert tmp_path.exists()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "lab")
    with folder.created():
        with pytest.raises(Refused, match="at work there"), folder.created():
            pass
        with pytest.raises(Refused, match="at work there"), folder.opened():
            pass


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"v": 2, "keepers": {}, "up": false}')
    with pytest.raises(Refused, match="version 2"):
        Folder(tmp_path).read()
