"""Every exception of kvmpool, typed by what the caller does next.

KvmpoolError
├── Refused          say so to the person; nothing was changed   (HTTP 409, exit 4)
│   ├── ClaimInvalid     the domain's request cannot be read
│   ├── ConfigInvalid    the configuration cannot be read
│   ├── NoCapacity       no card can serve the claim now
│   ├── CardBusy         somebody holds the card
│   ├── NoReset          nobody knows how to reset the card
│   ├── SwitchFailed     a mode switch was begun, failed and was undone: trying again does the same
│   └── Denied           the caller may not do that
├── NotFound                                                     (HTTP 404, exit 3)
├── Conflict         somebody wrote first: read and decide again
├── Ambiguous        the store may or may not have applied it: resolve
├── Unreachable      try again later, with a limit               (HTTP 503, exit 6)
│   ├── StoreUnreachable
│   └── DeadlinePassed   the answer did not come in time         (HTTP 504, exit 7)
└── CardLost         an observation: record it, the core decides
    └── CardWedged       a driver does not let go of it: only a reboot of the host helps

A message says what, which, and what to do next, on one line.
"""


class KvmpoolError(Exception):
    """Root of the tree; carries one line for a person."""


class Refused(KvmpoolError):
    """The request was not done and nothing was changed."""


class ClaimInvalid(Refused):
    """A claim's XML is not one of the allowed forms; names domain, attribute and allowed values."""


class ConfigInvalid(Refused):
    """A configuration file cannot be used; the message holds every fault, one a line."""


class NoCapacity(Refused):
    """No card fits; the message names each card's first failing predicate."""


class CardBusy(Refused):
    """A process, driver or domain holds the card; the message lists the holders."""


class NoReset(Refused):
    """Neither the card nor the bus offers a way to reset it: that does not change before another kernel or card."""


class SwitchFailed(Refused):
    """A mode switch was begun, failed and was undone: the card is as it was. A second try would do the same."""


class Denied(Refused):
    """The caller's uid and groups do not allow the call."""


class NotFound(KvmpoolError):
    """The named thing does not exist."""


class Conflict(KvmpoolError):
    """A guard of a commit did not hold: read again and decide again."""


class Ambiguous(KvmpoolError):
    """A commit may or may not have been applied: ask the store to resolve `op_id`."""

    def __init__(self, op_id: str, message: str = "") -> None:
        super().__init__(message or f"commit {op_id}: the store did not say whether it was applied; resolve it")
        self.op_id = op_id


class Unreachable(KvmpoolError):
    """The other side does not answer; a later try may succeed."""


class StoreUnreachable(Unreachable):
    """The store does not answer."""


class DeadlinePassed(Unreachable):
    """The other side was reached, its answer did not come before the deadline."""


class CardLost(KvmpoolError):
    """A card did not answer or left the bus; an observation, not a verdict."""


class CardWedged(CardLost):
    """A driver does not let go of the card and its unbind cannot be ended: the host needs a reboot."""
