"""What is left of a host is seen: processes in its namespaces, descriptors and mounts into its folder, the folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvmpool.lab.leftovers import Footprint, remains


def test_a_process_in_a_namespace_of_it_is_seen(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    own = os.readlink("/proc/self/ns/uts")
    try:
        found = remains(Footprint(frozenset({own}), tmp_path / "gone"))
        assert any(line.startswith(f"process {child.pid}: ns/") for line in found)
    finally:
        child.kill()
        child.wait()
    assert remains(Footprint(frozenset({"net:[1]"}), tmp_path / "gone")) == []


def test_the_folder_and_open_files_in_it_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "h0"
    folder.mkdir()
    of = Footprint(frozenset(), folder)
    with (folder / "log").open("w"):
        found = remains(of)
        assert f"file {folder}" in found
        assert any(f"process {os.getpid()}: fd/" in line for line in found)
    assert remains(of) == [f"file {folder}"]
