"""Reads kvmpoold's configuration: one TOML file and conf.d/*.toml, every fault of all files reported at once.

Each section is a frozen dataclass and each key a field of it, so what is not a field here is not a key. A file of
conf.d overrides single keys of the files before it (by name). Knows nothing of what the values are used for.
"""

from __future__ import annotations

import difflib
import re
import socket
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_type_hints

from kvmpool.core.health import Limits
from kvmpool.core.model import Settings
from kvmpool.errors import ConfigInvalid

DEFAULT_FILE = Path("/etc/kvmpool/kvmpoold.toml")


def _number(default: float, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


def _text(default: str, form: str, told: str) -> Any:
    """`told`: the allowed values, for a person."""
    return field(default=default, metadata={"form": re.compile(form), "told": told})


_PATH = (r"/[^\0]*", "an absolute path")
_LISTEN = r"unix|vsock(:[0-9]{1,5})?|tcp:(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z.-]+):[0-9]{1,5}"


@dataclass(frozen=True, slots=True)
class HostSection:
    name: str = _text("", r"([A-Za-z0-9][A-Za-z0-9.-]{0,62})?", "letters, digits, '.' and '-', at most 63")


@dataclass(frozen=True, slots=True)
class PathsSection:
    run: str = _text("/run/kvmpool", *_PATH)
    state: str = _text("/var/lib/kvmpool", *_PATH)


@dataclass(frozen=True, slots=True)
class ApiSection:
    group: str = _text("kvmpool", r"[A-Za-z_][A-Za-z0-9_-]{0,31}", "the name of a group")


@dataclass(frozen=True, slots=True)
class StoreSection:
    kind: str = _text("sqlite", "sqlite", "sqlite")


@dataclass(frozen=True, slots=True)
class DeviceSection:
    kmsg: str = _text("/dev/kmsg", r"(/[^\0]*)?", "an absolute path, or empty for none")
    sysroot: str = _text("/", *_PATH)
    inventory_interval_s: float = _number(1.0, 0.1, 60.0)  # design 05 §5.4: silent loss is seen within 2 s
    look_deadline_s: float = _number(2.0, 0.5, 120.0)  # of one look at sysfs or NVML's list
    nvml: bool = True
    udev: str = _text("auto", "auto|udev|kernel|", "auto, udev, kernel (where no udevd runs) or empty for none")


@dataclass(frozen=True, slots=True)
class CardsSection:
    match: tuple[str, ...] = field(
        default=("10de:*",),
        metadata={
            "form": re.compile(r"(\*|[0-9a-f]{4}):(\*|[0-9a-f]{4})(/[0-9a-f]{2,4})?"),
            "told": "vendor:device or vendor:device/class in hex, * for any vendor or device",
        },
    )
    modes: tuple[str, ...] = field(
        default=(),
        metadata={
            "form": re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]=(passthrough|vgpu|off)"),
            "told": "ADDRESS=MODE, for example 0000:41:00.0=passthrough (or vgpu, off)",
            "may_be_empty": True,
        },
    )
    default_mode: str = _text("", "(passthrough|vgpu|off)?", "passthrough, vgpu, off, or empty: as it is found")


@dataclass(frozen=True, slots=True)
class LibvirtSection:
    uri: str = _text("qemu:///system", r"[a-z][a-z0-9+.-]*://.*", "a libvirt URI")


@dataclass(frozen=True, slots=True)
class DataplaneSection:
    listen: str = _text("tcp:10.77.0.1:0", _LISTEN, "tcp:HOST:PORT, vsock, vsock:PORT or unix")
    guest_group: str = _text("auto", r"([A-Za-z_][A-Za-z0-9_-]{0,31})?", "the name of a group, auto or empty")
    worker_user: str = _text("", r"([a-z_][a-z0-9_-]{0,31})?", "the name of a user, or empty for kvmpool-worker")
    session_memory_mib: int = _number(8192, 0, 1 << 30)
    session_tasks: int = _number(1024, 0, 1 << 20)
    session_cpus: int = _number(0, 0, 1 << 16)
    pinned_mib: int = _number(0, 0, 1 << 30)
    launch_timeout_s: float = _number(0.0, 0.0, 86400.0)
    mps: bool = False


@dataclass(frozen=True, slots=True)
class PolicySection:
    """core's Settings, less what belongs to the hook."""

    paused: bool = False
    memory_ratio: float = _number(1.0, 0.1, 16.0)
    breaker_window_s: float = _number(60.0, 1.0, 86400.0)
    breaker_host_fraction: float = _number(0.30, 0.0, 1.0)
    breaker_pool_fraction: float = _number(0.20, 0.0, 1.0)
    breaker_min_cards: int = _number(2, 0, 1000)
    breaker_incident_s: float = _number(2.0, 0.0, 60.0)
    broken_limit: int = _number(3, 1, 1000)


@dataclass(frozen=True, slots=True)
class HookSection:
    deadline_s: float = _number(5.0, 1.0, 120.0)  # libvirt holds the domain's lock meanwhile


@dataclass(frozen=True, slots=True)
class PlugSection:
    """How a guest is asked to give a card back: a booting one needs a minute or two until it answers."""

    answer_s: float = _number(20.0, 1.0, 600.0)
    tries: int = _number(8, 1, 1000)


