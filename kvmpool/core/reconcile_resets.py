"""Decides which cards that failed are to be reset: quarantined or drained, on vfio-pci, and held by nobody.

    a reset would bring it back (core/health.py), it is passed through whole, no binding names its unit    reset it

A card of a host's driver is not reset: nothing here knows how to do that under a driver that serves other processes.
Who holds a card without a binding is seen by whoever performs the reset, and is asked again later.
This module does not know how a card is reset.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvmpool.core.health import Limits, awaits_reset
from kvmpool.core.model import Mode, ResetCard
from kvmpool.core.reconcile_modes import ModesView, unit


def reconcile_resets(view: ModesView, limits: Limits) -> Iterator[ResetCard]:
    """In the order of addresses."""
    if view.unread_bindings:
        return
    held = {binding.card for binding in view.bindings}
    for card in sorted(view.cards, key=lambda card: card.address):
        health = view.health.get(card.id, card.health)
        if card.mode is not Mode.PASSTHROUGH or not awaits_reset(health, limits):
            continue
        if not any(mate.id in held for mate in unit(card, view.cards)):
            yield ResetCard(card, f"{health.verdict.value}: {health.reason}")
