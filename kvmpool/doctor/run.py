"""Runs the checks in order; a check that breaks is a FAIL of its own, never the end of the others."""

from __future__ import annotations

from collections.abc import Iterator

from kvmpool.doctor import gpu, host, libvirt, pool
from kvmpool.doctor.finding import Finding, Level, Place

AREAS = (host, libvirt, gpu, pool)


def findings(place: Place) -> Iterator[Finding]:
    """Every finding, area by area."""
    for area in AREAS:
        for check in area.CHECKS:
            try:
                yield check(place)
            except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
                yield Finding(area.AREA, check.__name__, Level.FAIL, f"the check itself failed: {error!r}", "report it")
