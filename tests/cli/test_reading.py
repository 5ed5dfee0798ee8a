"""Every command that lists or shows, in every form of output, against the API that it reads."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from kvmpool.api.client import Client
from tests.cli.served import Served, in_terminal, kvmpool

CARD = "h0/0000:41:00.0"
READS = [
    (["status"], "/status", "h0"),
    (["host", "list"], "/hosts", "h0"),
    (["card", "list"], "/cards", None),
    (["card", "show", CARD], f"/cards/{CARD}", None),
    (["claim", "list"], "/claims", "vm0/gpu0\nvm1/gpu0\nvm2/gpu0"),
    (["claim", "show", "vm1/gpu0"], "/claims/vm1/gpu0", "vm1/gpu0"),
    (["binding", "list"], "/bindings", "vm0/gpu0#1"),
    (["binding", "show", "vm0/gpu0"], "/bindings/vm0/gpu0", "vm0/gpu0#1"),
    (["binding", "show", "vm0/gpu0#1"], "/bindings/vm0%2Fgpu0%231", "vm0/gpu0#1"),
    (["breaker", "show"], "/breaker", "closed"),
    (["explain", "vm1/gpu0"], "/claims/vm1/gpu0/explain", "vm1/gpu0"),
]
IDS = [" ".join(words) for words, _, _ in READS]


def _steady(value: Any) -> Any:
    """Without what changes from one look to the next."""
    if isinstance(value, dict):
        return {k: "changes" if k in ("store", "since_s") else _steady(v) for k, v in value.items()}
    return [_steady(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("words", "path", "names"), READS, ids=IDS)
def test_json_yaml_and_names_say_what_the_api_says(
    served: Served, words: list[str], path: str, names: str | None
) -> None:
    read = Client(served.socket)
    for _ in range(5):  # the pool lives: what changed meanwhile is read again
        before = _steady(read.get(path))
        told, as_yaml = kvmpool(*words, "-o", "json"), kvmpool(*words, "-o", "yaml")
        if _steady(read.get(path)) == before:
            break
    assert (told.code, told.err) == (0, "")
    assert _steady(json.loads(told.out)) == before
    assert _steady(yaml.safe_load(as_yaml.out)) == before
    named = kvmpool(*words, "-o", "name").out.strip()
    if names is None:
        assert re.fullmatch(r"(GPU-[0-9a-f-]{36}\n?)+", named)
    else:
        assert named == names


@pytest.mark.parametrize(("words", "path", "names"), READS, ids=IDS)
def test_in_a_pipe_there_is_no_colour_and_nothing_is_cut(
    served: Served, words: list[str], path: str, names: str | None
) -> None:
    told = kvmpool(*words)
    assert (told.code, told.err) == (0, "")
    assert "\x1b" not in told.out
    assert "…" not in told.out
    assert told.out.endswith("\n")


@pytest.mark.parametrize(("words", "path", "names"), READS, ids=IDS)
def test_a_terminal_of_80_columns_holds_every_line(
    served: Served, words: list[str], path: str, names: str | None
) -> None:
    shown = in_terminal(*words, NO_COLOR="1")
    assert "\x1b" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80, shown


def test_a_terminal_shows_colours_and_the_whole_reason_below_its_row(served: Served) -> None:
    [row] = [row for row in Client(served.socket).get("/claims") if row["label"] == "vm1/gpu0"]
    assert row["state"] == "waiting"
    shown = in_terminal("claim", "list")
    assert "\x1b[33mwaiting" in shown
    assert "\x1b[32mserved" in shown
    assert row["reason"] in " ".join(shown.split())
    piped = kvmpool("claim", "list").out.splitlines()
    assert len(piped) == 4
    assert piped[2].endswith(row["reason"])


def test_a_narrow_terminal_spares_columns_before_it_cuts_names(served: Served) -> None:
    shown = in_terminal("claim", "list", columns=60, NO_COLOR="1")
    assert "COMPUTE" not in shown
    assert "vm0/gpu0#1  h0/0000:41:00.0" in shown
    assert "COMPUTE" in kvmpool("claim", "list").out


def test_status_names_what_is_not_as_it_should_be(alone: Served) -> None:
    assert kvmpool("card", "cordon", CARD, "--reason", "loud fan").out == f"{CARD} cordoned; vm0/gpu0#1 stays\n"
    told = kvmpool("status").out
    assert "hosts: h0 up" in told
    assert re.search(rf"{CARD} .* yes  +4GiB/16GiB", told)
    assert "loud fan" in kvmpool("card", "show", CARD).out


def test_explain_tells_of_each_card_why_not(served: Served) -> None:
    told = kvmpool("explain", "vm1/gpu0").out
    for address in ("0000:41:00.0", "0000:42:00.0"):
        assert re.search(rf"h0/{address} +no +.*the claim asks for 99999", told)


def test_options_stand_anywhere_and_the_socket_can_be_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMPOOL_SOCKET", "/nowhere")
    assert kvmpool("--socket", str(served.socket), "host", "list", "-o", "name").out == "h0\n"
    monkeypatch.setenv("KVMPOOL_SOCKET", "/nowhere")
    assert kvmpool("host", "list").code == 6
