"""Makes a machine a host of the pool, and undoes that: libvirt's hook, and where asked for the systemd units.

Both ways are plans first: a list of actions, empty when nothing is to be done; `apply` performs one. Joining records
what it made in a manifest, and leaving removes exactly that. Every path lies under a movable root.
This module does not talk to kvmpoold, libvirt or systemd: what to restart is told in the plan's notes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmpool.errors import Refused
from kvmpool.native import data

DEFAULT_SOCKET = Path("/run/kvmpool/kvmpoold.sock")

HOOKS = "etc/libvirt/hooks"
HOOK = f"{HOOKS}/qemu.d/50-kvmpool"
FOLDER = f"{HOOKS}/kvmpool"  # beside qemu.d: libvirt runs any executable in there, whatever its name
MANIFEST = f"{FOLDER}/installed"
UNIT = "etc/systemd/system/kvmpoold.service"
SYSUSERS = "etc/sysusers.d/kvmpool.conf"
MODES = "etc/kvmpool/conf.d/50-modes.toml"
TMPFILES = "etc/tmpfiles.d/kvmpool.conf"

RELOAD = "libvirt finds new hooks only when it starts: systemctl restart libvirtd (guests go on running)"
START = "systemctl daemon-reload; systemd-sysusers; systemd-tmpfiles --create; systemctl enable --now kvmpoold"
STOP = "systemctl disable --now kvmpoold before; systemctl daemon-reload after"


@dataclass(frozen=True, slots=True)
class Action:
    """One change of the file system. `verb`: "make folder", "write", "remove", "remove folder"."""

    verb: str
    path: Path
    content: bytes = b""
    mode: int = 0o644

    def __str__(self) -> str:
        mode = f" (mode {self.mode:04o}, {len(self.content)} bytes)" if self.verb == "write" else ""
        return f"{self.verb} {self.path}{mode}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, in an order of which every prefix is safe, and what a person must do then."""

    actions: tuple[Action, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    content: bytes
    mode: int = 0o644


def plan_join(
    root: Path = Path("/"),
    *,
    socket: Path = DEFAULT_SOCKET,
    deadline_s: float = 5.0,
    units: bool = False,
    modes: Sequence[str] = (),
) -> Plan:
    """What joining takes. `modes`: `ADDRESS=MODE` of cards. Raises Refused where a foreign file lies in the way."""
    files = _files(socket, deadline_s, units)
    if modes:
        files.insert(0, _File(MODES, _modes(modes)))
    listed = _listed(root)
    new = [file for file in files if not _same(root / file.path, file)]
    foreign = [file.path for file in new if file.path not in listed and (root / file.path).exists()]
    if foreign:
        raise Refused(f"{root / foreign[0]} exists and is not kvmpool's. Next: move it away, then join again")
    folders = _missing_folders(root, files)
    actions = [Action("make folder", root / path, mode=0o755) for path in folders]
    manifest = _File(MANIFEST, _manifest({**listed, **{path: "" for path in folders}, **_sums(files)}))
    if not _same(root / MANIFEST, manifest):  # before what it lists: a join that is cut off can be left
        actions.append(Action("write", root / MANIFEST, manifest.content, manifest.mode))
    actions += [Action("write", root / file.path, file.content, file.mode) for file in new]
    notes = []
    if any(file.path == HOOK for file in new) and not _libvirt_knows(root):
        notes.append(RELOAD)
    if any(file.path in (UNIT, SYSUSERS, TMPFILES) for file in new):
        notes.append(START)
    return Plan(tuple(actions), tuple(notes))


def plan_leave(root: Path = Path("/")) -> Plan:
    """What leaving takes: the hook first, then the rest of the manifest, folders only where they become empty."""
    listed = _listed(root)
    if not listed:
        return Plan(())
    files = [path for path, digest in listed.items() if digest and (root / path).exists()]
    files.sort(key=lambda path: (path != HOOK, path))
    actions = [Action("remove", root / path) for path in [*files, MANIFEST]]
    gone = {action.path for action in actions}
    for path in sorted((path for path, digest in listed.items() if not digest), key=len, reverse=True):
        folder = root / path
        if folder.is_dir() and all(entry in gone for entry in folder.iterdir()):
            actions.append(Action("remove folder", folder))
            gone.add(folder)
    return Plan(tuple(actions), (STOP,) if UNIT in listed else ())


def apply(plan: Plan) -> None:
    """Perform the plan. Raises Refused where the file system does not allow it; what was done stays and can be left."""
    for action in plan.actions:
        try:
            _perform(action)
        except OSError as error:
            why = f"cannot {action.verb} {action.path}: {error.strerror}"
            raise Refused(f"{why}. Next: be root; the root folder must exist") from error


def _perform(action: Action) -> None:
    match action.verb:
        case "make folder":
            action.path.mkdir(mode=action.mode, exist_ok=True)
        case "write":
            # The unfinished file never lies in qemu.d, where libvirt would run it.
            beside = action.path.parent.parent if action.path.parent.name == "qemu.d" else action.path.parent
            unfinished = beside / f".{action.path.name}.kvmpool-{os.getpid()}"
            unfinished.write_bytes(action.content)
            unfinished.chmod(action.mode)
            unfinished.replace(action.path)
        case "remove":
            action.path.unlink(missing_ok=True)
        case "remove folder":
            action.path.rmdir()


def _files(socket: Path, deadline_s: float, units: bool) -> list[_File]:
    """In the order in which they are written: the hook itself last, when all it needs is there."""
    conf = f"# Written by `kvmpool host join`.\nsocket={socket}\ndeadline_s={deadline_s:g}\n"
    files = [
        _File(f"{FOLDER}/hook.conf", conf.encode()),
        _File(f"{FOLDER}/hook.py", data("hooks", "hook.py").read_bytes()),
    ]
    if units:
        unit = data("systemd", "kvmpoold.service").read_text().replace("@KVMPOOLD@", _kvmpoold())
        files += [
            _File(UNIT, unit.encode()),
            _File(SYSUSERS, data("systemd", "kvmpool.sysusers").read_bytes()),
            _File(TMPFILES, data("systemd", "kvmpool.tmpfiles").read_bytes()),
        ]
    return [*files, _File(HOOK, data("hooks", "qemu").read_bytes(), 0o755)]


def _modes(modes: Sequence[str]) -> bytes:
    listed = ", ".join(f'"{each}"' for each in modes)
    return f"# Written by `kvmpool host join`.\n[cards]\nmodes = [{listed}]\n".encode()


def _kvmpoold() -> str:
    beside = Path(sys.executable).with_name("kvmpoold")
    return str(beside) if beside.exists() else (shutil.which("kvmpoold") or str(beside))


def _same(path: Path, file: _File) -> bool:
    try:
        return path.read_bytes() == file.content and path.stat().st_mode & 0o777 == file.mode
    except OSError:
        return False


def _missing_folders(root: Path, files: list[_File]) -> list[str]:
    """Outermost first."""
    wanted = {str(parent) for file in [*files, _File(MANIFEST, b"")] for parent in Path(file.path).parents}
    return sorted(path for path in wanted if path != "." and not (root / path).is_dir())


def _libvirt_knows(root: Path) -> bool:
    """Whether libvirt has had a reason to look for qemu hooks since it started: any executable one."""
    folder = root / HOOKS / "qemu.d"
    scripts = [root / HOOKS / "qemu", *(folder.iterdir() if folder.is_dir() else ())]
    return any(script.is_file() and os.access(script, os.X_OK) for script in scripts)


# --- the manifest: one line a path, "sha256 path" of a file, "folder path" of a folder --------------------------------


def _sums(files: list[_File]) -> dict[str, str]:
    return {file.path: hashlib.sha256(file.content).hexdigest() for file in files}


def _manifest(entries: dict[str, str]) -> bytes:
    lines = [f"{digest or 'folder'} {path}" for path, digest in sorted(entries.items())]
    return ("\n".join(lines) + "\n").encode()


def _listed(root: Path) -> dict[str, str]:
    """What a join has recorded; paths that do not lie below the root are not believed."""
    try:
        lines = (root / MANIFEST).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    entries = {}
    for line in lines:
        digest, _, path = line.partition(" ")
        if path and not path.startswith("/") and ".." not in Path(path).parts:
            entries[path] = "" if digest == "folder" else digest
    return entries
