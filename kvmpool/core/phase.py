"""Which moves a binding's phase may make, and who may make each (design 01 §1.4).

One table; the reconcile functions propose only its moves, the store's guards keep two owners from making one at once.
    (no row) -> PREPARING -> READY -> RELEASING -> (no row)
                    \\-> BROKEN <-/ \\-> LOST (the card's host is gone) -> (no row, once it is back or proved gone)
"""

from __future__ import annotations

from enum import Enum

from kvmpool.core.model import Phase


class Owner(Enum):
    """Who may write a move."""

    LEADER = "leader"
    CARD_HOST = "card's host"


# (from, to): None is "no row".
MOVES: dict[tuple[Phase | None, Phase | None], Owner] = {
    (None, Phase.PREPARING): Owner.LEADER,
    (Phase.PREPARING, Phase.READY): Owner.CARD_HOST,
    (Phase.PREPARING, Phase.BROKEN): Owner.CARD_HOST,
    (Phase.READY, Phase.BROKEN): Owner.CARD_HOST,
    (Phase.PREPARING, Phase.RELEASING): Owner.LEADER,
    (Phase.READY, Phase.RELEASING): Owner.LEADER,
    (Phase.BROKEN, Phase.RELEASING): Owner.LEADER,
    (Phase.PREPARING, Phase.LOST): Owner.LEADER,
    (Phase.READY, Phase.LOST): Owner.LEADER,
    (Phase.BROKEN, Phase.LOST): Owner.LEADER,
    (Phase.RELEASING, Phase.LOST): Owner.LEADER,
    (Phase.RELEASING, None): Owner.CARD_HOST,
    (Phase.LOST, None): Owner.CARD_HOST,
}

# A claim has at most one binding in one of these; all phases count for capacity.
OPEN = frozenset({Phase.PREPARING, Phase.READY, Phase.BROKEN})


def may(owner: Owner, old: Phase | None, new: Phase | None) -> bool:
    """May `owner` move a binding from `old` to `new`?"""
    return MOVES.get((old, new)) is owner
