"""Decides what is known of a card's health: a fold over signals (design 05 §5.3).

    fold     one signal, however often it is repeated or by how many sources
    settle   the moves that depend on whether anything still holds the card
    awaits_reset  what may bring the card back, once nothing holds it
    restore  an operator says that the card is repaired

    HEALTHY -(CORROBORATE | failed probe | one lost read)-> SUSPECT -(clean for long enough)-> HEALTHY
    HEALTHY|SUSPECT|PROBATION|DRAINING|UNKNOWN -(RESET_NEEDED | failed probe while suspect)-> FAILED
                                     -(CARD_FATAL | address gone | lost reads)-> FAILED, fatal
    any -(a driver does not let go of it)-> WEDGED -(the host rebooted)-> RESETTING
    HEALTHY|SUSPECT|PROBATION|UNKNOWN -(DRAIN)-> DRAINING -(unbound, then reset)-> RESETTING
    FAILED -(unbound)-> QUARANTINED | LEMON    QUARANTINED -(not fatal, then reset)-> RESETTING
    QUARANTINED|DRAINING -(its reset failed)-> DEAD, -(it has none)-> as it is, for good
    any -(the host rebooted | an operator)-> RESETTING -(clean probes)-> PROBATION -(clean for its term)-> HEALTHY
                                             RESETTING -(anything worse)-> DEAD

UNKNOWN is what nobody measured; one clean probe ends it, because a probe asks the card for what a sick one fails and
nothing speaks against it: unknown is a lack of evidence, not evidence of sickness. Never is a card healthy without one.
RESETTING begins after the reset, with its validation: a daemon that is killed during one finds the card as it was, and
resets it again. FAILED is entered before LEMON so that its bindings are moved first, by the same rule as any other.
This module does not know where signals come from nor who holds a card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvmpool.core import xid
from kvmpool.core.model import (
    BootId,
    BusErrorSignal,
    EccSignal,
    GoneSignal,
    Health,
    HealthSignal,
    ProbeSignal,
    ResetResult,
    ResetSignal,
    UnknownSignal,
    Verdict,
    WedgedSignal,
    XidSignal,
)
from kvmpool.core.xid import XidClass

DAY_S = 86400.0
WEEK_S = 7 * DAY_S

# A card in one of these serves nobody: its bindings are moved away at once.
OUT_OF_SERVICE = frozenset(
    {Verdict.FAILED, Verdict.QUARANTINED, Verdict.RESETTING, Verdict.DEAD, Verdict.LEMON, Verdict.WEDGED}
)
# From these a card can fail; in all others it has already failed.
_IN_SERVICE = frozenset({Verdict.UNKNOWN, Verdict.HEALTHY, Verdict.SUSPECT, Verdict.PROBATION, Verdict.DRAINING})


@dataclass(frozen=True, slots=True)
class Limits:
    """When a suspicion becomes a verdict and when a verdict is forgiven. Seconds of boottime, and counts."""

    suspect_quiet_s: float = 60.0  # XIDs that need corroboration get it within a minute or are noise (design 05 §5.2)
    suspect_probes: int = 3  # one clean answer may be a cache; three over ten seconds are not
    suspect_span_s: float = 10.0
    lost_reads: int = 3  # one all-ones read happens on a link retrain, which ends in under half a second
    lost_span_s: float = 0.5
    validation_probes: int = 3  # after a reset, before probation
    probation_s: float = 600.0
    probation_cap_s: float = DAY_S
    lemon_day: int = 3  # a card that failed so often fails again, and each time costs somebody a failover
    lemon_week: int = 5
    may_reset: bool = True  # else only a reboot or an operator starts validation
    probe_s: float = 5.0  # between probes of a healthy card
    probe_deadline_s: float = 5.0  # a driver under load answers late, rarely by seconds
    suspect_probe_s: float = 1.0
    suspect_deadline_s: float = 1.0  # with probe_deadline_s: a hang is a verdict 6 s after the probe was sent
    lost_probe_s: float = 0.25  # three lost reads are a verdict within about a second


def fold(health: Health, signal: HealthSignal, now: float, boot_id: BootId, limits: Limits) -> Health:
    """What is known after `signal`, at boottime `now` of `boot_id`. Repeating a signal changes no verdict further."""
    health = on_boot(health, now, boot_id)
    match signal:
        case XidSignal():
            return _xid(health, signal, now, limits)
        case EccSignal():
            return _judge(health, XidClass.RESET_NEEDED, signal.text or "double-bit ECC error", signal.at, now, limits)
        case GoneSignal():
            return _fail(health, signal.text or "its address left the bus", now, fatal=True, hard=True)
        case UnknownSignal():
            return _unknown(health, signal, now)
        case ProbeSignal():
            return _probe(health, signal, now, limits)
        case BusErrorSignal():
            kind = XidClass.RESET_NEEDED if signal.fatal else XidClass.CORROBORATE
            return _judge(health, kind, signal.text, signal.at, now, limits)
        case WedgedSignal():
            return _wedged(health, signal, now)
        case ResetSignal():
            return _reset(health, signal, now)


def on_boot(health: Health, now: float, boot_id: BootId) -> Health:
    """`health` carried over into this boot: a reboot resets the card, so what failed is validated again.

    Times of another boot cannot be compared with `now`: failures keep their distances, the newest counts as just now,
    which makes a lemon of a card rather too late by the time between its failure and the reboot than too early.
    """
    if health.boot_id == boot_id:
        return health
    newest = max(health.failures, default=0.0)
    fresh = Health(
        boot_id=boot_id,
        since=now,
        reason="not probed since the host started",
        failures=tuple(now - (newest - at) for at in health.failures),
        probation_s=health.probation_s,
        app_xids=health.app_xids,
        on_probation=health.on_probation,
        restored=health.restored,
    )
    if health.verdict in (Verdict.DEAD, Verdict.LEMON):
        return replace(fresh, verdict=health.verdict, reason=health.reason)
    if health.verdict in OUT_OF_SERVICE or health.verdict is Verdict.DRAINING:
        return _validate(fresh, f"the host rebooted; before: {health.reason}", now)
    return fresh


def settle(health: Health, bound: bool, now: float, limits: Limits) -> Health:
    """The moves that wait for the card to be free; `bound`: any binding row, a releasing one too, still names it."""
    if bound:
        return health
    if health.verdict is Verdict.FAILED:
        if is_lemon(health, now, limits):
            reason = f"failed {len(health.failures)} times in 7 days; last: {health.reason}"
            return _enter(health, Verdict.LEMON, reason, now)
        return _enter(health, Verdict.QUARANTINED, health.reason, now)
    return health


def awaits_reset(health: Health, limits: Limits) -> bool:
    """Is a reset what would bring it back into service? Only where nothing holds it any more (see `settle`)."""
    if not limits.may_reset or health.fatal:
        return False
    return health.verdict in (Verdict.QUARANTINED, Verdict.DRAINING)


def restore(health: Health, ticket: int, now: float) -> Health:
    """An operator's word, once per `ticket` (CardWish.restore): a card out of service or draining is validated."""
    if ticket <= health.restored:
        return health
    health = replace(health, restored=ticket)
    if health.verdict is Verdict.WEDGED:
        return health  # nobody's word makes a driver let go
    if health.verdict in OUT_OF_SERVICE or health.verdict is Verdict.DRAINING:
        return _validate(replace(health, failures=()), f"an operator restored it; before: {health.reason}", now)
    return health


