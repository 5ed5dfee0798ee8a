"""The place where a run of this host reaches its relay: a unix socket that its user's group, and nobody else, may open.

The folder stays root's: a user who could write there could have the relay's next socket made elsewhere.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvmpool.core.model import DomainUuid
from kvmpool.errors import Unreachable

_OUTER_MODE = 0o711  # through it, not into it: relay.ctl and relay.log are 0660 and 0640, root's
_INNER_MODE = 0o2710  # set-group-id: the relay's socket (0660) gets the folder's group, also after a restart


class LocalPlaces:
    """`relays`, `guests`: the folders of ProcessRelays, which removes what is made here when it closes the relay."""

    def __init__(self, relays: Path, guests: Path) -> None:
        self._relays = relays
        self._guests = guests

    def make(self, domain: DomainUuid, gid: int) -> str:
        """The endpoint for a process whose group is `gid`. Raises Unreachable."""
        outer = self._relays / domain
        inner = outer / "run"
        try:
            inner.mkdir(parents=True, exist_ok=True)
            outer.chmod(_OUTER_MODE)
            os.chown(inner, -1, gid)
            inner.chmod(_INNER_MODE)  # after chown, which takes the bit away
        except OSError as error:
            raise Unreachable(f"{inner} cannot be made: {error.strerror or error}") from error
        return f"unix:{inner / 'cuda.sock'}"

    def token(self, domain: DomainUuid) -> str:
        """What the run shows its relay. Raises Unreachable where no relay has been opened."""
        try:
            return (self._guests / domain / "token").read_text().strip()
        except OSError as error:
            raise Unreachable(f"run {domain}: its token is not there: {error.strerror or error}") from error

    def remove(self, domain: DomainUuid) -> None:
        """Of a run that got no relay. Idempotent."""
        if not (self._relays / domain / "relay.lock").exists():
            shutil.rmtree(self._relays / domain, ignore_errors=True)
