"""`kvmpool host join` and `leave`: what they say is what they do, and doing it again is nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmpool.host import install
from tests.cli.served import Served, kvmpool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    return tmp_path


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_dry_run_says_all_and_does_nothing(root: Path) -> None:
    before = _files(root)
    ran = kvmpool("host", "join", "--root", str(root), "--units", "--dry-run")
    assert ran.code == 0
    assert _files(root) == before
    assert f"would write {root}/{install.HOOK} (mode 0755" in ran.out
    assert f"would write {root}/{install.UNIT}" in ran.out
    assert f"Next: {install.START}" in ran.out


def test_join_says_what_it_did_and_then_that_nothing_is_to_do(root: Path) -> None:
    dry = kvmpool("host", "join", "--root", str(root), "--dry-run").out.splitlines()
    done = kvmpool("host", "join", "--root", str(root)).out.splitlines()
    assert len(done) == len(dry)
    assert f"made folder {root}/etc/libvirt" in done
    assert all((root / path).exists() for path in (install.HOOK, install.MANIFEST))
    again = kvmpool("host", "join", "--root", str(root))
    assert (again.code, again.out.count("\n")) == (0, 1)
    assert again.out.startswith("nothing to do: ")


def test_units_come_along_where_systemd_runs_unless_not_wanted(root: Path) -> None:
    (root / "run/systemd/system").mkdir(parents=True)
    assert install.UNIT not in kvmpool("host", "join", "--root", str(root), "--dry-run", "--no-units").out
    kvmpool("host", "join", "--root", str(root))
    assert (root / install.UNIT).exists()


def test_leave_takes_back_what_join_made_and_then_nothing_is_to_do(root: Path) -> None:
    before = _files(root)
    kvmpool("host", "join", "--root", str(root), "--units")
    joined = _files(root)
    dry = kvmpool("host", "leave", "--root", str(root), "--dry-run").out
    assert f"would remove {root}/{install.HOOK}\n" in dry
    assert _files(root) == joined
    assert f"removed {root}/{install.HOOK}\n" in kvmpool("host", "leave", "--root", str(root)).out
    assert _files(root) == before
    assert kvmpool("host", "leave", "--root", str(root)).out == "nothing to do: this host has not joined\n"


def test_settings_of_the_hook_follow_the_options(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMPOOL_SOCKET", "/run/other.sock")
    kvmpool("host", "join", "--root", str(root), "--deadline", "12.5")
    told = (root / install.FOLDER / "hook.conf").read_text()
    assert "socket=/run/other.sock\n" in told
    assert "deadline_s=12.5\n" in told
    changed = kvmpool("host", "join", "--root", str(root), "--deadline", "3").out
    assert changed.count("wrote ") == 2  # the settings and the list of what was installed


def test_a_foreign_file_in_the_way_is_refused_before_anything_is_done(root: Path) -> None:
    (root / install.HOOK).parent.mkdir(parents=True)
    (root / install.HOOK).write_text("#!/bin/sh\n")
    before = _files(root)
    ran = kvmpool("host", "join", "--root", str(root))
    assert (ran.code, ran.out) == (4, "")
    assert "is not kvmpool's. Next: move it away" in ran.err
    assert _files(root) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become nobody")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_without_the_right_to_read_or_write_it_says_who_may(short_dir: Path, mode: int) -> None:
    short_dir.chmod(0o755)
    root = short_dir
    (root / "etc/libvirt").mkdir(parents=True)
    (root / "etc").chmod(mode)
    child = os.fork()
    if not child:
        os.setuid(65534)
        ran = kvmpool("host", "join", "--root", str(root))
        good = ran.code == 4 and ran.out == "" and "be root" in ran.err and ran.err.count("\n") == 1
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_host_that_serves_does_not_leave_by_accident(
    served: Served, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = install.Plan((install.Action("remove", root / "hook"),))
    (root / "hook").touch()
    monkeypatch.setattr(install, "plan_leave", lambda _: plan)
    ran = kvmpool("host", "leave")
    assert (ran.code, ran.out) == (4, "")
    assert "bound here: vm0/gpu0#1. Next: shut these domains down" in ran.err
    assert (root / "hook").exists()
    assert kvmpool("host", "leave", "--force").code == 0
    assert not (root / "hook").exists()