def is_lemon(health: Health, now: float, limits: Limits) -> bool:
    day = sum(1 for at in health.failures if now - at < DAY_S)
    week = sum(1 for at in health.failures if now - at < WEEK_S)
    return day >= limits.lemon_day or week >= limits.lemon_week


def probe_plan(health: Health, limits: Limits) -> tuple[float, float] | None:
    """(seconds between probes, deadline of one) for a card in this state; None: it is not probed."""
    match health.verdict:
        case Verdict.SUSPECT | Verdict.DRAINING | Verdict.RESETTING if health.lost_reads:
            return limits.lost_probe_s, limits.suspect_deadline_s
        case Verdict.HEALTHY | Verdict.DRAINING:
            return limits.probe_s, limits.probe_deadline_s
        case Verdict.UNKNOWN:  # a driver that just started answers its first question late
            return limits.suspect_probe_s, limits.probe_deadline_s
        case Verdict.SUSPECT | Verdict.PROBATION | Verdict.RESETTING:
            return limits.suspect_probe_s, limits.suspect_deadline_s
        case _:
            return None


def is_news(old: Health, new: Health) -> bool:
    """Does the pool have to know? Counters of a running suspicion are not news; application errors at 1, 2, 4, 8..."""
    important = (
        (new.verdict, new.reason, new.boot_id, new.failures, new.probation_s),
        (new.hard, new.fatal, new.on_probation, new.restored, new.app_xids.bit_length()),
    )
    return important != (
        (old.verdict, old.reason, old.boot_id, old.failures, old.probation_s),
        (old.hard, old.fatal, old.on_probation, old.restored, old.app_xids.bit_length()),
    )


