"""Commands that change something, errors and exit codes: one line, what and which, and the next command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmpool.api.client import Client
from kvmpool.core.model import Breaker
from kvmpool.daemon.ledger import Change
from kvmpool.sim.world import Condition
from tests.api.pool import Pool, xml
from tests.cli.served import Served, command, kvmpool

CARD = "h0/0000:41:00.0"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["card", "show", "h9/0000:01:00.0"], 3, "kvmpool card list"),
        (["claim", "show", "vm0/gpu7"], 3, "kvmpool claim list"),
        (["claim", "add", "vm9", "--memory", "1GiB"], 3, "no domain vm9"),
        (["claim", "add", "a/../vm0", "--memory", "1GiB"], 3, "no domain a/../vm0"),
        (["binding", "show", "vm0/gpu7"], 3, "kvmpool binding list"),
        (["binding", "show", "vm1/gpu0"], 3, "kvmpool explain vm1/gpu0"),
        (["explain", "vm9/gpu0"], 3, "kvmpool claim list"),
        (["explain", "vm0"], 4, "not DOMAIN/NAME"),
        (["card", "show", "GPU-0000"], 4, "names 2 cards"),
        (["card", "restore", CARD], 4, f"kvmpool card show {CARD}"),
        (["card", "cordon", CARD, "--reason", "two\nlines"], 4, "one line"),
        (["claim", "add", "vm3"], 4, "memory is missing"),
        (["claim", "add", "vm3", "--memory", "-1"], 4, 'memory="-1" is not allowed'),
        (["claim", "add", "vm3", "--memory", "4XB"], 4, "Next: kvmpool claim add --help"),
        (["claim", "add", "vm3", "--memory", "1", "--compute-limit", "0"], 4, 'compute_limit="0" is not allowed'),
        (["claim", "add", "vm3", "--memory", "1", "--compute", "60", "--compute-limit", "50"], 4, "Allowed: 60 to 100"),
        (["claim", "add", "vm3", "--memory", "1", "--set", "colour=red"], 4, 'attribute "colour" is unknown'),
    ],
)
def test_what_cannot_be_is_one_line_and_an_exit_code(served: Served, words: list[str], code: int, told: str) -> None:
    ran = kvmpool(*words)
    assert (ran.code, ran.out) == (code, "")
    assert told in ran.err
    assert ran.err.startswith("kvmpool: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["crad", "list"], "Did you mean 'card'?"),
        (["card", "show"], "Missing argument 'CARD'"),
        (["card", "list", "-o", "xml"], "'table', 'json', 'yaml', 'name'"),
        (["claim", "add", "vm0", "--set", "memory"], "is not KEY=VALUE"),
        (["claim", "add", "vm0", "--mode", "whole"], "'vgpu', 'passthrough', 'any'"),
        (["events", "-n", "-1"], "-1"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(words: list[str], told: str) -> None:
    ran = kvmpool(*words)
    assert (ran.code, ran.out) == (2, "")
    assert told in ran.err


def test_without_kvmpoold_every_command_says_how_to_start_it(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMPOOL_SOCKET", str(short_dir / "none.sock"))
    for words in (["status"], ["card", "list"], ["events", "-f"], ["claim", "add", "vm0", "--memory", "1"]):
        ran = kvmpool(*words)
        assert (ran.code, ran.out) == (6, "")
        assert "systemctl start kvmpoold" in ran.err
        assert ran.err.count("\n") == 1


@contextmanager
def _answering(path: Path, answer: bytes | None) -> Iterator[None]:
    """A daemon that says only this, or never anything."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(8)
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    peer = listening.accept()[0]
                except OSError:
                    return
                held.append(peer)
                peer.recv(65536)
                if answer is not None:
                    peer.sendall(answer)
                    peer.close()

        threading.Thread(target=serve, daemon=True).start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        for peer in held:
            peer.close()


def test_an_answer_that_does_not_come_in_time_is_exit_code_7(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMPOOL_SOCKET", str(short_dir / "s"))
    monkeypatch.setattr(Client.__init__, "__defaults__", (None, 0.2))
    with _answering(short_dir / "s", None):
        ran = kvmpool("status")
    assert (ran.code, ran.err.count("\n")) == (7, 1)
    assert "did not answer" in ran.err


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", 1),
        (b'HTTP/1.1 504 No\r\nContent-Length: 35\r\n\r\n{"error": "late", "kind":"deadline"}', 7),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 6),
        (b"SSH-2.0-OpenSSH\r\n", 6),
    ],
)
def test_a_daemon_that_talks_nonsense_is_one_line(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, code: int
) -> None:
    monkeypatch.setenv("KVMPOOL_SOCKET", str(short_dir / "s"))
    with _answering(short_dir / "s", answer.replace(b": 35", b": 36")):
        ran = kvmpool("card", "list")
    assert (ran.code, ran.err.count("\n")) == (code, 1), ran