@dataclass(frozen=True, slots=True)
class Config:
    """All of it, checked. `files`: what it was read from, in order."""

    host: HostSection = HostSection()
    paths: PathsSection = PathsSection()
    api: ApiSection = ApiSection()
    store: StoreSection = StoreSection()
    device: DeviceSection = DeviceSection()
    cards: CardsSection = CardsSection()
    libvirt: LibvirtSection = LibvirtSection()
    dataplane: DataplaneSection = DataplaneSection()
    policy: PolicySection = PolicySection()
    health: Limits = Limits()
    hook: HookSection = HookSection()
    plug: PlugSection = PlugSection()
    files: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        return Path(self.paths.run)

    @property
    def socket(self) -> Path:
        return self.run_dir / "kvmpoold.sock"

    @property
    def store_file(self) -> Path:
        return Path(self.paths.state) / "store.db"

    @property
    def modes_dir(self) -> Path:
        """The journal of mode switches: `kvmpool host leave` reads it too."""
        return Path(self.paths.state) / "modes"

    @property
    def originals_dir(self) -> Path:
        """Definitions of domains from before kvmpool edited them: `kvmpool host leave` reads them too."""
        return Path(self.paths.state) / "domains"

    @property
    def settings(self) -> Settings:
        """The policy as the core takes it. The hook's deadline less what the answer needs to travel."""
        policy = {each.name: getattr(self.policy, each.name) for each in fields(self.policy)}
        return Settings(**policy, prepare_deadline_s=self.prepare_deadline_s)

    @property
    def prepare_deadline_s(self) -> float:
        """How long `prepare` may wait: the hook must still get the reason before its own deadline."""
        return self.hook.deadline_s * 0.9


def load(path: Path | None = None, conf_d: Path | None = None) -> Config:
    """The configuration in force. Raises ConfigInvalid with every fault, one a line.

    `path` None: the default file, which may be missing (all defaults); a named file must exist. conf.d lies beside it.
    """
    main = path or DEFAULT_FILE
    faults: list[str] = []
    values: dict[str, dict[str, tuple[Path, Any]]] = {}
    sources = [main] if path or main.exists() else []
    folder = conf_d or main.parent / "conf.d"
    sources += sorted(folder.glob("*.toml"))
    for source in sources:
        for section, key, value in _read(source, faults):
            values.setdefault(section, {})[key] = (source, value)
    config = _build(values, faults)
    if faults:
        raise ConfigInvalid("\n".join(faults))
    if not config.host.name:
        config = replace(config, host=HostSection(name=socket.gethostname()))
    return replace(config, files=tuple(str(source) for source in sources))


def _read(source: Path, faults: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Section, key, value of every pair that has a place; the others become faults."""
    try:
        plain = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(f"{source}: cannot be read: {error.strerror}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(f"{source}: not TOML: {error}")
        return
    for section, table in plain.items():
        known = _SECTIONS.get(section)
        if known is None:
            faults.append(f"{source}: [{section}] is not a section{_nearest(section, _SECTIONS)}")
        elif not isinstance(table, dict):
            faults.append(f"{source}: {section} is a section: write [{section}] and keys under it")
        else:
            for key, value in table.items():
                if key not in known:
                    faults.append(f"{source}: {section}.{key} is not a key{_nearest(key, known)}")
                else:
                    fault = _fault(known[key], value)
                    if fault:
                        faults.append(f"{source}: {section}.{key} = {_shown(value)}: {fault}")
                    yield section, key, value


def _nearest(word: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else f" (known: {', '.join(known)})"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


@dataclass(frozen=True, slots=True)
class _Key:
    kind: Any
    metadata: Any


def _fault(key: _Key, value: Any) -> str:
    """What is wrong with the value, or ""."""
    if key.kind == tuple[str, ...]:
        if not isinstance(value, list) or not (value or key.metadata.get("may_be_empty")):
            return "must be a list of at least one text"
        return next((fault for each in value if (fault := _fault(_Key(str, key.metadata), each))), "")
    if key.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not key.kind:
        return f"must be {_WORDS[key.kind]}"
    if key.kind is str:
        ok = key.metadata["form"].fullmatch(value) and value.isprintable()
        return "" if ok else f"must be {key.metadata['told']}"
    if key.kind in (int, float):
        low, high = key.metadata.get("low", _LOW[key.kind]), key.metadata.get("high", _HIGH[key.kind])
        return "" if low <= value <= high else f"must be from {low} to {high}"
    return ""


# For keys that have no range of their own (the core's health limits): times in seconds up to 30 days, counts.
_LOW = {int: 1, float: 0.01}
_HIGH = {int: 1000, float: 30 * 86400.0}
_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def _keys(section: type[Any]) -> dict[str, _Key]:
    hints = get_type_hints(section)
    return {each.name: _Key(hints[each.name], each.metadata) for each in fields(section)}


_SECTION_TYPES: dict[str, type[Any]] = {
    name: hint for name, hint in get_type_hints(Config).items() if name not in ("files",)
}
_SECTIONS: dict[str, dict[str, _Key]] = {name: _keys(kind) for name, kind in _SECTION_TYPES.items()}


def _build(values: dict[str, dict[str, tuple[Path, Any]]], faults: list[str]) -> Config:
    """The sections with the values that are right; what two keys must be together is checked last."""
    sections = {}
    for name, kind in _SECTION_TYPES.items():
        good = {}
        for key, (_, value) in values.get(name, {}).items():
            if not _fault(_SECTIONS[name][key], value):
                good[key] = _cast(_SECTIONS[name][key].kind, value)
        sections[name] = kind(**good)
    config = Config(**cast(Any, sections))
    port = config.dataplane.listen.rpartition(":")[2]
    if port.isdigit() and int(port) > 65535:
        source = values["dataplane"]["listen"][0]
        faults.append(f"{source}: dataplane.listen = {config.dataplane.listen!r}: the port must be from 0 to 65535")
    return config


def _cast(kind: Any, value: Any) -> Any:
    if kind is float:
        return float(value)
    return tuple(value) if isinstance(value, list) else value
