"""The codec: every row comes back as it was, and nothing else comes in."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmpool.core.model import (
    Attempt,
    Binding,
    BootId,
    Breaker,
    Card,
    CardId,
    CardWish,
    Claim,
    ClaimKey,
    ClaimSpec,
    DomainUuid,
    Event,
    Generation,
    Health,
    Host,
    HostName,
    Mode,
    Phase,
    Verdict,
)
from kvmpool.errors import Refused
from kvmpool.ports import Item
from kvmpool.store.codec import Counter, Row, decode, encode, key_of, rows_from

UUID = DomainUuid("6695eb01-f6a4-8304-79aa-97f2502e193f")
CARD = CardId("GPU-11111111-2222-3333-4444-555555555555")
KEY = ClaimKey(UUID, "gpu0")
SPEC = ClaimSpec("gpu0", Mode.ANY, memory_mib=4096, memory_limit_mib=4096, order=(Mode.PASSTHROUGH, Mode.VGPU))
FAILED = Health(verdict=Verdict.FAILED, failures=(1.0, 2.5))

ROWS: tuple[Row, ...] = (
    Host(HostName("h0"), BootId("b"), "0.1.0"),
    Card(CARD, HostName("h0"), "0000:41:00.0", "Soft", 8192, health=FAILED),
    CardWish(CARD, cordoned=True, reason="Ünïcode\n\udc80", by="root"),
    Claim(KEY, "vm0", HostName("h0"), SPEC, attempt=3, sequence=4, pointed=Generation(7)),
    Attempt(UUID, "vm0", HostName("h0"), 3, 12.25, BootId("b")),
    Binding(KEY, Generation(7), "vm0", HostName("h0"), CARD, HostName("h0"), 4096, 4096, 25, 100, phase=Phase.READY),
    Counter(7),
    Breaker(failovers=((1.5, CARD), (2.0, CARD))),
    Event("vm0/gpu0#7", "bound", "the first", HostName("h0"), at=1.5, wall=1e9),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_every_row_comes_back_as_it_was(row: Row) -> None:
    assert decode(key_of(row), encode(row)) == row
    assert json.loads(encode(row))["v"] == 1


def test_keys_are_those_of_the_design() -> None:
    assert [key_of(row) for row in ROWS[:-1]] == [
        "/host/h0",
        f"/card/{CARD}",
        f"/wish/card/{CARD}",
        f"/claim/{UUID}/gpu0",
        f"/attempt/{UUID}",
        f"/binding/{UUID}/gpu0/0000000007",
        "/counter",
        "/breaker",
    ]
    assert key_of(ROWS[-1]).startswith("/event/0000000001500000-")


BINDING = ROWS[5]


def _changed(row: Row, **changes: Any) -> bytes:
    plain = json.loads(encode(row))
    for name, value in changes.items():
        if value is KeyError:
            del plain[name]
        else:
            plain[name] = value
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (_changed(BINDING, v=2), "field v: version 2 is unknown"),
        (_changed(BINDING, v=KeyError), "field v: version None is unknown"),
        (_changed(BINDING, v=True), "field v: version True is unknown"),
        (_changed(BINDING, colour="red"), "field 'colour' is unknown"),
        (_changed(BINDING, claim={"domain": UUID, "name": "gpu0", "x": 1}), "field 'claim.x' is unknown"),
        (_changed(BINDING, claim={"domain": UUID}), "field claim.name is missing"),
        (_changed(BINDING, claim=[UUID, "gpu0"]), "field claim: "),
        (_changed(BINDING, memory_mib="4096"), "field memory_mib: '4096' is not of type int"),
        (_changed(BINDING, memory_mib=True), "field memory_mib: True is not of type int"),
        (_changed(BINDING, memory_mib=1.0), "field memory_mib: 1.0 is not of type int"),
        (_changed(BINDING, memory_mib=2**63), "field memory_mib: 9223372036854775808 is out of range"),
        (_changed(BINDING, phase="done"), "field phase: 'done' is not one of preparing, ready"),
        (_changed(BINDING, phase=1), "field phase: 1 is not one of"),
        (_changed(BINDING, reason=None), "field reason: None is not of type str"),
        (_changed(BINDING, generation=8), "its content belongs to /binding/"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"v":1,"v":1}', "not JSON (a field twice)"),
        (b"9" * 10_000, "not JSON"),
    ],
)
def test_a_row_that_is_not_exactly_right_is_refused_in_one_line(value: bytes, says: str) -> None:
    key = key_of(BINDING)
    with pytest.raises(Refused) as caught:
        decode(key, value)
    line = str(caught.value)
    assert says in line
    assert key in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("key", "changes", "says"),
    [
        ("/breaker", {"failovers": [[1.0]]}, "field failovers[0]: 1 values instead of 2"),
        ("/breaker", {"failovers": [[1.0, 2]]}, "field failovers[0][1]: 2 is not of type str"),
        ("/breaker", {"failovers": {}}, "field failovers: {} is not a list"),
        ("/breaker", {"opened_at": 1e999}, "Infinity is not a number"),
    ],
)
def test_faults_inside_lists_are_named(key: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match="store row /breaker") as caught:
        decode(key, _changed(ROWS[7], **changes))
    assert says in str(caught.value)


def test_a_missing_field_takes_the_models_default() -> None:
    assert decode("/breaker", b'{"v":1}') == Breaker()


def test_rows_from_skips_and_names_the_bad_and_keeps_the_good() -> None:
    items = [Item(key_of(row), encode(row), 10 + n) for n, row in enumerate(ROWS)]
    bad = Item("/host/h1", _changed(ROWS[0], v=9), 30)
    rows, faults = rows_from([bad, *items, Item("/other/thing", b"?", 31)], 40)
    assert rows.revision == 40
    assert list(rows.hosts) == ["h0"]
    assert list(rows.cards) == [CARD]
    assert rows.wishes[CARD].cordoned
    assert rows.claims[KEY].spec == SPEC
    assert rows.attempts[UUID].counter == 3
    assert rows.bindings[(KEY, Generation(7))].phase is Phase.READY
    assert rows.counter == 7
    assert rows.breaker.failovers == ((1.5, CARD), (2.0, CARD))
    assert len(faults) == 1
    assert "/host/h1" in faults[0]
    assert rows.revisions["/counter"] == 16
    assert "/host/h1" not in rows.revisions  # a commit that takes it for absent must conflict


def test_an_unreadable_counter_cannot_be_overwritten_as_if_absent() -> None:
    rows, faults = rows_from([Item("/counter", b'{"v":2,"value":9}', 5)], 6)
    assert faults
    assert "/counter" not in rows.revisions


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    key=st.sampled_from([key_of(row) for row in ROWS]),
    value=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=8),
            lambda inner: st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["v", "claim", "key", "spec", "health", "x"]), inner, max_size=4),
            max_leaves=8,
        ).map(lambda plain: json.dumps(plain).encode()),
    ),
)
def test_no_bytes_make_rows_from_raise(key: str, value: bytes) -> None:
    _, faults = rows_from([Item(key, value, 1)], 1)
    assert all("\n" not in line for line in faults)


@settings(max_examples=200, deadline=None)
@given(reason=st.text(), failures=st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_any_health_comes_back(reason: str, failures: list[float]) -> None:
    health = Health(reason=reason, failures=tuple(failures))
    card = Card(CARD, HostName("h0"), "0000:41:00.0", "Soft", 1, health=health)
    assert decode(key_of(card), encode(card)) == card