def test_cordon_drain_uncordon_are_told_and_done(alone: Served) -> None:
    read = Client(alone.socket)
    assert kvmpool("card", "drain", CARD, "--reason", "new fan").out == (
        f"{CARD} is being drained; vm0/gpu0#1 moves if it can\n"
    )
    alone.story(lambda pool: _until_moved(pool))
    assert read.get("/bindings/vm0%2Fgpu0")["card"] != CARD
    assert " drain " in kvmpool("card", "list").out
    assert kvmpool("card", "cordon", CARD).out == f"{CARD} cordoned\n"
    assert kvmpool("card", "uncordon", CARD).out == f"{CARD} uncordoned\n"
    card = read.get(f"/cards/{CARD}")
    assert (card["cordoned"], card["drain"]) == (False, False)


async def _until_moved(pool: Pool) -> None:
    await pool.until(lambda rows: all(rows.cards[b.card].label != CARD for b in rows.bindings.values()))


def test_a_dead_card_is_restored_by_a_persons_word(alone: Served) -> None:
    async def breaks(pool: Pool) -> None:
        card = next(card for card in pool.host.cards.values() if card.address == "0000:42:00.0")
        card.condition = Condition.GONE
        await pool.until(lambda rows: rows.cards[card.id].health.verdict.value == "quarantined")
        card.condition = Condition.FINE

    alone.story(breaks)
    listed = kvmpool("card", "list").out
    assert "quarantined" in listed
    assert "its address left the bus" in listed
    ran = kvmpool("card", "restore", "0000:42:00.0", "--reason", "reseated")
    assert (ran.code, ran.out.count("\n")) == (0, 1)
    assert "then on probation" in ran.out
    assert "0000:42:00.0: restored (by root: reseated)" in kvmpool("events", "--subject", "h0/0000:42:00.0").out


def test_a_claim_is_added_listed_and_removed(alone: Served) -> None:
    ran = kvmpool("claim", "add", "vm3", "--memory", "2GiB", "--compute", "25", "--set", "priority=70")
    assert ran.out == "vm3/gpu0 added: vgpu, 2GiB, compute 25 %. Next: virsh start vm3\n"
    assert "priority: 70\n" in kvmpool("claim", "show", "vm3/gpu0", "-o", "yaml").out
    assert kvmpool("claim", "remove", "vm3").out == "vm3/gpu0 removed\n"
    later = kvmpool("claim", "add", "vm0", "--name", "gpu1", "--memory", "64")
    assert later.out == (
        "vm0/gpu1 added: vgpu, 64MiB; added to a running domain: it is served from the domain's next start on\n"
    )
    whole = kvmpool("claim", "add", "vm3", "--mode", "passthrough")
    assert whole.out == "vm3/gpu0 added: passthrough. Next: virsh start vm3\n"
    several = ("--mode", "passthrough", "--set", "count=2")
    lacking = kvmpool("claim", "add", "vm3", "--name", "gpu1", *several)
    assert "not supported yet" in lacking.out
    assert "Next:" not in lacking.out
    assert "not supported yet" in kvmpool("claim", "add", "vm0", "--name", "gpu2", *several).out


@pytest.mark.parametrize(
    ("given", "words", "share"),
    [
        (["--compute", "25", "--compute-limit", "50"], "25 %, at most 50 %", "25-50%"),
        (["--compute-limit", "50"], "best effort, at most 50 %", "0-50%"),
        (["--compute", "50", "--compute-limit", "50"], "50 %, at most 50 %", "50%"),
        (["--compute", "50", "--compute-limit", "100"], "50 %", "50%"),
        ([], "best effort", "-"),
    ],
)
def test_a_compute_limit_is_shown_wherever_its_claim_is(
    alone: Served, given: list[str], words: str, share: str
) -> None:
    added = kvmpool("claim", "add", "vm3", "--memory", "2GiB", *given).out
    assert added == f"vm3/gpu0 added: vgpu, 2GiB{f', compute {words}' if given else ''}. Next: virsh start vm3\n"
    assert re.search(rf"^Compute: +{words}$", kvmpool("claim", "show", "vm3/gpu0").out, re.M)
    assert re.search(rf"^vm3/gpu0 .* {share} ", kvmpool("claim", "list").out, re.M)
    body = json.loads(kvmpool("claim", "show", "vm3/gpu0", "-o", "json").out)
    assert body["compute_limit_percent"] == (int(given[-1]) if given else 100)
    assert body["memory_limit_mib"] == body["memory_mib"] == 2048


