"""How values are printed, without a pool: sizes, ages, tables in a narrow terminal, text that would steer one."""

from __future__ import annotations

import pytest

from kvmpool.cli import output
from kvmpool.cli.output import age, column, mib, print_fields, print_rows, wrapped


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_room", lambda: 40)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0MiB"), (1023, "1023MiB"), (1024, "1GiB"), (1536, "1.5GiB"), (81920, "80GiB")]
)
def test_sizes(value: int, text: str) -> None:
    assert mib(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


COLUMNS = (
    column("NAME", "name"),
    column("MODEL", "model", flexible=True),
    column("MODE", "mode", spare=True),
    column("REASON", "reason", note=True),
)
ROW = {"name": "h0/0000:41:00.0", "model": "A card with a long name", "mode": "vgpu", "reason": "it is as it is " * 4}


@pytest.mark.usefixtures("narrow")
def test_a_table_puts_sentences_below_then_spares_then_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([ROW, {"name": "h0/0000:42:00.0"}], COLUMNS, "table", str, "none")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "MODEL"]
    assert lines[1] == "h0/0000:41:00.0  A card with a long name"
    assert " ".join(line.strip() for line in lines[2:-1]) == ROW["reason"].strip()
    assert all(line.startswith("    ") for line in lines[2:-1])
    assert lines[-1] == "h0/0000:42:00.0  -"
    print_rows([ROW | {"model": "A card with a name that is too long"}], COLUMNS, "table", str, "none")
    assert capsys.readouterr().out.splitlines()[1] == "h0/0000:41:00.0  A card with a name tha…"


@pytest.mark.usefixtures("narrow")
def test_fields_wrap_under_their_values_and_a_path_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields([("Reason", "word " * 12), ("Socket", "/a" * 30)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Reason: word")
    assert lines[1].startswith("        word")
    assert lines[-1] == "Socket: " + "/a" * 30


def test_an_empty_table_tells_the_next_command_on_the_other_stream(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([], COLUMNS, "table", str, "none. Next: look elsewhere")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "none. Next: look elsewhere\n")
    print_rows([], COLUMNS, "json", str, "none")
    assert capsys.readouterr().out == "[]\n"


def test_a_name_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([{"name": "a\x1b[2Jb\nc", "reason": "x\x07"}], COLUMNS, "table", str, "none")
    told = capsys.readouterr().out
    assert told.count("\n") == 2
    assert "a?[2Jb?c" in told
    assert wrapped("\x9b31m", 0) == ["?31m"]
