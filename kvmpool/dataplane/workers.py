"""The worker processes of this host, as the port Workers: started detached, found by their locks, ended for certain."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmpool.core.model import Binding, CardId, ClaimKey, DomainUuid, Generation, WorkerSeen
from kvmpool.dataplane import control, launch, lock
from kvmpool.errors import CardLost, DeadlinePassed, KvmpoolError, Unreachable
from kvmpool.native import native

STATUS_S = 1.0  # a worker's parent never touches the card: it answers at once or something is wrong with it
CARD_S = 8.0  # a card that does not open in this time does not answer
STOP_S = 2.0  # each of: asked, terminated, killed
LOGS_KEPT = 20  # of ended workers: enough to see what happened, bounded

_NAMESPACE = uuid.UUID("a6b0a9c5-6f5e-5b0e-8d7e-6b766d706f6f")  # of virtual GPUs; any constant, and never another


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a session may use of its host. 0: no limit."""

    user: str = ""  # "": the system user kvmpool-worker where it exists
    memory_mib: int = 0
    tasks: int = 0
    cpus: int = 0
    launch_timeout_s: float = 0.0
    pinned_mib: int = 0  # page-locked host memory of a claim; 0: as much as its memory on the card
    mps: bool = False  # the card divides itself: a hard limit is MPS's, and nobody takes turns


_NONE = Confinement()


def virtual_uuid(claim: ClaimKey) -> uuid.UUID:
    """Of the GPU that the guest sees: the same over all rebinds of a claim."""
    return uuid.uuid5(_NAMESPACE, f"{claim.domain}/{claim.name}")


def virtual_pci(claim: ClaimKey) -> str:
    """Likewise; in PCI domains that no bus of a machine has, so that nobody takes it for a real address."""
    digest = virtual_uuid(claim).bytes
    return f"{0xC000 | (digest[0] << 8 | digest[1]) & 0x3FFF:04x}:{digest[2]:02x}:00.0"


