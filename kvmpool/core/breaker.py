"""Decides when automatic failover is stopped: too many cards failed at once on soft evidence (design 05 §5.3).

A wrong rule, a driver bug or a hostile guest can make every card look failed; moving every binding then does the damage
that the failure did not. Hard evidence (the address is gone, the card reads all ones, a lease ended) cannot be talked
into being and is exempt. The memory is core.model.Breaker, in the leader's boottime; it opens here and only a person
closes it (`closed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvmpool.core.health import OUT_OF_SERVICE
from kvmpool.core.model import Breaker, Card, CardId, HostName, Rows, Settings

_Entry = tuple[float, CardId]


def would_trip(rows: Rows, failing: CardId, pending: tuple[CardId, ...], settings: Settings, now: float) -> str:
    """Why failing over from `failing` too, after `pending` in the same plan, is one too many; "" if it is not.

    Counts incidents, one a card, in the window: more than max(minimum, 30 %) of the cards of its host, or more than
    max(minimum, 20 %) of the pool's. The minimum keeps a pool of two cards able to lose one.
    """
    known = {card for at, card in rows.breaker.acknowledged if _recent(at, settings, now)}
    if failing in known:
        return ""
    entries = [*_window(rows.breaker, settings, now), *((now, card) for card in pending), (now, failing)]
    entries = [entry for entry in entries if entry[1] not in known]
    host = rows.cards[failing].host
    on_host = [entry for entry in entries if entry[1] in rows.cards and rows.cards[entry[1]].host == host]
    for found, cards, fraction, where in (
        (on_host, _cards_of(rows, host), settings.breaker_host_fraction, f"on {host}"),
        (entries, len(rows.cards), settings.breaker_pool_fraction, "in the pool"),
    ):
        count = _incidents(found, rows.cards, settings)
        if count > max(settings.breaker_min_cards, fraction * cards):
            return f"{count} of {cards} cards {where} failed within {settings.breaker_window_s:.0f} s on soft evidence"
    return ""


def broken_too_often(breaker: Breaker, label: str, settings: Settings, now: float) -> bool:
    """Has this claim been rebound so often after its worker broke that it has to wait?"""
    recent = [at for at, claim in breaker.broken if claim == label and _recent(at, settings, now)]
    return len(recent) >= settings.broken_limit


def record(breaker: Breaker, card: CardId | None, broken: str, settings: Settings, now: float) -> Breaker:
    """The memory after a release that answers the failure of `card` (or None), or a broken worker of claim `broken`."""
    failovers = _window(breaker, settings, now)
    known = {entry[1] for entry in failovers}
    if card is not None and card not in known:
        failovers = (*failovers, (now, card))
    breaks = tuple(entry for entry in breaker.broken if _recent(entry[0], settings, now))
    if broken:
        breaks = (*breaks, (now, broken))
    acknowledged = tuple(entry for entry in breaker.acknowledged if _recent(entry[0], settings, now))
    return replace(breaker, failovers=failovers, broken=breaks, acknowledged=acknowledged)


def opened(breaker: Breaker, reason: str, now: float) -> Breaker:
    return replace(breaker, open_reason=reason, opened_at=now)


def closed(breaker: Breaker, cards: Iterable[Card], now: float) -> Breaker:
    """A person has looked: start counting anew. Those of `cards` that are out of service were looked at too."""
    looked_at = tuple((now, card.id) for card in cards if card.health.verdict in OUT_OF_SERVICE)
    return replace(breaker, failovers=(), open_reason="", opened_at=0.0, acknowledged=looked_at)


def _window(breaker: Breaker, settings: Settings, now: float) -> tuple[_Entry, ...]:
    return tuple(entry for entry in breaker.failovers if _recent(entry[0], settings, now))


def _recent(at: float, settings: Settings, now: float) -> bool:
    """An entry from the future is one of another boot: it counts until the window has passed in this one."""
    return now - at < settings.breaker_window_s and at - now < settings.breaker_window_s


def _cards_of(rows: Rows, host: HostName) -> int:
    return sum(1 for card in rows.cards.values() if card.host == host)


def _incidents(entries: list[_Entry], cards: dict[CardId, Card], settings: Settings) -> int:
    """Cards lost within two seconds behind one host are one incident: a switch, a riser, a power supply.

    Only losses (fatal evidence) are taken together: a burst of resettable errors on all cards is what a wrong rule
    looks like.
    """
    count = 0
    seen: set[CardId] = set()
    last_loss: dict[HostName, float] = {}
    for at, card_id in sorted(entries):
        if card_id in seen:
            continue
        seen.add(card_id)
        card = cards.get(card_id)
        if card is None or not card.health.fatal:
            count += 1
            continue
        if card.host not in last_loss or at - last_loss[card.host] > settings.breaker_incident_s:
            count += 1
            last_loss[card.host] = at
    return count
