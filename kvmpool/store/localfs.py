"""Says whether a path is on a filesystem where SQLite's locks and WAL can be trusted.

Reads /proc/self/mountinfo (proc(5)); knows nothing of stores.
"""

from __future__ import annotations

from pathlib import Path

from kvmpool.errors import Refused

# Filesystems shared with another machine (or another kernel): WAL's shared memory does not work there
# (sqlite.org/wal.html, "WAL does not work over a network filesystem") and their locks may be local only.
_NETWORK = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "smb3", "smbfs", "vboxsf", "virtiofs"),
        *("fuse.ceph", "fuse.cephfs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"),
    )
)


def refuse_network(path: Path, mountinfo: str | None = None) -> None:
    """Raises Refused where `path` is on a network filesystem. `mountinfo` replaces the kernel's table (tests)."""
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape") if mountinfo is None else mountinfo
    where, kind = _mount_of(str(path.resolve()), text)
    if kind in _NETWORK:
        raise Refused(
            f"store {path} is on {kind} (mounted at {where}), where SQLite loses writes."
            " Next: set store.path to a local disk"
        )


def _mount_of(path: str, mountinfo: str) -> tuple[str, str]:
    """Mount point and filesystem type; the longest match, and of equals the last one mounted."""
    best = ("/", "")
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        words = left.split()
        if not separator or len(words) < 5 or not right.split():
            continue
        point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, right.split()[0])
    return best
