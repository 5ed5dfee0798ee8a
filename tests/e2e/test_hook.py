"""`virsh start` as an administrator sees it: foreign domains always pass, a refusal is one line that helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmpool.lab.guests import GuestSpec
from tests.e2e.pool import Pool, until, vm

pytestmark = pytest.mark.e2e

_FOREIGN = GuestSpec("foreign", 9, memory_mib=16)
_SPY = """\
#!/bin/sh
echo "$@" >>/run/python-calls
exec /run/real-python "$@"
"""


def _one_line(stderr: str) -> str:
    """The hook's own words in virsh's error, which must be one line that says what to do next."""
    lines = [line for line in stderr.splitlines() if "kvmpool:" in line]
    assert len(lines) == 1, stderr
    assert "Next:" in lines[0], lines[0]
    return lines[0][lines[0].index("kvmpool:") :]


@contextmanager
def _python_watched(pool: Pool) -> Iterator[Path]:
    """Whoever starts /usr/bin/python3 in the host meanwhile is written, with its words, into the file that is given."""
    real, calls = pool.host.outside("/run/real-python"), pool.host.outside("/run/python-calls")
    python = str(Path("/usr/bin/python3").resolve())
    real.touch()
    spy = pool.host.outside("/run/spy-python")
    spy.write_text(_SPY)
    spy.chmod(0o755)
    pool.host.run("mount", "--bind", python, "/run/real-python")
    pool.host.run("mount", "--bind", "/run/spy-python", python)
    try:
        yield calls
    finally:
        pool.host.run("umount", python)
        pool.host.run("umount", "/run/real-python")
        calls.unlink(missing_ok=True)


def test_a_domain_without_a_claim_starts_with_kvmpoold_dead_and_without_any_python(pool: Pool) -> None:
    with pool.without_kvmpoold(), _python_watched(pool) as calls:
        pool.start(_FOREIGN, firmware=True)
        pool.host.virsh("destroy", "foreign")
        assert not calls.exists(), calls.read_text()
        pool.refusal(vm("vm0", 1))
        assert "prepare begin" in calls.read_text(), "the watch itself must see the Python of a claimed domain"


def test_a_claimed_domain_with_kvmpoold_dead_is_refused_within_five_seconds(pool: Pool) -> None:
    with pool.without_kvmpoold():
        stderr, seconds = pool.refusal(vm())
    line = _one_line(stderr)
    assert "domain vm0 claims a GPU and kvmpoold does not answer" in line
    assert "systemctl restart kvmpoold" in line
    assert seconds < 5.0
    assert pool.host.virsh("domstate", "vm0").strip() == "shut off"


def test_a_claim_that_no_card_can_serve_names_each_card_s_first_failing_predicate(pool: Pool) -> None:
    stderr, seconds = pool.refusal(vm("vm0", 1, 'name="gpu0" mode="vgpu" memory="20000"'))
    line = _one_line(stderr)
    assert "no card" in line
    assert "20000" in line
    for address in ("0000:41:00.0", "0000:42:00.0"):
        assert f"h0/{address}" in line
    assert seconds < 5.0
    until(lambda: not pool.bindings(), 10.0, "a refused start left a binding")


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        pytest.param('name="gpu0" mode="vgpu" memory="-1"', ("memory", "-1"), id="negative"),
        pytest.param('name="gpu0" mode="vgpu" memory="12 parsecs"', ("memory", "parsecs"), id="unit"),
        pytest.param('name="gpu0" mode="vgpu"', ("memory",), id="missing"),
        pytest.param('name="gpu0" mode="quantum" memory="1"', ("mode", "quantum", "passthrough"), id="mode"),
        pytest.param('name="gpu0" mode="vgpu" memory="1024" colour="red"', ("colour",), id="unknown"),
        pytest.param('name="0gpu" mode="vgpu" memory="1024"', ("name", "0gpu"), id="name"),
        pytest.param('name="gpu0" mode="vgpu" memory="99999999999999999999"', ("memory",), id="overflow"),
    ],
)
def test_a_malformed_claim_is_refused_naming_domain_attribute_and_values(
    pool: Pool, claim: str, words: tuple[str, ...]
) -> None:
    line = _one_line(pool.refusal(vm("vm0", 1, claim))[0])
    for word in ("vm0", *words):
        assert word in line
    assert not pool.bindings()


def test_two_claims_of_one_name_are_refused(pool: Pool) -> None:
    claim = 'name="gpu0" mode="vgpu" memory="1024"'
    line = _one_line(pool.refusal(vm("vm0", 1, claim, claim))[0])
    assert "gpu0" in line


def test_a_passthrough_claim_is_refused_with_its_reason(pool: Pool) -> None:
    line = _one_line(pool.refusal(vm("vm0", 1, 'name="gpu0" mode="passthrough"'))[0])
    assert "passthrough" in line