def test_a_binding_shows_the_limits_of_its_claim(alone: Served) -> None:
    claim = 'name="gpu0" mode="vgpu" memory="1024" compute="20" compute_limit="40"'
    domain = xml(claim, name="vm5", uuid="9f1c2d3e-0000-4000-8000-000000000005")

    async def start(pool: Pool) -> None:
        pool.define(domain, running=True)
        await pool.call("prepare", domain, "vm5")

    alone.story(start)
    assert re.search(r"^Compute: +20 %, at most 40 %$", kvmpool("binding", "show", "vm5/gpu0").out, re.M)
    body = json.loads(kvmpool("binding", "show", "vm5/gpu0", "-o", "json").out)
    assert (body["compute_limit_percent"], body["memory_limit_mib"]) == (40, 1024)


def test_an_open_breaker_is_named_in_the_status_and_closed(alone: Served) -> None:
    async def trip(pool: Pool) -> None:
        page = await pool.ledger.read()
        await pool.ledger.commit(page, Change(puts=[Breaker(open_reason="3 of 4 cards failed", opened_at=1.0)]))

    alone.story(trip)
    assert "WARN failover breaker open: 3 of 4 cards failed. Next: kvmpool breaker close" in kvmpool("status").out
    assert "3 of 4 cards failed" in kvmpool("breaker", "show").out
    assert kvmpool("breaker", "close").out == "breaker closed: automatic failovers happen again\n"
    assert "breaker" not in kvmpool("status").out


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_of_one_subject_and_the_last_ones(served: Served) -> None:
    lines = kvmpool("events", "--subject", "vm0/gpu0").out.splitlines()
    assert [line.split(" (")[0].split("  ")[1] for line in lines] == [
        "vm0/gpu0#1: bound",
        "vm0/gpu0#1: ready",
        "vm0/gpu0#1: served",
    ]
    assert kvmpool("events", "--subject", "vm0/gpu0", "-n", "1").out.splitlines() == lines[-1:]
    assert kvmpool("events", "-n", "0", "-o", "json").out == "[]\n"
    none = kvmpool("events", "--subject", "vm77")
    assert (none.code, none.out, none.err) == (0, "", "no events of vm77. Next: kvmpool events\n")


def test_a_follower_hears_news_once_until_interrupted(alone: Served) -> None:
    follower = subprocess.Popen(
        command("events", "-f", "--subject", CARD), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    past = [follower.stdout.readline() for _ in Client(alone.socket).get("/events") if _["subject"] == CARD]
    kvmpool("card", "cordon", CARD, "--reason", "now")
    assert follower.stdout.readline().endswith(f"{CARD}: cordoned (by root: now)\n")
    kvmpool("card", "uncordon", CARD)
    assert follower.stdout.readline().endswith(f"{CARD}: uncordoned (by root)\n")
    follower.send_signal(signal.SIGINT)
    out, err = follower.communicate(timeout=20)
    assert (follower.returncode, out, err) == (130, "", "")
    assert past


def test_a_follower_whose_daemon_ends_says_so(short_dir: Path) -> None:
    with Served(short_dir) as pool:
        words = command("--socket", str(pool.socket), "events", "-f")
        follower = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert follower.stdout is not None
        follower.stdout.readline()
    _, err = follower.communicate(timeout=20)
    assert follower.returncode == 6
    assert err.count("\n") == 1
    assert "kvmpoold" in err


def test_a_reader_that_leaves_is_no_error(served: Served) -> None:
    for words in (["events"], ["status", "-o", "json"], ["--help"]):
        script = 'set -o pipefail; "$@" | true'
        done = subprocess.run(
            ["bash", "-c", script, "bash", *command(*words)], capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), words


# --- completion -------------------------------------------------------------------------------------------------------

_TRY = """
eval "$(kvmpool completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMPREPLY=()
_kvmpool_completion kvmpool
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvmpool car", ["card"]),
        ("kvmpool card show h0/0000:4", ["41:00.0", "42:00.0"]),  # what follows the colon at which bash splits
        ("kvmpool card cordon gpu", []),
        ("kvmpool claim show vm1", ["vm1/gpu0"]),
        ("kvmpool explain vm0/", ["vm0/gpu0"]),
        ("kvmpool claim add vm", ["vm0", "vm1", "vm2", "vm3"]),
        ("kvmpool claim remove vm0 --name g", ["gpu0"]),
        ("kvmpool binding show vm0/gpu0", ["vm0/gpu0#1"]),
        ("kvmpool card list --output=y", ["yaml"]),
    ],
)
def test_bash_completes_live_names(served: Served, tmp_path: Path, typed: str, offered: list[str]) -> None:
    program = tmp_path / "kvmpool"
    program.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in command()) + ' "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", _TRY, "bash", typed],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_completion_without_a_daemon_is_silent(short_dir: Path) -> None:
    env = {"COMP_WORDS": "kvmpool card show h", "COMP_CWORD": "3", "_KVMPOOL_COMPLETE": "bash_complete"}
    env |= {**os.environ, "KVMPOOL_SOCKET": str(short_dir / "none")}
    done = subprocess.run(command(), env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")
