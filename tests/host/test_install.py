"""Joining and leaving on a tree of files, and the hook as it then lies there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvmpool.errors import Refused
from kvmpool.host import install

CLAIMED = (
    '<domain><metadata><k:claims xmlns:k="urn:kvmpool:domain:1"><k:claim name="gpu0"/></k:claims></metadata></domain>'
)


def _tree(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


@pytest.mark.parametrize("units", [False, True])
def test_join_then_leave_gives_back_the_tree_as_it_was(tmp_path: Path, units: bool) -> None:
    (tmp_path / "etc/libvirt/hooks").mkdir(parents=True)
    before = _tree(tmp_path)
    install.apply(install.plan_join(tmp_path, units=units))
    assert os.access(tmp_path / install.HOOK, os.X_OK)
    assert (tmp_path / install.UNIT).exists() == units
    install.apply(install.plan_leave(tmp_path))
    assert _tree(tmp_path) == before


def test_both_are_idempotent(tmp_path: Path) -> None:
    install.apply(install.plan_join(tmp_path, units=True))
    assert install.plan_join(tmp_path, units=True).actions == ()
    install.apply(install.plan_leave(tmp_path))
    assert install.plan_leave(tmp_path) == install.Plan(())


def test_a_plan_alone_changes_nothing(tmp_path: Path) -> None:
    plan = install.plan_join(tmp_path, units=True)
    assert _tree(tmp_path) == {}
    assert any(str(action).startswith(f"write {tmp_path / install.HOOK} (mode 0755") for action in plan.actions)


def test_the_installed_hook_runs_and_finds_its_client_and_settings(tmp_path: Path) -> None:
    socket = tmp_path / "nobody.sock"
    install.apply(install.plan_join(tmp_path, socket=socket, deadline_s=1.0))
    call = [str(tmp_path / install.HOOK), "vm0", "prepare", "begin", "-"]
    refused = subprocess.run(call, input=CLAIMED.encode(), capture_output=True, check=False, timeout=10)
    assert refused.returncode == 1
    assert str(socket) in refused.stderr.decode()
    subprocess.run(call, input=b"<domain/>", check=True, timeout=10)


def test_nothing_but_the_hook_itself_ever_lies_in_qemu_d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    perform = install._perform

    def watched(action: install.Action) -> None:
        perform(action)
        seen.update(path.name for path in (tmp_path / "etc/libvirt/hooks/qemu.d").glob("*"))

    monkeypatch.setattr(install, "_perform", watched)
    install.apply(install.plan_join(tmp_path))
    assert seen == {"50-kvmpool"}


def test_a_join_that_is_cut_off_anywhere_can_be_left_and_joined_again(tmp_path: Path) -> None:
    actions = install.plan_join(tmp_path, units=True).actions
    for cut in range(len(actions) + 1):
        root = tmp_path / str(cut)
        root.mkdir()
        install.apply(install.Plan(install.plan_join(root, units=True).actions[:cut]))
        install.apply(install.plan_join(root, units=True))
        assert install.plan_join(root, units=True).actions == ()
        other = tmp_path / f"left-{cut}"
        other.mkdir()
        install.apply(install.Plan(install.plan_join(other, units=True).actions[:cut]))
        install.apply(install.plan_leave(other))
        assert not [path for path in other.rglob("*") if path.is_file()]


def test_other_hooks_and_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "etc/libvirt/hooks/qemu.d"
    folder.mkdir(parents=True)
    (folder / "10-other").write_text("#!/bin/sh\n")
    (folder / "10-other").chmod(0o755)
    before = _tree(tmp_path)
    plan = install.plan_join(tmp_path)
    assert plan.notes == ()  # libvirt has looked into qemu.d already
    install.apply(plan)
    (folder.parent / "kvmpool" / "notes.txt").write_text("mine")
    install.apply(install.plan_leave(tmp_path))
    after = _tree(tmp_path)
    assert after.pop("etc/libvirt/hooks/kvmpool/notes.txt")[1] == b"mine"
    after.pop("etc/libvirt/hooks/kvmpool")
    assert after == before


def test_a_file_of_another_origin_is_not_overwritten(tmp_path: Path) -> None:
    hook = tmp_path / install.HOOK
    hook.parent.mkdir(parents=True)
    hook.write_text("#!/bin/sh\n")
    with pytest.raises(Refused, match="is not kvmpool's"):
        install.plan_join(tmp_path)
    assert install.plan_leave(tmp_path).actions == ()


def test_a_new_version_replaces_the_old_one_and_a_new_qemu_d_asks_for_a_restart(tmp_path: Path) -> None:
    plan = install.plan_join(tmp_path)
    assert plan.notes == (install.RELOAD,)
    install.apply(plan)
    (tmp_path / install.HOOK).write_text("#!/bin/sh\n# an older version\n")
    again = install.plan_join(tmp_path, deadline_s=9)
    assert {action.path.name for action in again.actions} >= {"50-kvmpool", "hook.conf"}
    assert again.notes == ()
    install.apply(again)
    assert "deadline_s=9" in (tmp_path / install.FOLDER / "hook.conf").read_text()


def test_a_damaged_manifest_removes_nothing_outside_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("keep")
    root = tmp_path / "root"
    root.mkdir()
    install.apply(install.plan_join(root))
    with (root / install.MANIFEST).open("a") as manifest:
        manifest.write(f"aa ../outside\nbb {outside}\n\nnonsense\n")
    install.apply(install.plan_leave(root))
    assert outside.read_text() == "keep"
    assert not (root / install.HOOK).exists()


def test_what_the_file_system_refuses_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file where a folder should be")
    with pytest.raises(Refused, match="cannot make folder"):
        install.apply(install.plan_join(tmp_path))


def test_the_unit_keeps_workers_alive_and_names_a_real_program(tmp_path: Path) -> None:
    install.apply(install.plan_join(tmp_path, units=True))
    unit = (tmp_path / install.UNIT).read_text()
    for line in ("KillMode=process", "OOMPolicy=continue", "RuntimeDirectoryPreserve=yes", "Type=notify"):
        assert line in unit.splitlines()
    program = next(line for line in unit.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")
    assert program.startswith("/")
    assert program.endswith("/kvmpoold")