# --- signals ----------------------------------------------------------------------------------------------------------


def _xid(health: Health, signal: XidSignal, now: float, limits: Limits) -> Health:
    kind = xid.classify(signal.xid, signal.text, signal.recovery_action)
    if kind is XidClass.APP:
        return replace(health, app_xids=health.app_xids + 1)
    if kind is XidClass.IGNORE:
        return health
    reason = xid.describe(signal.xid)
    if signal.recovery_action:
        reason += f", recovery action: {xid.action_name(signal.recovery_action)}"
    judged = _judge(health, kind, reason, signal.at, now, limits)
    return judged if judged == health else replace(judged, last_xid=signal.xid)


def _judge(health: Health, kind: XidClass, reason: str, at: float, now: float, limits: Limits) -> Health:
    """Evidence of class `kind` that was observed at `at`."""
    if health.cleared_at and at < health.cleared_at:
        return health  # a late word about the incident that a reset, reboot or operator has ended
    if kind is XidClass.CARD_FATAL:
        return _fail(health, reason, now, fatal=True, hard=False)
    if kind is XidClass.RESET_NEEDED:
        return _fail(health, reason, now, fatal=False, hard=False)
    if kind is XidClass.DRAIN:
        drains = health.verdict in (_IN_SERVICE - {Verdict.DRAINING})
        return _enter(health, Verdict.DRAINING, reason, now) if drains else health
    if now - at > limits.suspect_quiet_s:
        return health
    return _suspect(health, reason, now)


def _unknown(health: Health, signal: UnknownSignal, now: float) -> Health:
    """Keeps `last_signal_at`: a suspicion survives a driver that is being restarted."""
    reason = signal.text or "nothing can be read of it"
    if health.verdict in (Verdict.HEALTHY, Verdict.SUSPECT, Verdict.PROBATION):
        return _enter(health, Verdict.UNKNOWN, reason, now)
    if health.verdict is Verdict.UNKNOWN and health.reason != reason:
        return replace(health, reason=reason)
    return health


def _wedged(health: Health, signal: WedgedSignal, now: float) -> Health:
    if health.verdict is Verdict.WEDGED:
        return health
    return _enter(replace(health, fatal=True, hard=True), Verdict.WEDGED, signal.text, now)


def _reset(health: Health, signal: ResetSignal, now: float) -> Health:
    """A word about a card that has moved on meanwhile (a reboot, an operator, a worse loss) changes nothing."""
    if health.verdict not in (Verdict.QUARANTINED, Verdict.DRAINING) or health.fatal:
        return health
    match signal.result:
        case ResetResult.DONE:
            return _validate(health, f"reset after: {health.reason}", now)
        case ResetResult.FAILED:
            return _enter(replace(health, fatal=True), Verdict.DEAD, f"{signal.text}; before: {health.reason}", now)
        case ResetResult.IMPOSSIBLE:
            return _enter(replace(health, fatal=True), Verdict.QUARANTINED, f"{health.reason}; {signal.text}", now)


def _probe(health: Health, signal: ProbeSignal, now: float, limits: Limits) -> Health:
    if signal.recovery_action and signal.recovery_action in xid.RECOVERY_ACTIONS:
        reason = f"recovery action: {xid.action_name(signal.recovery_action)}"
        kind = xid.action_class(signal.recovery_action)
        if health.verdict is not Verdict.RESETTING or kind is not XidClass.DRAIN:
            return _judge(health, kind, reason, now, now, limits)
    if signal.lost:
        return _lost(health, signal, now, limits)
    if not signal.ok:
        return _failed_probe(health, signal, now)
    return _clean(health, now, limits)


def _lost(health: Health, signal: ProbeSignal, now: float, limits: Limits) -> Health:
    """One read of all ones is a suspicion; several in a row over a while are a card that is not there."""
    if health.verdict not in _IN_SERVICE and health.verdict is not Verdict.RESETTING:
        return health
    reason = signal.text or "it reads all ones"
    since = health.lost_since if health.lost_reads else now
    counted = replace(health, lost_reads=health.lost_reads + 1, lost_since=since)
    if counted.lost_reads >= limits.lost_reads and now - since >= limits.lost_span_s:
        return _fail(counted, f"lost: {reason}", now, fatal=True, hard=True)
    return _suspect(counted, reason, now)


