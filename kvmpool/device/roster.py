"""Remembers which card is at which address, so that a kernel message or a silent card can be named.

Filled by each inventory; a card that can no longer say its uuid keeps the one it had at its address.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmpool.core.model import CardId, CardSeen, PciFacts, slot_name

_NOTHING = PciFacts()


@dataclass(slots=True)
class Roster:
    """Used from the event loop only."""

    seen: dict[str, CardSeen] = field(default_factory=dict)  # address -> the card as it last was well
    ids: dict[str, CardId] = field(default_factory=dict)  # address -> id, also of cards only remembered
    places: dict[tuple[str, str], CardId] = field(default_factory=dict)  # PCI ids and slot -> id
    version: int = 0  # grows when an address means another card than before

    def remember(self, card: CardId, address: str, facts: PciFacts = _NOTHING) -> None:
        """What an earlier life of the daemon knew. A card that is seen is believed more."""
        if address not in self.ids:
            self.ids[address] = card
            self.version += 1
        if facts.slot:
            self.places.setdefault((facts.ids, facts.slot), card)

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
            if card.pci.slot:
                self.places[card.pci.ids, card.pci.slot] = card.id

    def name_of(self, address: str, facts: PciFacts) -> CardId:
        """Who it is, where no driver tells: by its ids and its slot, for addresses are given out anew at each boot.

        Whoever was at this address before is it only where nothing speaks against it: no other ids, no other slot.
        """
        known = self.places.get((facts.ids, facts.slot))
        if known is not None:
            return known
        before = self.ids.get(address)
        return before if before is not None and before not in self.places.values() else slot_name(facts)

    def card_with(self, address: str) -> CardId | None:
        """The one card that a function belongs to; None for ports and for functions of a unit of several cards."""
        if address in self.ids:
            return self.ids[address]
        slot = address.rpartition(".")[0]
        owners = {card.id for card in self.seen.values() if address in card.pci.functions}
        near = {card.id for card in self.seen.values() if card.address.rpartition(".")[0] == slot}
        found = owners if len(owners) == 1 else owners & near
        return next(iter(found)) if len(found) == 1 else None

    def address_of(self, card: CardId) -> str | None:
        return next((address for address, known in self.ids.items() if known == card), None)
