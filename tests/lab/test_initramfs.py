"""The guest's root: a cpio that cpio(1) reads, with every library that its programs need."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvmpool.lab.initramfs import Entry, cpio

_DIRECTORY, _FILE, _LINK = 0o040755, 0o100755, 0o120777


def test_cpio_reads_back_what_was_written(tmp_path: Path) -> None:
    data = {"bin/empty": b"", "bin/odd": b"abc", "bin/long": b"x" * 4097}
    entries = [Entry("bin", _DIRECTORY), *(Entry(path, _FILE, text) for path, text in data.items())]
    archive = cpio([*entries, Entry("bin/link", _LINK, b"odd")])
    subprocess.run(["cpio", "-idm", "--quiet"], input=archive, cwd=tmp_path, check=True)
    assert {path: (tmp_path / path).read_bytes() for path in data} == data
    assert (tmp_path / "bin/link").readlink() == Path("odd")
    assert (tmp_path / "bin/odd").stat().st_mode & 0o777 == 0o755


def test_the_same_entries_give_the_same_bytes() -> None:
    entries = [Entry("init", _FILE, b"#!/bin/sh\n")]
    assert cpio(entries) == cpio(entries)
