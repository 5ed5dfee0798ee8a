"""One connection to the store's SQLite file: each public method is one transaction. Blocking; one thread at a time.

    kv(key, value, mod_rev, lease)      meta(name, value): schema, rev, floor, collected
    leases(id, ttl, deadline, boot_id)  events(rev, n, key, value)
    ops(op_id, rev, at, boot_id)        the journal; rev NULL: resolved as never applied

Deadlines are seconds of CLOCK_BOOTTIME and hold for one boot_id: a lease of another boot is void.
Every write first ends the leases that are due, as a revision of its own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvmpool.errors import Ambiguous, Conflict, NotFound, Refused, StoreUnreachable
from kvmpool.ports import Batch, Clock, Item, Lease, Put, Resolution, Resync, WatchEvent
from kvmpool.store import contract

SCHEMA = 1
BUSY_S = 2.0  # how long another process may hold the file's write lock; less than the adapter's deadline
DISK_RESERVE_BYTES = 16 << 20  # kept for deletes, revokes and the WAL when the disk fills up
EVENTS_A_CALL = 500  # revisions read at once by a watch that lags

_TABLES = f"""
CREATE TABLE kv(key TEXT PRIMARY KEY, value BLOB NOT NULL, mod_rev INTEGER NOT NULL, lease INTEGER) WITHOUT ROWID;
CREATE INDEX kv_lease ON kv(lease) WHERE lease IS NOT NULL;
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE leases(id INTEGER PRIMARY KEY AUTOINCREMENT, ttl REAL NOT NULL, deadline REAL NOT NULL,
                    boot_id TEXT NOT NULL);
