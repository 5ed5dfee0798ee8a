"""ports.Modes over the cards of a simulated host: switches that work, are refused, fail or never end."""

from __future__ import annotations

from kvmpool.core.model import Card, Mode
from kvmpool.errors import CardBusy, CardLost, CardWedged, NoReset, SwitchFailed
from kvmpool.sim.world import DRIVERS, Condition, SimHost, World


class SimModes:
    """ports.Modes over a host's cards."""

    def __init__(self, world: World, host: SimHost) -> None:
        self._world, self._host = world, host

    async def plan(self, card: Card, mode: Mode) -> tuple[str, ...]:
        found = self._host.cards[card.id]
        if found.mode is mode:
            return ()
        if found.holder:
            raise CardBusy(f"{card.label} is in use by {found.holder}")
        return (f"{card.address}: {DRIVERS[found.mode]} -> {DRIVERS[mode]}",)

    async def switch(self, card: Card, mode: Mode) -> None:
        if not await self.plan(card, mode):
            return
        found = self._host.cards[card.id]
        if found.switch_ends == "hangs":
            raise CardWedged(f"{card.label}: its driver does not let go. Next: reboot the host")
        if found.switch_ends == "fails":
            raise SwitchFailed(f"{card.label}: it is still in mode {found.mode.value}")
        found.mode = mode
        self._world.note(f"{self._host.name}: {card.address} is in mode {mode.value}")

    async def reset(self, card: Card) -> None:
        found = self._host.cards[card.id]
        if found.holder:
            raise CardBusy(f"{card.label} is in use by {found.holder}")
        if found.reset_ends == "impossible":
            raise NoReset("no working reset")
        if found.reset_ends == "fails" or found.condition in (Condition.LOST, Condition.GONE):
            raise CardLost("no working reset: Inappropriate ioctl for device")
        if found.reset_ends == "hangs":
            raise CardWedged(f"{card.label}: its reset does not end. Next: reboot the host")
        found.condition = Condition.FINE
        found.resets += 1
        self._world.note(f"{self._host.name}: {card.address} was reset")

    async def recover(self) -> tuple[str, ...]:
        return ()
