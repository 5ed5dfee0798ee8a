"""The table of the driver API: what it says, how it is printed, and that the document carries it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvmpool.cli.support import support
from kvmpool.compat.support import driver_api
from kvmpool.dataplane import calltable
from kvmpool.dataplane.support import Support, api_names
from kvmpool.errors import NotFound

ROOT = Path(__file__).parents[2]


def _run(*words: str) -> str:
    done = CliRunner().invoke(support, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_name_of_the_call_table_is_in_it_once_with_its_version() -> None:
    table = calltable.load(ROOT / "kvmpool/dataplane/calls.toml")
    named = [symbol.name for call in table.calls for symbol in call.symbols] + list(table.unsupported)
    assert sorted(symbol for row in driver_api() for symbol in row.symbols) == sorted(named)
    assert [row.symbol for row in driver_api() if not row.version] == []


def test_a_name_is_what_the_table_does_with_it() -> None:
    table = calltable.load(ROOT / "kvmpool/dataplane/calls.toml")
    rows = {symbol: row for row in driver_api() for symbol in row.symbols}
    assert {rows[name].support for name in table.unsupported} == {Support.UNSUPPORTED}
    for call in table.calls:
        for symbol in call.symbols:
            assert rows[symbol.name].support is not Support.UNSUPPORTED
    assert rows["cuDeviceGetCount"].support is Support.LOCAL
    assert rows["cuMemcpyHtoD_v2_ptds"].support is Support.SUPPORTED
    assert (rows["cuLaunchKernel"].support, rows["cuLaunchKernel"].how) == (Support.SUPPORTED, "async")
    assert (rows["cuMemAlloc_v2"].cuda, rows["cuMemAlloc_v2"].how) == ("3.2", "sync")
    assert rows["cuWGLGetDevice"].support is Support.UNSUPPORTED


def test_a_version_that_nobody_knows_is_not_made_up() -> None:
    table = calltable.load(ROOT / "kvmpool/dataplane/calls.toml")
    assert {row.cuda for row in api_names(table, {}) if row.support is Support.UNSUPPORTED} == {"-"}


def test_the_document_is_up_to_date() -> None:
    command = [sys.executable, "-m", "kvmpool.compat.support"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    message = "run: python -m kvmpool.compat.support > docs/support.md"
    assert (ROOT / "docs/support.md").read_text() == made, message


def test_names_and_patterns_filter() -> None:
    assert set(_run("cuEGL*", "-o", "name").split()) == {r.symbol for r in driver_api() if r.symbol.startswith("cuEGL")}
    assert "cuMemcpyHtoDAsync_v2" in _run("htodasync", "-o", "name").split()
    assert _run("cuMemcpyHtoD_v2_ptds", "-o", "name").split() == ["cuMemcpyHtoD_v2"]
    with pytest.raises(NotFound, match="no name of the driver API matches cuNothing"):
        CliRunner().invoke(support, ["cuNothing"], catch_exceptions=False)


def test_class_and_version_filter() -> None:
    local = json.loads(_run("--class", "local", "-o", "json"))
    assert local
    assert {row["support"] for row in local} == {"local"}
    old = yaml.safe_load(_run("--cuda", "3.2", "-o", "yaml"))
    assert "cuMemAlloc_v2" in {row["symbol"] for row in old}
    assert "cuCtxCreate_v3" not in {row["symbol"] for row in old}
    refused = CliRunner().invoke(support, ["--cuda", "new"])
    assert refused.exit_code == 2
    assert "is not a CUDA version" in refused.output


def test_the_table_for_a_person_has_a_line_a_form() -> None:
    head, *lines = _run("cuCtxCreate").splitlines()
    assert head.split() == ["SYMBOL", "CUDA", "STREAM", "SUPPORT", "TRAVELS"]
    assert [line.split() for line in lines if line.startswith("cuCtxCreate_v3 ")] == [
        ["cuCtxCreate_v3", "11.4", "-", "supported", "sync"]
    ]
