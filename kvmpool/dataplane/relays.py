"""The relay processes of this host, one a domain, as the port Relays; and the files that tell the guest where to dial.

The guest's endpoint and token stay as they are for as long as its domain lives, whatever happens to relay and kvmpoold.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvmpool.core.model import DomainUuid, Generation, RelaySeen
from kvmpool.dataplane import control, launch, lock
from kvmpool.dataplane.windows import Windows
from kvmpool.errors import DeadlinePassed, KvmpoolError, Refused, Unreachable
from kvmpool.native import native

STATUS_S = 1.0
POINT_S = 3.0  # the relay itself gives a worker 2 s (src/relay.h, RELAY_WORKER_MS)
START_S = 3.0
STOP_S = 1.0  # each of: asked, terminated, killed
VSOCK_PORT = 9960


class ProcessRelays:
    """kvmpool.ports.Relays.

    `folder` holds <domain uuid>/relay.{ctl,lock,log}, `guests` <domain uuid>/{endpoint,token} for fw_cfg, readable by
    `guest_group` (QEMU's; "" leaves our own). `listen`: "tcp:ADDRESS:PORT" (0: any), "unix", "vsock" or "vsock:PORT".
    """

    def __init__(
        self,
        folder: Path,
        guests: Path,
        *,
        listen: str,
        guest_group: str = "",
        program: Path | None = None,
        windows: Windows | None = None,
    ) -> None:
        self._folder = folder
        self._guests = guests
        self._listen = listen
        self._group = guest_group
        self._program = program
        self._windows = windows or Windows(guest_group)
        self._watched: dict[DomainUuid, socket.socket] = {}  # relays that we are responsible for

    async def list(self) -> tuple[RelaySeen, ...]:
        """All that live, sorted by domain."""
        found = []
        for path in sorted(self._folder.glob("*/relay.lock")):
            domain = DomainUuid(path.parent.name)
            if (who := lock.holder(path)) is not None:
                found.append((domain, who))
        for gone in self._watched.keys() - {domain for domain, _ in found}:
            self._unwatch(gone)
        return tuple(await asyncio.gather(*(self._look(domain, who) for domain, who in found)))

    async def open(
        self, domain: DomainUuid, domain_name: str, claims: Sequence[str], endpoint: str, shared_mib: int = 0
    ) -> RelaySeen:
        """See the port. Raises Unreachable when it does not listen, e.g. as the address is taken.

        No `endpoint` and no living relay: a new life of the domain, with a new token. What an earlier one left is void.
        """
        who = lock.holder(self._path(domain, "relay.lock"))
        if who is None and not endpoint:
            shutil.rmtree(self._guests / domain, ignore_errors=True)
        self._write(domain, "token", self._read(domain, "token") or secrets.token_hex(16))
        if who is None:
            window = (
                ["--window", str(self._windows.prepare(domain, shared_mib, new=not endpoint))] if shared_mib else []
            )
            await self._launch(domain, domain_name, claims, endpoint or self._choose(domain), window)
            who = lock.holder(self._path(domain, "relay.lock"))
        if who is None:
            raise Unreachable(f"{domain_name}: its relay ended at once: {self._last_words(domain)}")
        for claim in claims:  # one that lived already may not know all of them
            await self._ask(domain, f"CLAIM {claim}", STATUS_S)
        seen = await self._status(domain, who)
        self._write(domain, "endpoint", seen.endpoint)
        return seen

    async def point(self, domain: DomainUuid, claim: str, generation: Generation, worker: str, memory_mib: int) -> None:
        """See the port. Returns when the worker has accepted the relay; Unreachable when it does not."""
        path = worker.removeprefix("unix:")
        try:
            await self._ask(domain, f"POINT {claim} {generation} {memory_mib}\n{path}", POINT_S)
        except Refused as error:  # nothing that a person asked for: the worker is gone or another's
            raise Unreachable(str(error)) from error

    async def unpoint(self, domain: DomainUuid, claim: str, reason: str) -> None:
        """See the port. Nothing to do where no relay lives: nothing points there either."""
        if lock.holder(self._path(domain, "relay.lock")) is not None:
            await self._ask(domain, f"UNPOINT {claim}\n{reason}", STATUS_S)

    async def close(self, domain: DomainUuid) -> None:
        """See the port. Its workers end with it. Raises DeadlinePassed when it does not go."""
        path = self._path(domain, "relay.lock")
        with suppress(KvmpoolError):
            await self._ask(domain, "CLOSE", STATUS_S)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            who = lock.holder(path)
            if who is not None and number is not None:
                lock.send_signal(who, number)
            if await lock.wait_free(path, STOP_S):
                self._unwatch(domain)
                self._windows.remove(domain)
                shutil.rmtree(path.parent, ignore_errors=True)
                shutil.rmtree(self._guests / domain, ignore_errors=True)
                return
        raise DeadlinePassed(f"relay of domain {domain} does not end although it was killed")

    async def follow(self, domain: DomainUuid, pid: int) -> None:
        """See the port. The connection is held: so long the relay waits to be closed when the process has ended."""
        who, path = f"relay of domain {domain}", self._path(domain, "relay.ctl")
        try:
            held = await control.hold(path, who, f"FOLLOW {pid} {lock.start_time(pid)}", STATUS_S)
        except (FileNotFoundError, ProcessLookupError, Refused) as error:
            raise Unreachable(f"relay of domain {domain}: process {pid} is not there to follow") from error
        self._unwatch(domain)
        self._watched[domain] = held

    def _unwatch(self, domain: DomainUuid) -> None:
        if (held := self._watched.pop(domain, None)) is not None:
            held.close()

    async def _ask(self, domain: DomainUuid, text: str, deadline_s: float) -> str:
        return await control.ask(self._path(domain, "relay.ctl"), f"relay of domain {domain}", text, deadline_s)

    async def _look(self, domain: DomainUuid, who: lock.Holder) -> RelaySeen:
        """One that does not answer lives, and points nowhere that anybody knows of.

        A kvmpoold that was killed in `open` leaves a relay whose endpoint it has not written: that is made up for here.
        """
        try:
            seen = await self._status(domain, who)
        except KvmpoolError:
            return RelaySeen(domain, self._read(domain, "endpoint"), who.pid)
        if self._read(domain, "token"):  # else it is being closed
            with suppress(Unreachable):
                self._write(domain, "endpoint", seen.endpoint)
        return seen

    async def _status(self, domain: DomainUuid, who: lock.Holder) -> RelaySeen:
        seen = await control.status(self._path(domain, "relay.ctl"), f"relay of domain {domain}", STATUS_S)
        claims = seen.get("claims", {}).items()
        points = {name: Generation(claim["generation"]) for name, claim in claims if claim["state"] == "pointed"}
        return RelaySeen(domain, str(seen["endpoint"]), who.pid, points, int(seen["sessions"]), int(seen["follows"]))

    async def _launch(
        self, domain: DomainUuid, name: str, claims: Sequence[str], where: str, more: Sequence[str]
    ) -> None:
        log = self._path(domain, "relay.log")
        launch.prepare(log)
        options = [
            "--uuid", domain, "--domain", name[:200], "--dir", str(self._folder), "--endpoint", where,
            "--token-file", str(self._guests / domain / "token"), *(w for claim in claims for w in ("--claim", claim)),
            *more,
        ]  # fmt: skip
        word = await launch.launch(self._program or native("relay"), options, f"relay {name}", log, START_S)
        if not word.startswith(("ready", "busy")):
            await lock.wait_free(self._path(domain, "relay.lock"), STATUS_S)  # it has said why, and is on its way out
            raise Unreachable(f"{name}: its relay does not listen at {where}: {self._last_words(domain)}")

    def _choose(self, domain: DomainUuid) -> str:
        kind, _, port = self._listen.partition(":")
        if kind == "unix":
            return f"unix:{self._path(domain, 'guest.sock')}"
        if kind == "vsock":
            return f"vsock:2:{port or VSOCK_PORT}"
        return self._listen

    def _last_words(self, domain: DomainUuid) -> str:
        return launch.last_words(self._path(domain, "relay.log"))

    def _path(self, domain: DomainUuid, name: str) -> Path:
        return self._folder / domain / name

    def _read(self, domain: DomainUuid, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self._guests / domain / name).read_text().strip()
        return ""

    def _write(self, domain: DomainUuid, name: str, text: str) -> None:
        """Whole or not at all; 0640, for QEMU's group."""
        if self._read(domain, name) == text:
            return
        try:
            self._replace(self._guests / domain, name, text)
        except (OSError, LookupError) as error:
            raise Unreachable(f"domain {domain}: the guest's {name} cannot be written: {error}") from error

    def _replace(self, folder: Path, name: str, text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        new = folder / f".{name}.new"
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        if self._group:
            shutil.chown(folder, group=self._group)
            shutil.chown(new, group=self._group)
        new.replace(folder / name)
