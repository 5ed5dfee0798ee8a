"""Remembers which card is at which address, so that a kernel message or a silent card can be named.

Filled by each inventory; a card that can no longer say its uuid keeps the one it had at its address.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmpool.core.model import CardId, CardSeen


@dataclass(slots=True)
class Roster:
    """Used from the event loop only."""

    seen: dict[str, CardSeen] = field(default_factory=dict)  # address -> the card as it last was well
    ids: dict[str, CardId] = field(default_factory=dict)  # address -> id, also of cards only remembered
    version: int = 0  # grows when an address means another card than before

    def remember(self, card: CardId, address: str) -> None:
        """What an earlier life of the daemon knew. A card that is seen is believed more."""
        if address not in self.ids:
            self.ids[address] = card
            self.version += 1

    def learn(self, cards: Iterable[CardSeen]) -> None:
        """Cards that are well."""
        for card in cards:
            if self.ids.get(card.address) != card.id:
                for address in [each for each, known in self.ids.items() if known == card.id]:
                    del self.ids[address]
                    self.seen.pop(address, None)
                self.ids[card.address] = card.id
                self.version += 1
            self.seen[card.address] = card

    def address_of(self, card: CardId) -> str | None:
        return next((address for address, known in self.ids.items() if known == card), None)