class ProcessWorkers:
    """kvmpool.ports.Workers. `folder` holds <domain uuid>/<claim>#<generation>.{sock,lock,log}."""

    def __init__(
        self,
        folder: Path,
        *,
        program: Path | None = None,
        card_s: float = CARD_S,
        stop_s: float = STOP_S,
        confinement: Confinement = _NONE,
    ) -> None:
        self._folder = folder
        self._program = program
        self._card_s = card_s
        self._stop_s = stop_s
        self._confinement = confinement

    async def list(self) -> tuple[WorkerSeen, ...]:
        """All that live, sorted by domain, claim and generation."""
        found = [(key, who) for key in self._known() if (who := self._alive(key)) is not None]
        return tuple(await asyncio.gather(*(self._look(key, who) for key, who in sorted(found))))

    async def start(self, binding: Binding) -> WorkerSeen:
        """See the port. A worker that lives but does not answer is Unreachable; `stop` ends it."""
        key = (binding.claim, binding.generation)
        if self._alive(key) is None:
            await self._launch(binding)
        end = time.monotonic() + self._card_s + STATUS_S
        while (who := self._alive(key)) is not None:
            seen = await self._look(key, who)
            if seen.serving:
                return seen
            if self._path(key, "sock").exists() or time.monotonic() > end:  # else another start of it is on its way
                raise Unreachable(f"{binding.label}: its worker (pid {who.pid}) does not answer")
            await asyncio.sleep(0.02)
        raise Unreachable(f"{binding.label}: its worker ended at once: {launch.last_words(self._path(key, 'log'))}")

    async def stop(self, claim: ClaimKey, generation: Generation, pid: int) -> None:
        """See the port. Asks, terminates, kills; the lock's holder counts, whatever `pid` was seen before."""
        key = (claim, generation)
        name = f"worker {claim.domain}/{claim.name}#{generation}"
        with suppress(KvmpoolError):
            await control.ask(self._path(key, "sock"), name, "STOP", STATUS_S)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            who = self._alive(key)
            if who is not None and number is not None:
                if await self._waits_for_sessions(key):
                    break  # it does what it can; killing it too would only silence it
                lock.send_signal(who, number)
            if await lock.wait_free(self._path(key, "lock"), self._stop_s):
                self._alive(key)  # tidies
                self._prune_logs()
                return
        raise DeadlinePassed(f"{name} (pid {pid}) does not end: a session hangs in the driver. Next: reset its card")

    async def _waits_for_sessions(self, key: tuple[ClaimKey, Generation]) -> bool:
        with suppress(KvmpoolError):
            seen = await control.status(self._path(key, "sock"), "worker", STATUS_S)
            return bool(seen.get("ending")) and bool(seen.get("processes"))
        return False

    async def _launch(self, binding: Binding) -> None:
        key = (binding.claim, binding.generation)
        log = self._path(key, "log")
        launch.prepare(log)
        self._prune_logs()
        program = self._program or native("worker")
        word = await launch.launch(program, self._options(binding), f"worker {binding.label}", log, self._card_s + 2.0)
        if word.startswith(("ready", "busy")):  # busy: another start of it was first
            return
        await lock.wait_free(self._path(key, "lock"), self._card_s)  # it has said why, and is on its way out
        if word.startswith("card "):
            raise CardLost(f"{binding.label}: card {binding.card} does not open: {word.removeprefix('card ')}")
        raise Unreachable(f"{binding.label}: its worker did not start: {launch.last_words(log)}")

    def _options(self, binding: Binding) -> Sequence[str]:
        memory_mib = max(binding.memory_mib, binding.memory_limit_mib)
        return [
            "--uuid", binding.claim.domain, "--domain", binding.domain_name[:200], "--claim", binding.claim.name,
            "--generation", str(binding.generation), "--dir", str(self._folder), "--card", binding.card,
            "--memory-mib", str(memory_mib), "--compute", str(binding.compute_percent),
            "--compute-limit", str(binding.compute_limit_percent),
            "--virtual-uuid", str(virtual_uuid(binding.claim)), "--virtual-pci", virtual_pci(binding.claim),
            "--card-deadline-ms", str(round(self._card_s * 1000)),
            "--pinned-mib", str(self._confinement.pinned_mib),
            "--session-memory-mib", str(self._confinement.memory_mib),
            "--session-tasks", str(self._confinement.tasks), "--session-cpus", str(self._confinement.cpus),
            "--launch-timeout-ms", str(round(self._confinement.launch_timeout_s * 1000)),
            *(["--mps"] if self._confinement.mps else []),
            *(["--user", self._confinement.user] if self._confinement.user else []),
        ]  # fmt: skip

    def _path(self, key: tuple[ClaimKey, Generation], ending: str) -> Path:
        claim, generation = key
        return self._folder / claim.domain / f"{claim.name}#{generation}.{ending}"

    def _known(self) -> Iterator[tuple[ClaimKey, Generation]]:
        for path in self._folder.glob("*/*#*.lock"):
            name, _, number = path.stem.rpartition("#")
            if number.isdecimal():
                yield ClaimKey(DomainUuid(path.parent.name), name), Generation(int(number))

    def _alive(self, key: tuple[ClaimKey, Generation]) -> lock.Holder | None:
        """Who holds its lock; removes what a dead one left."""
        who = lock.holder(self._path(key, "lock"))
        if who is None:
            lock.tidy(self._path(key, "lock"), self._path(key, "sock"))
        return who

    async def _look(self, key: tuple[ClaimKey, Generation], who: lock.Holder) -> WorkerSeen:
        claim, generation = key
        path = self._path(key, "sock")
        try:
            seen: dict[str, Any] = await control.status(path, f"worker {claim.name}#{generation}", STATUS_S)
        except KvmpoolError:
            seen = {}
        return WorkerSeen(
            claim=claim,
            generation=generation,
            address=f"unix:{path}",
            pid=who.pid,
            sessions=int(seen.get("sessions", 0)),
            memory_used_mib=int(seen.get("memory_used", 0)) >> 20,
            pinned_mib=int(seen.get("pinned_limit", 0)) >> 20,
            pinned_used_mib=int(seen.get("pinned_used", 0)) >> 20,
            transports=tuple(sorted(str(each.get("transport")) for each in seen.get("processes", []))),
            relay_connected=bool(seen.get("relay_connected")),
            card=CardId(seen["card"]) if "card" in seen else None,
            serving=bool(seen) and not seen.get("ending"),
        )

    def _prune_logs(self) -> None:
        """Keep the newest logs of ended workers, and no empty folder."""
        ended = [path for path in self._folder.glob("*/*#*.log") if lock.holder(path.with_suffix(".lock")) is None]
        ended.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in ended[LOGS_KEPT:]:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
