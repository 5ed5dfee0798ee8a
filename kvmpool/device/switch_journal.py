"""The undo journal of mode switches: what each function of the bus was, on disk before it is changed.

    origin-ADDRESS.json   as the function was before kvmpool ever touched it: what `kvmpool host leave` restores
    switch-ADDRESS.json   as the functions of a card's unit were before the switch under way; gone when it has ended

A file is written beside, synced, renamed, and its folder synced: after a power cut it is there whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvmpool.core.model import Mode
from kvmpool.device.topology import Function
from kvmpool.errors import Refused, Unreachable

VERSION = 1


@dataclass(frozen=True, slots=True)
class Before:
    """A function as it was. "" where there was none."""

    address: str
    ids: str
    slot: str
    driver: str
    override: str
    d3cold: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A switch under way. `wedged`: the driver that did not let go, and then `boot_id` is of that boot."""

    address: str  # of the card that was asked for
    mode: Mode
    boot_id: str
    before: tuple[Before, ...]
    wedged: str = ""


def before(function: Function) -> Before:
    return Before(function.address, function.ids, function.slot, function.driver, function.override, function.d3cold)


class Journal:
    """One folder of the state directory. Raises Unreachable where it cannot be written, Refused for a damaged file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, entry: Entry) -> None:
        """On disk when it returns."""
        plain = asdict(entry) | {"mode": entry.mode.value, "v": VERSION}
        self._write(f"switch-{entry.address}.json", plain)

    def end(self, entry: Entry) -> None:
        self._remove(f"switch-{entry.address}.json")

    def under_way(self) -> tuple[Entry, ...]:
        """Switches that were begun and not ended, by address."""
        return tuple(_entry(name, self._read(name)) for name in self._names("switch-"))

    def remember(self, functions: Iterable[Before]) -> None:
        """What they were before all changes; what is known already stays, unless another device is there now."""
        known = {each.address: each for each in self.origins()}
        for function in functions:
            old = known.get(function.address)
            if old is None or (old.ids, old.slot) != (function.ids, function.slot):
                self._write(f"origin-{function.address}.json", asdict(function) | {"v": VERSION})

    def origins(self) -> tuple[Before, ...]:
        return tuple(_before(name, self._read(name)) for name in self._names("origin-"))

    def forget(self, function: Before) -> None:
        self._remove(f"origin-{function.address}.json")

    def _names(self, prefix: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.folder) if name.startswith(prefix) and name[-5:] == ".json")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unreachable(f"{self.folder}: {error.strerror}") from error

    def _read(self, name: str) -> dict[str, Any]:
        try:
            plain = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"{self.folder / name} cannot be read. Next: look at it, then remove it") from error
        if not isinstance(plain, dict) or plain.pop("v", None) != VERSION:
            raise Refused(f"{self.folder / name} is of no known version. Next: upgrade kvmpool, or remove it")
        return plain

    def _write(self, name: str, plain: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished = self.folder / f".{name}.new"
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(plain, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.folder / name)
            self._sync()
        except OSError as error:
            raise Unreachable(f"{self.folder / name}: {error.strerror}; nothing was changed") from error

    def _remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
            if self.folder.is_dir():
                self._sync()
        except OSError as error:
            raise Unreachable(f"{self.folder / name}: {error.strerror}") from error

    def _sync(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _before(name: str, plain: dict[str, Any]) -> Before:
    fields = ("address", "ids", "slot", "driver", "override", "d3cold")
    if sorted(plain) != sorted(fields) or not all(type(value) is str for value in plain.values()):
        raise Refused(f"{name} is damaged. Next: look at it, then remove it")
    return Before(**plain)


def _entry(name: str, plain: dict[str, Any]) -> Entry:
    try:
        functions = tuple(_before(name, each) for each in plain["before"])
        texts = {key: plain[key] for key in ("address", "boot_id", "wedged")}
        if not all(type(value) is str for value in texts.values()):
            raise ValueError(name)
        return Entry(**texts, mode=Mode(plain["mode"]), before=functions)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"{name} is damaged. Next: look at it, then remove it") from error