def _failed_probe(health: Health, signal: ProbeSignal, now: float) -> Health:
    reason = signal.text or ("a probe timed out" if signal.timed_out else "a probe failed")
    if health.verdict in (Verdict.SUSPECT, Verdict.RESETTING):
        before = f" ({health.reason} before)" if health.reason and health.reason != reason else ""
        return _fail(health, reason + before, now, fatal=False, hard=False)
    return _suspect(health, reason, now)


def _clean(health: Health, now: float, limits: Limits) -> Health:
    """A clean probe: proof of life, and time served."""
    if health.lost_reads:
        health = replace(health, lost_reads=0, lost_since=0.0)
    match health.verdict:
        case Verdict.UNKNOWN:
            quiet = not health.last_signal_at or now - health.last_signal_at >= limits.suspect_quiet_s
            return _back(health, now) if quiet else _enter(health, Verdict.SUSPECT, "suspected before", now)
        case Verdict.SUSPECT:
            health = _count_clean(health, now)
            clean = health.clean_probes >= limits.suspect_probes and now - health.clean_since >= limits.suspect_span_s
            return _back(health, now) if clean and now - health.last_signal_at >= limits.suspect_quiet_s else health
        case Verdict.RESETTING:
            health = _count_clean(health, now)
            return _begin_probation(health, now, limits) if health.clean_probes >= limits.validation_probes else health
        case Verdict.PROBATION if now - health.since >= health.probation_s:
            return _enter(replace(health, on_probation=False), Verdict.HEALTHY, "", now)
        case _:
            return health


# --- moves ------------------------------------------------------------------------------------------------------------


def _enter(health: Health, verdict: Verdict, reason: str, now: float) -> Health:
    return replace(health, verdict=verdict, reason=reason, since=now, clean_probes=0, clean_since=0.0)


def _count_clean(health: Health, now: float) -> Health:
    since = health.clean_since if health.clean_probes else now
    return replace(health, clean_probes=health.clean_probes + 1, clean_since=since)


def _suspect(health: Health, reason: str, now: float) -> Health:
    """A suspicion starts, or its clock starts again. What drains or is being reset is not trusted more for it."""
    health = replace(health, last_signal_at=now)
    if health.verdict in (Verdict.HEALTHY, Verdict.PROBATION, Verdict.UNKNOWN):
        return _enter(health, Verdict.SUSPECT, reason, now)
    if health.verdict in (Verdict.SUSPECT, Verdict.RESETTING):
        return replace(health, clean_probes=0, clean_since=0.0)
    return health


def _fail(health: Health, reason: str, now: float, *, fatal: bool, hard: bool) -> Health:
    """FAILED, once an incident; a stronger evidence of the same incident is added to it. A failed reset is DEAD."""
    if health.verdict in _IN_SERVICE:
        failures = (*(at for at in health.failures if now - at < WEEK_S), now)
        if health.verdict is Verdict.HEALTHY and now - health.since >= WEEK_S:
            health = replace(health, probation_s=0.0)  # a week of service: its next probation is a first one
        health = replace(health, failures=failures, fatal=fatal, hard=hard)
        return _enter(health, Verdict.FAILED, reason, now)
    if health.verdict is Verdict.RESETTING:
        return _enter(replace(health, fatal=True), Verdict.DEAD, f"after a reset: {reason}", now)
    if health.verdict in (Verdict.FAILED, Verdict.QUARANTINED):
        worse = fatal and not health.fatal
        return replace(
            health, fatal=health.fatal or fatal, hard=health.hard or hard, reason=reason if worse else health.reason
        )
    return health


def _validate(health: Health, reason: str, now: float) -> Health:
    cleared = replace(health, cleared_at=now, last_signal_at=0.0, lost_reads=0, lost_since=0.0, fatal=False, hard=False)
    return _enter(cleared, Verdict.RESETTING, reason, now)


def _begin_probation(health: Health, now: float, limits: Limits) -> Health:
    term = min(limits.probation_cap_s, max(limits.probation_s, 2 * health.probation_s))
    return _enter(
        replace(health, probation_s=term, on_probation=True), Verdict.PROBATION, f"on probation for {term:.0f} s", now
    )


def _back(health: Health, now: float) -> Health:
    """Out of UNKNOWN or SUSPECT, to where the card was: a suspicion is no way out of probation."""
    if health.on_probation:
        reason = f"on probation for {health.probation_s:.0f} s"
        return _enter(health, Verdict.PROBATION, reason, now)
    return _enter(health, Verdict.HEALTHY, "", now)