CREATE TABLE events(rev INTEGER, n INTEGER, key TEXT NOT NULL, value BLOB, PRIMARY KEY(rev, n)) WITHOUT ROWID;
CREATE TABLE ops(op_id TEXT PRIMARY KEY, rev INTEGER, at REAL NOT NULL, boot_id TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('schema', {SCHEMA}), ('rev', 0), ('floor', 0), ('collected', 0);
"""


class SqliteFile:
    """Raises only Refused, Conflict, NotFound, Ambiguous and StoreUnreachable."""

    def __init__(self, path: Path, clock: Clock, *, events_kept: int, quota_bytes: int) -> None:
        self._path = path
        self._clock = clock
        self._boot_id = clock.boot_id()
        self._events_kept = events_kept
        self._quota_bytes = quota_bytes
        self._ended = 0  # how often leases were ended on this connection
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._prepare()
        except OSError as error:
            raise Refused(f"store {path}: {error.strerror}. Next: check the path's owner and rights") from error
        except sqlite3.Error as error:
            raise Refused(f"store {path}: {error}. Next: move the file away or restore it from a backup") from error

    def close(self) -> None:
        self._db.close()

    def version(self) -> tuple[int, int]:
        """Changes when another connection has written, and when this one has ended leases that were due."""
        with self._translated():
            self._end_due_leases()
            return int(self._db.execute("PRAGMA data_version").fetchone()[0]), self._ended

    def get(self, key: str) -> Item | None:
        with self._reading():
            row = self._db.execute("SELECT value, mod_rev FROM kv WHERE key = ?", (key,)).fetchone()
        return None if row is None else Item(key, bytes(row[0]), row[1])

    def list(self, prefix: str) -> tuple[tuple[Item, ...], int]:
        with self._reading():
            rows = self._db.execute(
                "SELECT key, value, mod_rev FROM kv WHERE key >= ? AND key < ? ORDER BY key",
                (prefix, prefix + contract.PREFIX_END),
            ).fetchall()
            rev = self._meta("rev")
        return tuple(Item(key, bytes(value), mod_rev) for key, value, mod_rev in rows), rev

    def events(self, prefix: str, after: int) -> tuple[tuple[Batch | Resync, ...], int, bool]:
        """What a watch that has seen `after` says next, the revision it has then seen, and whether there is more."""
        with self._reading():
            rev, floor = self._meta("rev"), self._meta("floor")
            if after > rev or after < floor:
                return (Resync(rev),), rev, False
            upto = min(rev, after + EVENTS_A_CALL)
            rows = self._db.execute(
                "SELECT rev, key, value FROM events"
                " WHERE rev > ? AND rev <= ? AND key >= ? AND key < ? ORDER BY rev, n",
                (after, upto, prefix, prefix + contract.PREFIX_END),
            ).fetchall()
        batches = tuple(
            Batch(at, tuple(WatchEvent(key, None if value is None else bytes(value), at) for _, key, value in group))
            for at, group in itertools.groupby(rows, key=lambda row: int(row[0]))
        )
        return batches, upto, upto < rev

    def commit(self, ops: contract.Ops) -> int:
        with self._writing(ops.op_id):
            done = self._db.execute("SELECT rev FROM ops WHERE op_id = ?", (ops.op_id,)).fetchone()
            if done is not None and done[0] is None:
                raise Conflict(f"commit {ops.op_id} was resolved as never applied; decide again")
            if done is not None:
                return int(done[0])
            self._check(ops)
            rev = self._apply(ops.puts, ops.deletes)
            self._note(ops.op_id, rev)
            self._collect(rev)
            return rev

    def resolve(self, op_id: str, fresh: bool) -> int | Resolution:
        """`fresh`: the caller knows that the commit was sent less than 10 minutes ago."""
        with self._writing():
            done = self._db.execute("SELECT rev FROM ops WHERE op_id = ?", (op_id,)).fetchone()
            if done is not None:
                return Resolution.NOT_APPLIED if done[0] is None else int(done[0])
            if not fresh and self._meta("collected"):
                return Resolution.UNKNOWN
            self._note(op_id, None)  # a late commit of it is refused from now on
            return Resolution.NOT_APPLIED

    def lease_grant(self, ttl_s: float) -> Lease:
        sent_at = self._clock.now()
        with self._writing():
            self._refuse_when_full()
            row = self._db.execute(
                "INSERT INTO leases(ttl, deadline, boot_id) VALUES (?, ?, ?)",
                (ttl_s, self._clock.now() + ttl_s, self._boot_id),
            )
            return Lease(int(row.lastrowid or 0), ttl_s, sent_at)

    def lease_keepalive(self, lease_id: int) -> float:
        with self._writing():
            row = self._db.execute("SELECT ttl FROM leases WHERE id = ?", (lease_id,)).fetchone()
            if row is None:
                raise NotFound(f"lease {lease_id} is gone")
            self._db.execute(
                "UPDATE leases SET deadline = ? WHERE id = ?", (self._clock.now() + row[0], lease_id)
            )
            return float(row[0])

    def lease_revoke(self, lease_id: int) -> None:
        with self._writing():
            self._end((lease_id,))

    # --- parts of a transaction ---

    def _check(self, ops: contract.Ops) -> None:
        for guard in ops.guards:
            row = self._db.execute("SELECT mod_rev FROM kv WHERE key = ?", (guard[0],)).fetchone()
            mod_rev = None if row is None else int(row[0])
            if not contract.holds(guard, mod_rev):
                raise contract.broken(guard, mod_rev)
        if ops.puts:
            self._refuse_when_full()
        for put in ops.puts:
            known = put.lease is None or self._db.execute("SELECT 1 FROM leases WHERE id = ?", (put.lease,)).fetchone()
            if not known:
                raise Conflict(f"store row {put.key}: lease {put.lease} is gone")

    def _apply(self, puts: Sequence[Put], deletes: Sequence[str]) -> int:
        rev = self._meta("rev") + 1
        self._db.execute("UPDATE meta SET value = ? WHERE name = 'rev'", (rev,))
        events: list[tuple[int, int, str, bytes | None]] = []
        for put in puts:
            self._db.execute("REPLACE INTO kv VALUES (?, ?, ?, ?)", (put.key, put.value, rev, put.lease))
            events.append((rev, len(events), put.key, put.value))
        for key in deletes:
            if self._db.execute("DELETE FROM kv WHERE key = ?", (key,)).rowcount:
                events.append((rev, len(events), key, None))
        self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", events)
        return rev

    def _note(self, op_id: str, rev: int | None) -> None:
        self._db.execute("INSERT INTO ops VALUES (?, ?, ?, ?)", (op_id, rev, self._clock.now(), self._boot_id))

    def _collect(self, rev: int) -> None:
        """Forget old events and, after 10 minutes or a reboot, journal entries."""
        floor = rev - self._events_kept
        if floor > self._meta("floor"):
            self._db.execute("DELETE FROM events WHERE rev <= ?", (floor,))
            self._db.execute("UPDATE meta SET value = ? WHERE name = 'floor'", (floor,))
        if rev % 32 == 0:  # a scan of at most some thousand rows; not worth doing at each commit
            gone = self._db.execute(
                "DELETE FROM ops WHERE at < ? OR boot_id <> ?",
                (self._clock.now() - contract.JOURNAL_KEEP_S, self._boot_id),
            ).rowcount
            if gone:
                self._db.execute("UPDATE meta SET value = 1 WHERE name = 'collected'")

    def _end(self, leases: Sequence[int]) -> None:
        """Delete leases and the rows under them, in one revision."""
        keys: list[str] = []
        self._ended += 1
        for lease in leases:
            self._db.execute("DELETE FROM leases WHERE id = ?", (lease,))
            keys += (row[0] for row in self._db.execute("SELECT key FROM kv WHERE lease = ?", (lease,)).fetchall())
        if keys:
            self._apply((), sorted(keys))

    def _due(self) -> tuple[int, ...]:
        rows = self._db.execute(
            "SELECT id FROM leases WHERE deadline <= ? OR boot_id <> ? ORDER BY id", (self._clock.now(), self._boot_id)
        )
        return tuple(int(row[0]) for row in rows.fetchall())

    def _meta(self, name: str) -> int:
        return int(self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()[0])

    def _refuse_when_full(self) -> None:
        """Puts and grants need room; deletes, keepalives and revokes use the rest, so a full store can be emptied."""
        names = ("page_count", "freelist_count", "page_size")
        pages, unused, size = (int(self._db.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
        used = (pages - unused) * size
        if used >= self._quota_bytes:
            full = f"{used >> 10} of {self._quota_bytes >> 10} KiB"
            raise StoreUnreachable(f"store {self._path} is full ({full}). Next: kvmpool doctor")
        free = shutil.disk_usage(self._path.parent).free
        if free < DISK_RESERVE_BYTES:
            raise StoreUnreachable(f"store {self._path}: its disk has {free >> 20} MiB left. Next: make room there")

    # --- transactions ---

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """One snapshot, without the rows of leases that are due."""
        with self._translated():
            self._end_due_leases()
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    def _end_due_leases(self) -> None:
        if self._due():
            with self._writing():
                pass

    @contextmanager
    def _writing(self, op_id: str = "") -> Iterator[None]:
        """One write transaction. An exception of the body undoes the body, not the end of leases that were due."""
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                due = self._due()
                if due:
                    self._end(due)
                self._db.execute("SAVEPOINT body")
                try:
                    yield
                except (Conflict, NotFound, Refused, StoreUnreachable):
                    self._db.execute("ROLLBACK TO body")
                    self._db.execute("COMMIT")
                    raise
                self._finish(op_id)
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _finish(self, op_id: str) -> None:
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            undone = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL)
            if undone or not op_id:
                raise
            line = f"store {self._path}: {error}; commit {op_id} may be on the disk: resolve it"
            raise Ambiguous(op_id, line) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreUnreachable(f"store {self._path}: {error}. Next: kvmpool doctor") from error

    def _prepare(self) -> None:
        """Make the tables, or check that they are ours (before anything in the file is changed)."""
        self._refuse_foreign()
        (journal,) = self._db.execute("PRAGMA journal_mode=WAL").fetchone()
        if journal != "wal":
            line = f"store {self._path}: SQLite cannot use WAL here ({journal})"
            raise Refused(f"{line}. Next: set store.path to a local disk")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if self._refuse_foreign():
                for statement in _TABLES.split(";\n"):
                    self._db.execute(statement)
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _refuse_foreign(self) -> bool:
        """True where the file is empty."""
        tables = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and ("meta" not in tables or self._meta("schema") != SCHEMA):
            line = f"store {self._path} is not a kvmpool store of schema {SCHEMA}"
            raise Refused(f"{line}. Next: move it away or upgrade")
        return not tables
