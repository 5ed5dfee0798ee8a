"""Checks of kvmpoold itself: does it answer, who may ask it, and what it says is wrong."""

from __future__ import annotations

import grp

from kvmpool.api.client import Client
from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.errors import KvmpoolError

AREA = "kvmpoold"
_DEADLINE_S = 3.0


def group(place: Place) -> Finding:
    title = "group kvmpool"
    try:
        members = grp.getgrnam("kvmpool").gr_mem
    except KeyError:
        return Finding(AREA, title, Level.WARN, "absent: only root may use the CLI", "groupadd --system kvmpool")
    return Finding(AREA, title, Level.PASS, ", ".join(members) if members else "no members: only root uses the CLI")


def answers(place: Place) -> Finding:
    title = "kvmpoold answers"
    try:
        body = Client(place.socket, deadline_s=_DEADLINE_S).get("/status")
    except KvmpoolError as error:
        message, _, remedy = str(error).partition(" Next: ")
        return Finding(AREA, title, Level.FAIL, message.rstrip("."), remedy or "systemctl status kvmpoold")
    for key, remedy in (("libvirt", "systemctl status libvirtd"), ("nvml", "nvidia-smi")):
        if body[key] not in ("connected", "ok"):
            return Finding(AREA, title, Level.WARN, f"{key}: {body[key]}", remedy)
    if body["breaker"]:
        return Finding(AREA, title, Level.WARN, f"failover breaker open: {body['breaker']}", "kvmpool breaker close")
    if body["faults"]:
        return Finding(AREA, title, Level.WARN, body["faults"][0], "kvmpool status")
    return Finding(AREA, title, Level.PASS, f"{body['version']}, store: {body['store']}")


CHECKS = (group, answers)
