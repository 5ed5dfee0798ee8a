"""The leader's loop: reads the pool, lets core.reconcile_cluster decide, commits. On one host it always leads."""

from __future__ import annotations

import logging

from kvmpool.core.model import ClaimKey, HostName, Settings, Wait
from kvmpool.core.reconcile_cluster import reconcile_cluster
from kvmpool.daemon.ledger import Ledger
from kvmpool.daemon.perform import Checkpoint, ClusterHands, no_checkpoint
from kvmpool.daemon.turns import Loop
from kvmpool.errors import Conflict
from kvmpool.ports import Clock, Store

log = logging.getLogger(__name__)

_WAITING_S = 1.0  # while a claim waits: the breaker's and the broken workers' windows open without a write
_IDLE_S = 5.0


class ClusterLoop(Loop):
    """Public between turns: `waits`, each pending claim's reason as of the last turn; `settings` may be replaced."""

    name = "cluster"

    def __init__(
        self,
        store: Store,
        clock: Clock,
        host: HostName,
        settings: Settings,
        *,
        checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        super().__init__(clock)
        self.settings = settings
        self.waits: dict[ClaimKey, Wait] = {}
        self._ledger = Ledger(store, clock, host)
        self._hands = ClusterHands(self._ledger, clock, checkpoint)

    async def turn(self) -> bool:
        page = await self._ledger.read()
        decisions = reconcile_cluster(page.rows, self.settings, self.clock.now())
        self._remember({decision.claim: decision for decision in decisions if isinstance(decision, Wait)})
        try:
            done = await self._hands.perform(page, decisions, self.settings)
            await self._hands.forget_events(page)
        except Conflict:
            return True
        return done

    def pause_s(self) -> float:
        return _WAITING_S if self.waits else _IDLE_S

    def _remember(self, waits: dict[ClaimKey, Wait]) -> None:
        """Keep the reasons; tell each once."""
        for key, wait in waits.items():
            before = self.waits.get(key)
            if before is None or before.reason != wait.reason:
                log.info("%s: waits (%s)", wait.label, wait.reason)
        self.waits = waits
