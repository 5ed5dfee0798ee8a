"""What every store backend checks in the same way: keys, values, sizes and commits, before anything is sent.

Also the one safe way to commit through an Ambiguous answer: `settle`.
This module does not know any backend.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from kvmpool.errors import Ambiguous, Conflict, Refused, StoreUnreachable
from kvmpool.ports import Guard, Must, Put, Resolution, Store

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 1 << 20
MAX_COMMIT_KEYS = 512  # guards + puts + deletes; etcd's default is 128 operations, raised there by --max-txn-ops
JOURNAL_KEEP_S = 600.0  # how long `resolve` knows of a commit
HEARTBEAT_S = 2.0  # a watch yields within 5 s; less than half of it, so that one late turn is no silence
LEASE_TTL_MAX_S = 3600.0
EVENTS_KEPT = 10_000  # revisions a slow watcher may lag before it must Resync
RESOLVE_TRIES = 4

PREFIX_END = "\U0010ffff"  # sorts after every printable character; check_key refuses it


@dataclass(frozen=True, slots=True)
class Ops:
    """A commit that passed the checks: every key legal and named once, every value small enough."""

    op_id: str
    guards: tuple[Guard, ...]
    puts: tuple[Put, ...]
    deletes: tuple[str, ...]


def checked(op_id: str, guards: Sequence[Guard], puts: Sequence[Put], deletes: Sequence[str]) -> Ops:
    """Raises Refused where no backend could take the commit."""
    check_key(op_id)
    if len(guards) + len(puts) + len(deletes) > MAX_COMMIT_KEYS:
        raise Refused(f"commit {op_id} names more than {MAX_COMMIT_KEYS} keys. Next: split it")
    for key, _ in guards:
        check_key(key)
    written = [*(put.key for put in puts), *deletes]
    for key in written:
        check_key(key)
    if len(set(written)) != len(written):
        raise Refused(f"commit {op_id} writes a key twice: {sorted(written)[:4]}")
    for put in puts:
        if len(put.value) > MAX_VALUE_BYTES:
            raise Refused(f"store row {put.key}: {len(put.value)} bytes, at most {MAX_VALUE_BYTES} are kept")
    return Ops(op_id, tuple(guards), tuple(puts), tuple(deletes))


def check_key(key: str) -> None:
    """Printable, 1 to 512 bytes of UTF-8."""
    if not key or not key.isprintable() or len(key.encode("utf-8")) > MAX_KEY_BYTES:
        raise Refused(f"store key {key[:80]!r}: must be 1 to {MAX_KEY_BYTES} bytes of printable text")


def check_ttl(ttl_s: float) -> None:
    if not 0 < ttl_s <= LEASE_TTL_MAX_S:
        raise Refused(f"lease of {ttl_s} s: must be more than 0 and at most {LEASE_TTL_MAX_S:.0f} s")


def holds(guard: Guard, mod_rev: int | None) -> bool:
    """Whether a guard holds for a key whose row has `mod_rev` (None: there is no row)."""
    _, want = guard
    match want:
        case Must.ABSENT:
            return mod_rev is None
        case Must.PRESENT:
            return mod_rev is not None
        case _:
            return mod_rev == want


def broken(guard: Guard, mod_rev: int | None) -> Conflict:
    key, want = guard
    wanted = want.value if isinstance(want, Must) else f"at revision {want}"
    found = "absent" if mod_rev is None else f"at revision {mod_rev}"
    return Conflict(f"store row {key} is {found}, not {wanted}: somebody wrote first")


def new_op_id() -> str:
    return uuid.uuid4().hex


async def settle(
    store: Store, *, guards: Sequence[Guard] = (), puts: Sequence[Put] = (), deletes: Sequence[str] = ()
) -> int:
    """Commit, and find out what became of it where the store did not say; returns the revision.

    Raises Conflict (also where the outcome can no longer be known: read and decide again), StoreUnreachable,
    or Ambiguous where the store stopped answering before it said whether the commit was applied.
    """
    for _ in range(RESOLVE_TRIES):
        op_id = new_op_id()
        try:
            return await store.commit(op_id, guards=guards, puts=puts, deletes=deletes)
        except Ambiguous as ambiguous:
            answer = await _resolved(store, op_id, ambiguous)
        if isinstance(answer, int):
            return answer
        if answer is Resolution.UNKNOWN:
            raise Conflict(f"commit {op_id}: its outcome is no longer known; read again")
    raise StoreUnreachable(f"the store lost {RESOLVE_TRIES} commits in a row. Next: kvmpool doctor")


async def _resolved(store: Store, op_id: str, ambiguous: Ambiguous) -> int | Resolution:
    for _ in range(RESOLVE_TRIES):
        try:
            return await store.resolve(op_id)
        except StoreUnreachable:
            continue
    raise ambiguous
