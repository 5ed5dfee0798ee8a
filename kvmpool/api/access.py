"""Who may call: the kernel's word about the peer of a unix socket (SO_PEERCRED), checked for every request.

Root may do everything; members of the API's group everything but the hook calls, which only libvirtd makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvmpool.errors import Denied, Unreachable

SOCKET_MODE = 0o660
_CREDENTIALS = struct.Struct("=iII")  # struct ucred of unix(7): pid, uid, gid


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end when it connected."""

    pid: int
    uid: int
    gid: int


class PeerProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also tells the application who its peer is, as `scope["state"]["peer"]`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = peer_of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "peer": peer}


def peer_of(connection: Any) -> Peer:
    """Of a connected unix socket; pid, uid and gid as they were at connect(2)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def check(peer: Peer, path: str, group: str) -> None:
    """Raises Denied where `peer` may not call `path`."""
    if peer.uid == 0:
        return
    if path.startswith("/v1/hooks/"):
        raise Denied(f"uid {peer.uid} may not call {path}: only libvirt's hook does, as root")
    if not _is_member(peer, group):
        raise Denied(f"uid {peer.uid} is not in group {group}. Next: usermod -aG {group} {user_of(peer)}")


def user_of(peer: Peer) -> str:
    """The name of its user; where it has none its number."""
    try:
        return pwd.getpwuid(peer.uid).pw_name
    except KeyError:
        return f"uid {peer.uid}"


def listen(path: Path, group: str) -> socket.socket:
    """A listening socket at `path`, mode 0660, root:`group` (root's own where there is no such group).

    The caller holds the host's lock: a socket that lies there is a dead daemon's. Raises Unreachable.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)
        made.bind(str(aside))
        os.chmod(aside, SOCKET_MODE)
        gid = _gid(group)
        if gid is not None:
            os.chown(aside, -1, gid)
        made.listen(128)
        aside.rename(path)  # nobody can connect before the mode is right
    except OSError as error:
        made.close()
        with contextlib.suppress(OSError):
            aside.unlink()
        raise Unreachable(f"cannot listen on {path}: {error.strerror or error}. Next: check [paths] run") from error
    return made


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


def _is_member(peer: Peer, group: str) -> bool:
    gid = _gid(group)
    if gid is None:
        return False
    if peer.gid == gid:
        return True
    try:
        entry = pwd.getpwuid(peer.uid)
        return gid in os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:
        return False
