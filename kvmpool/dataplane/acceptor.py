"""The host's acceptor process, which owns the vsock port, and the map of CIDs that it reads at each connection.

A CID is the hypervisor's word for a guest now; it changes over restarts and moves. So the map is written anew from what
libvirt says, and nothing here remembers one.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmpool.core.model import DomainUuid
from kvmpool.dataplane import launch, lock
from kvmpool.errors import DeadlinePassed, Unreachable
from kvmpool.native import native

START_S = 3.0
STOP_S = 1.0
LOWEST_CID = 3  # 0 to 2 are the hypervisor, loopback and the host (vsock(7))


class Acceptor:
    """`folder` holds acceptor.{lock,log} and a file a CID with its domain's uuid; `relays` is ProcessRelays' folder."""

    def __init__(
        self, folder: Path, relays: Path, *, port: int = 9960, program: Path | None = None, options: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._lock = folder / "acceptor.lock"
        self._program = program
        self._options = ["--dir", str(folder), "--relays", str(relays), "--port", str(port), *options]

    async def start(self) -> None:
        """Start it unless it lives. Raises Unreachable, e.g. where the kernel has no vsock."""
        if lock.holder(self._lock) is not None:
            return
        log = self._folder / "acceptor.log"
        launch.prepare(log)
        word = await launch.launch(self._program or native("acceptor"), self._options, "acceptor", log, START_S)
        if word not in ("ready", "busy"):
            await lock.wait_free(self._lock, STOP_S)
            said = launch.last_words(log)
            raise Unreachable(f"the vsock acceptor does not start: {said}. Next: modprobe vhost_vsock")

    def publish(self, cids: Mapping[int, DomainUuid]) -> None:
        """Let exactly these guests in. Raises Unreachable where the map cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                if path.name.isdecimal() and int(path.name) not in cids:
                    path.unlink(missing_ok=True)
            for cid, domain in cids.items():
                if cid >= LOWEST_CID:
                    self._write(self._folder / str(cid), domain)
        except OSError as error:
            said = error.strerror or error
            raise Unreachable(f"the map of CIDs cannot be written in {self._folder}: {said}") from error

    async def stop(self) -> None:
        """End it. Guests that it passed on are served further. Raises DeadlinePassed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if (who := lock.holder(self._lock)) is None:
                return
            lock.send_signal(who, number)
            if await lock.wait_free(self._lock, STOP_S):
                return
        raise DeadlinePassed("the vsock acceptor does not end although it was killed")

    @staticmethod
    def _write(path: Path, domain: DomainUuid) -> None:
        """Whole or not at all: the acceptor may look at any moment."""
        if path.exists() and path.read_text() == domain:
            return
        new = path.with_name(f".{path.name}.new")
        new.write_text(domain)
        new.replace(path)
