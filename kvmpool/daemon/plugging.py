"""What a host remembers of its plugs between two turns: when the last one ended, and which of them failed how often.

Only memory of this process: after a restart the guests are asked anew, which costs a try and loses nothing.
"""

from __future__ import annotations

from kvmpool.core.model import (
    AttachDevice,
    ClaimKey,
    DetachDevice,
    DomainStep,
    DomainUuid,
    ForceUnplug,
    Forget,
    Generation,
    RecordPointed,
)
from kvmpool.core.plug import ALIAS, UNPLUG_LIMIT
from kvmpool.errors import DeadlinePassed, KvmpoolError

_AGAIN_S = 5.0  # a guest that is busy refuses a second request that comes sooner (QEMU: "power indicator blinking")
_PATIENT_S = 60.0  # between requests to a guest that has answered none of more than `unplug_limit`


class Plugging:
    """`at`: boottime when a domain's last plug ended; `failures`, `tries`: see core/plug.py."""

    def __init__(self, unplug_limit: int = UNPLUG_LIMIT) -> None:
        self.unplug_limit = unplug_limit
        self.at: dict[DomainUuid, float] = {}
        self.failures: dict[tuple[ClaimKey, Generation], tuple[int, str]] = {}
        self.tries: dict[ClaimKey, int] = {}

    def ended(self, step: DomainStep, now: float) -> bool:
        """A step was performed; True where it was a plug: only a list of domains asked for from now on shows it."""
        match step:
            case AttachDevice(binding=binding):
                self.failures.pop((binding.claim, binding.generation), None)
            case DetachDevice() | ForceUnplug():
                self.tries.pop(_claim_of(step), None)
            case RecordPointed(claim=claim, pointed=None):
                self.tries.pop(claim, None)
                return False
            case Forget(binding=binding):
                self.failures.pop((binding.claim, binding.generation), None)
                return False
            case _:
                return False
        self.at[step.domain] = now
        return True

    def failed(self, step: DomainStep, error: KvmpoolError, now: float) -> float:
        """A step has failed; how long until it may be tried again, 0.0 where that is not ours to say."""
        match step:
            case AttachDevice() if isinstance(error, DeadlinePassed):
                pass  # somebody holds the domain's lock, as its own start does: that is no failure of the card
            case AttachDevice(binding=binding):
                key = (binding.claim, binding.generation)
                self.failures[key] = (self.failures.get(key, (0, ""))[0] + 1, str(error))
            case DetachDevice():
                claim = _claim_of(step)
                self.tries[claim] = self.tries.get(claim, 0) + 1
            case ForceUnplug():
                pass
            case _:
                return 0.0
        self.at[step.domain] = now
        patient = isinstance(step, DetachDevice) and self.tries[_claim_of(step)] > self.unplug_limit
        return _PATIENT_S if patient else _AGAIN_S


def _claim_of(step: DetachDevice | ForceUnplug) -> ClaimKey:
    return ClaimKey(step.domain, step.alias.removeprefix(ALIAS))
