"""Checks of kvmpoold: its configuration, who may ask it, where guests dial, whether it answers and what it says."""

from __future__ import annotations

import socket

from kvmpool import __version__
from kvmpool.api.client import Client
from kvmpool.daemon.config import Config, load
from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.errors import ConfigInvalid, KvmpoolError

AREA = "kvmpoold"
_DEADLINE_S = 3.0
_FILE = "/etc/kvmpool/kvmpoold.toml"
_HOOK_CONF = "/etc/libvirt/hooks/kvmpool/hook.conf"


def configuration(place: Place) -> Finding:
    title = "configuration"
    try:
        config = _config(place)
    except ConfigInvalid as error:
        first, *others = str(error).splitlines()
        more = f" (and {len(others)} more)" if others else ""
        return Finding(AREA, title, Level.FAIL, f"{first}{more}", "kvmpoold --check")
    return Finding(AREA, title, Level.PASS, "" if config.files else f"{_FILE} is absent: the defaults hold")


def hook_settings(place: Place) -> Finding:
    """The hook reads no TOML: `host join` writes down for it what kvmpoold's configuration says."""
    title = "the hook's settings"
    told = dict(line.split("=", 1) for line in place.read(_HOOK_CONF).splitlines() if "=" in line and line[:1] != "#")
    if not told:
        return Finding(AREA, title, Level.WARN, f"no {_HOOK_CONF}: the hook's defaults hold", "kvmpool host join")
    config = config_or_defaults(place)
    if told.get("socket") != str(config.socket):
        remedy = f"KVMPOOL_SOCKET={config.socket} kvmpool host join"
        return Finding(AREA, title, Level.FAIL, f"it asks {told.get('socket')}, kvmpoold has {config.socket}", remedy)
    deadline_s = config.hook.deadline_s
    if told.get("deadline_s") != f"{deadline_s:g}":
        detail = f"it waits {told.get('deadline_s')} s, kvmpoold's [hook] deadline_s is {deadline_s:g}"
        return Finding(AREA, title, Level.WARN, detail, f"kvmpool host join --deadline {deadline_s:g}")
    return Finding(AREA, title, Level.PASS)


def group(place: Place) -> Finding:
    name = config_or_defaults(place).api.group
    title = f"group {name}"
    members = place.members(name)
    if members is None:
        return Finding(AREA, title, Level.WARN, "absent: only root may use the CLI", f"groupadd --system {name}")
    return Finding(AREA, title, Level.PASS, ", ".join(members) if members else "no members: only root uses the CLI")


def listen(place: Place) -> Finding:
    """The first thing that goes wrong on a new host: the default address is the lab's."""
    title = "address that guests dial"
    kind, _, address = config_or_defaults(place).dataplane.listen.partition(":")
    if kind != "tcp":
        return Finding(AREA, title, Level.PASS, kind)
    host = address.rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except OSError as error:
        remedy = f"set [dataplane] listen in {_FILE} to an address of this host on the guests' bridge"
        return Finding(AREA, title, Level.FAIL, f"{host}: {error.strerror or error}", remedy)
    return Finding(AREA, title, Level.PASS, host)


def answers(place: Place) -> Finding:
    title = "answers"
    try:
        body = Client(place.socket, deadline_s=_DEADLINE_S).get("/status")
    except KvmpoolError as error:
        message, _, remedy = str(error).partition(" Next: ")
        return Finding(AREA, title, Level.FAIL, message.rstrip("."), remedy or "systemctl status kvmpoold")
    if body["version"] != __version__:
        detail = f"it is {body['version']}, this kvmpool is {__version__}"
        return Finding(AREA, title, Level.WARN, detail, "systemctl restart kvmpoold (guests go on running)")
    for key, remedy in (("libvirt", "systemctl status libvirtd"), ("nvml", "nvidia-smi")):
        if body[key] not in ("connected", "ok"):
            return Finding(AREA, title, Level.WARN, f"{key}: {body[key]}", remedy)
    if body["breaker"]:
        return Finding(AREA, title, Level.WARN, f"failover breaker open: {body['breaker']}", "kvmpool breaker close")
    if body["paused"]:
        remedy = f"[policy] paused = false in {_FILE}"
        return Finding(AREA, title, Level.WARN, "paused: decisions are logged, not made", remedy)
    if body["faults"]:
        return Finding(AREA, title, Level.WARN, body["faults"][0], "kvmpool status")
    return Finding(AREA, title, Level.PASS, f"{body['version']}, store: {body['store']}")


def cards(place: Place) -> Finding:
    title = "cards in service"
    try:
        rows = Client(place.socket, deadline_s=_DEADLINE_S).get("/cards")
    except KvmpoolError:
        return Finding(AREA, title, Level.WARN, "not known: kvmpoold does not answer", "as above")
    bad = [row for row in rows if row["verdict"] != "healthy"]
    if bad:
        first = bad[0]
        detail = f"{first['label']} is {first['verdict']}" + (f": {first['reason']}" if first["reason"] else "")
        return Finding(AREA, title, Level.WARN, detail, f"kvmpool card show {first['label']}")
    if not rows:
        return Finding(AREA, title, Level.WARN, "none", "nvidia-smi; lspci -d 10de:")
    return Finding(AREA, title, Level.PASS, f"{len(rows)} healthy")


def _config(place: Place) -> Config:
    file = place.at(_FILE)
    return load(file if file.exists() else None, place.at("/etc/kvmpool/conf.d"))


def config_or_defaults(place: Place) -> Config:
    try:
        return _config(place)
    except ConfigInvalid:
        return Config()


CHECKS = (configuration, hook_settings, group, listen, answers, cards)
