"""The fold of signals into a verdict, state by state; then what holds for every sequence of signals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpool.core.health import (
    DAY_S,
    OUT_OF_SERVICE,
    Limits,
    awaits_reset,
    fold,
    is_lemon,
    is_news,
    on_boot,
    probe_plan,
    restore,
    settle,
)
from kvmpool.core.model import (
    BootId,
    CardId,
    EccSignal,
    GoneSignal,
    Health,
    HealthSignal,
    ProbeSignal,
    ResetResult,
    ResetSignal,
    UnknownSignal,
    Verdict,
    XidSignal,
)
from kvmpool.core.xid import CATALOGUE, XidClass

BOOT = BootId("boot-1")
CARD = CardId("GPU-00000000-0000-4000-8000-000000000000")
LIMITS = Limits()
HEALTHY = Health(Verdict.HEALTHY, boot_id=BOOT)
APP = sorted(code for code, xid in CATALOGUE.items() if xid.kind is XidClass.APP)


def xid(code: int, at: float = 100.0, text: str = "", action: int | None = None) -> XidSignal:
    return XidSignal(CARD, code, at, text, action)


def clean(at: float) -> ProbeSignal:
    return ProbeSignal(CARD, at, ok=True)


def timeout(at: float) -> ProbeSignal:
    return ProbeSignal(CARD, at, ok=False, timed_out=True)


def lost(at: float) -> ProbeSignal:
    return ProbeSignal(CARD, at, ok=False, lost=True)


def after(health: Health, *signals: HealthSignal, limits: Limits = LIMITS) -> Health:
    """Each signal folded at its own time."""
    for signal in signals:
        health = fold(health, signal, signal.at, BOOT, limits)
    return health


# --- out of service ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", APP)
def test_an_application_error_changes_nothing_but_its_count(code: int) -> None:
    assert after(HEALTHY, xid(code)) == replace(HEALTHY, app_xids=1)


@pytest.mark.parametrize("code", [79, 64, 54, 167, 173, 157])
def test_a_fatal_xid_fails_the_card_until_reboot_or_operator(code: int) -> None:
    health = after(HEALTHY, xid(code))
    assert (health.verdict, health.fatal, health.last_xid) == (Verdict.FAILED, True, code)
    assert f"Xid {code}" in health.reason


@pytest.mark.parametrize("code", [48, 95, 119, 120, 46, 62, 110, 136, 140, 143, 151, 155, 156, 158, 169, 171, 172])
def test_an_xid_that_needs_a_reset_fails_the_card(code: int) -> None:
    health = after(HEALTHY, xid(code))
    assert (health.verdict, health.fatal, health.hard) == (Verdict.FAILED, False, False)


@pytest.mark.parametrize("state", [Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.PROBATION, Verdict.DRAINING])
def test_a_card_fails_from_every_state_in_service(state: Verdict) -> None:
    assert after(replace(HEALTHY, verdict=state), xid(79)).verdict is Verdict.FAILED


def test_a_double_bit_error_needs_a_reset() -> None:
    assert after(HEALTHY, EccSignal(CARD, 5.0)).verdict is Verdict.FAILED


def test_an_address_that_left_the_bus_is_hard_and_fatal() -> None:
    health = after(HEALTHY, GoneSignal(CARD, 5.0))
    assert (health.verdict, health.hard, health.fatal) == (Verdict.FAILED, True, True)


def test_one_lost_read_is_a_suspicion_three_over_half_a_second_a_loss() -> None:
    one = after(HEALTHY, lost(10.0))
    assert one.verdict is Verdict.SUSPECT
    assert after(one, lost(10.1), lost(10.2)).verdict is Verdict.SUSPECT  # too short a while
    assert after(one, lost(11.0)).verdict is Verdict.SUSPECT  # too few
    gone = after(one, lost(10.25), lost(10.5))
    assert (gone.verdict, gone.hard, gone.fatal) == (Verdict.FAILED, True, True)


def test_a_clean_read_between_lost_ones_starts_the_count_again() -> None:
    assert after(HEALTHY, lost(10.0), lost(10.3), clean(10.4), lost(10.6), lost(10.9)).verdict is Verdict.SUSPECT


def test_a_hang_is_a_verdict_after_a_second_unanswered_probe() -> None:
    assert after(HEALTHY, timeout(5.0)).verdict is Verdict.SUSPECT
    health = after(HEALTHY, timeout(5.0), timeout(6.0))
    assert (health.verdict, health.hard) == (Verdict.FAILED, False)


def test_a_failed_probe_corroborates_a_suspicion() -> None:
    health = after(HEALTHY, xid(109), timeout(101.0))
    assert health.verdict is Verdict.FAILED
    assert "Xid 109" in health.reason


def test_a_repeated_suspicion_alone_never_fails_a_card() -> None:
    assert after(HEALTHY, *(xid(109, float(at)) for at in range(200))).verdict is Verdict.SUSPECT


def test_a_recovery_action_read_by_a_probe_is_obeyed() -> None:
    signal = ProbeSignal(CARD, 5.0, ok=True, recovery_action=1)
    assert after(HEALTHY, signal).verdict is Verdict.FAILED
    assert after(HEALTHY, replace(signal, recovery_action=4)).verdict is Verdict.DRAINING
    assert after(HEALTHY, replace(signal, recovery_action=2)).fatal


def test_a_failure_is_counted_once_however_often_it_is_told() -> None:
    health = after(HEALTHY, xid(79, 5.0), xid(79, 5.1), EccSignal(CARD, 5.2), GoneSignal(CARD, 6.0))
    assert health.failures == (5.0,)
    assert health.hard  # the stronger evidence is added to the same incident


def test_a_stronger_reason_replaces_a_weaker_one() -> None:
    health = after(HEALTHY, xid(48, 5.0), xid(79, 5.1))
    assert "Xid 79" in health.reason
    assert health.fatal


# --- suspicion and doubt ----------------------------------------------------------------------------------------------


def test_a_suspicion_ends_after_clean_probes_and_a_quiet_minute() -> None:
    health = after(HEALTHY, xid(109), *(clean(101.0 + at) for at in range(59)))
    assert health.verdict is Verdict.SUSPECT
    assert after(health, clean(160.0)).verdict is Verdict.HEALTHY


def test_a_new_code_starts_the_minute_again() -> None:
    health = after(HEALTHY, xid(109, 100.0), *(clean(101.0 + at) for at in range(50)), xid(74, 151.0))
    assert after(health, clean(161.0), clean(166.0), clean(172.0)).verdict is Verdict.SUSPECT
    assert after(health, clean(161.0), clean(166.0), clean(211.0)).verdict is Verdict.HEALTHY


def test_few_clean_probes_do_not_clear_a_suspicion() -> None:
    assert after(HEALTHY, xid(109), clean(200.0), clean(300.0)).verdict is Verdict.SUSPECT


def test_an_old_suspicion_read_late_from_the_log_is_void() -> None:
    assert fold(HEALTHY, xid(109, at=10.0), 100.0, BOOT, LIMITS) == HEALTHY


def test_an_unknown_card_is_never_healthy_before_a_clean_probe() -> None:
    unknown = Health(boot_id=BOOT)
    assert unknown.verdict is Verdict.UNKNOWN
    assert after(unknown, UnknownSignal(CARD, 5.0, "no driver"), xid(13)).verdict is Verdict.UNKNOWN
    assert after(unknown, clean(5.0)).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("state", [Verdict.HEALTHY, Verdict.SUSPECT, Verdict.PROBATION])
def test_a_card_of_which_nothing_can_be_read_is_unknown(state: Verdict) -> None:
    health = after(replace(HEALTHY, verdict=state), UnknownSignal(CARD, 5.0, "NVML: version mismatch"))
    assert (health.verdict, health.reason) == (Verdict.UNKNOWN, "NVML: version mismatch")


@pytest.mark.parametrize("state", [each for each in Verdict if each in OUT_OF_SERVICE])
def test_a_failed_card_is_not_forgiven_by_an_unreadable_driver(state: Verdict) -> None:
    assert after(replace(HEALTHY, verdict=state), UnknownSignal(CARD, 5.0)).verdict is state


def test_a_suspicion_survives_a_driver_that_was_restarted() -> None:
    health = after(HEALTHY, xid(109), UnknownSignal(CARD, 110.0), clean(115.0))
    assert health.verdict is Verdict.SUSPECT
    assert after(HEALTHY, xid(109), UnknownSignal(CARD, 110.0), clean(170.0)).verdict is Verdict.HEALTHY


# --- draining, reset, probation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [63, 94, 92, 93, 121, 160, 161, 163, 164, 165, 166, 170, 176])
def test_a_worn_card_drains(code: int) -> None:
    health = after(HEALTHY, xid(code))
    assert health.verdict is Verdict.DRAINING
    assert after(health, clean(200.0)).verdict is Verdict.DRAINING


def test_a_failed_card_is_quarantined_only_when_nothing_holds_it() -> None:
    failed = after(HEALTHY, xid(79))
    assert settle(failed, True, 101.0, LIMITS) == failed
    assert settle(failed, False, 101.0, LIMITS).verdict is Verdict.QUARANTINED


def test_only_where_resets_are_allowed_a_quarantine_ends_by_itself() -> None:
    waiting = settle(after(HEALTHY, xid(48)), False, 101.0, LIMITS)
    assert awaits_reset(waiting, LIMITS)
    assert not awaits_reset(waiting, Limits(may_reset=False))
    fatal = settle(after(HEALTHY, xid(79)), False, 101.0, LIMITS)
    assert fatal.verdict is Verdict.QUARANTINED
    assert not awaits_reset(fatal, LIMITS)
    assert reset(fatal, ResetResult.DONE) == fatal


def test_a_card_is_reset_only_out_of_service() -> None:
    for health in (HEALTHY, after(HEALTHY, xid(48)), after(HEALTHY, clean(101.0))):
        assert not awaits_reset(health, LIMITS)
        assert reset(health, ResetResult.DONE) == health
    assert awaits_reset(after(HEALTHY, xid(63)), LIMITS), "it drains"


def reset(health: Health, result: ResetResult, text: str = "") -> Health:
    return fold(health, ResetSignal(CARD, 110.0, result, text), 110.0, BOOT, LIMITS)


def test_after_its_reset_a_card_is_validated_and_on_probation_or_dead() -> None:
    waiting = settle(after(HEALTHY, xid(48)), False, 101.0, LIMITS)
    done = reset(waiting, ResetResult.DONE)
    assert done.verdict is Verdict.RESETTING
    assert reset(done, ResetResult.DONE) == done
    assert after(done, clean(111.0), clean(112.0), clean(113.0)).verdict is Verdict.PROBATION
    assert after(done, *(lost(111.0 + n) for n in range(3))).verdict is Verdict.DEAD
    failed = reset(waiting, ResetResult.FAILED, "no working reset: 0000:41:00.0: Inappropriate ioctl for device")
    assert (failed.verdict, failed.fatal) == (Verdict.DEAD, True)
    assert failed.reason == (
        "no working reset: 0000:41:00.0: Inappropriate ioctl for device; before: " + waiting.reason
    )
    assert restore(failed, 1, 120.0).verdict is Verdict.RESETTING


def test_a_card_without_a_reset_stays_quarantined_and_is_asked_for_none_again() -> None:
    waiting = settle(after(HEALTHY, xid(48)), False, 101.0, LIMITS)
    stays = reset(waiting, ResetResult.IMPOSSIBLE, "no working reset")
    assert (stays.verdict, stays.fatal) == (Verdict.QUARANTINED, True)
    assert stays.reason == f"{waiting.reason}; no working reset"
    assert not awaits_reset(stays, LIMITS)
    assert is_news(waiting, stays)


def restored(health: Health, now: float, ticket: int = 1) -> Health:
    return restore(health, ticket, now)


def test_an_operator_restores_a_card_by_validation_and_probation() -> None:
    health = restored(settle(after(HEALTHY, xid(79)), False, 101.0, LIMITS), 200.0)
    assert (health.verdict, health.fatal) == (Verdict.RESETTING, False)
    health = after(health, clean(201.0), clean(202.0))
    assert health.verdict is Verdict.RESETTING
    health = after(health, clean(203.0))
    assert (health.verdict, health.probation_s) == (Verdict.PROBATION, 600.0)
    assert after(health, clean(802.0)).verdict is Verdict.PROBATION
    assert after(health, clean(803.0)).verdict is Verdict.HEALTHY


def test_an_operators_word_counts_once() -> None:
    health = restored(after(HEALTHY, xid(79)), 200.0)
    again = after(health, *(clean(201.0 + at) for at in range(3)), xid(79, 300.0))
    assert again.verdict is Verdict.FAILED
    assert restored(again, 301.0) == again
    assert restored(again, 301.0, ticket=2).verdict is Verdict.RESETTING


def test_an_operators_word_leaves_a_card_in_service_alone() -> None:
    assert restored(HEALTHY, 200.0) == replace(HEALTHY, restored=1)


def test_signals_of_the_ended_incident_do_not_fail_a_restored_card() -> None:
    health = restored(after(HEALTHY, xid(79)), 200.0)
    assert fold(health, xid(79, at=100.0), 201.0, BOOT, LIMITS) == health
    assert fold(health, xid(79, at=201.0), 201.0, BOOT, LIMITS).verdict is Verdict.DEAD


def test_a_card_that_fails_its_validation_is_dead() -> None:
    health = restored(after(HEALTHY, xid(79)), 200.0)
    assert after(health, timeout(201.0)).verdict is Verdict.DEAD
    assert after(health, GoneSignal(CARD, 201.0)).verdict is Verdict.DEAD


def on_probation(term: float = 600.0) -> Health:
    return replace(HEALTHY, verdict=Verdict.PROBATION, probation_s=term, on_probation=True, since=100.0)


def test_probation_doubles_with_each_repeat_up_to_a_day() -> None:
    health, terms = HEALTHY, []
    now = 100.0
    for ticket in range(1, 11):
        health = restore(fold(health, xid(48, now), now, BOOT, LIMITS), ticket, now + 1)
        health = after(health, *(clean(now + 2 + at) for at in range(3)))
        terms.append(health.probation_s)
        now += 100.0
    assert terms == [600 * 2**n for n in range(8)] + [DAY_S, DAY_S]


def test_after_a_week_of_service_probation_starts_anew() -> None:
    served = replace(HEALTHY, probation_s=4800.0, since=0.0)
    failed = fold(served, xid(48, 8 * DAY_S), 8 * DAY_S, BOOT, LIMITS)
    assert failed.probation_s == 0.0


def test_a_suspicion_is_no_way_out_of_probation() -> None:
    health = after(on_probation(), xid(109, 200.0))
    assert health.verdict is Verdict.SUSPECT
    health = after(health, *(clean(201.0 + at) for at in range(60)))
    assert health.verdict is Verdict.PROBATION


def test_a_failure_on_probation_is_a_failure() -> None:
    assert after(on_probation(), xid(95, 200.0)).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("ages", "lemon"),
    [((0, 1, 2), True), ((0, 1), False), ((0, 23, 25), False), ((0, 30, 60, 90, 120), True), ((0, 30, 60, 90), False)],
)
def test_three_failures_a_day_or_five_a_week_make_a_lemon(ages: tuple[int, ...], lemon: bool) -> None:
    now = 200 * 3600.0
    health = replace(HEALTHY, verdict=Verdict.FAILED, failures=tuple(now - 3600 * age for age in ages))
    assert is_lemon(health, now, LIMITS) is lemon
    assert settle(health, False, now, LIMITS).verdict is (Verdict.LEMON if lemon else Verdict.QUARANTINED)


def test_a_lemon_stays_one_over_a_reboot_and_until_an_operator_speaks() -> None:
    lemon = replace(HEALTHY, verdict=Verdict.LEMON, failures=(1.0, 2.0, 3.0))
    assert on_boot(lemon, 5.0, BootId("boot-2")).verdict is Verdict.LEMON
    back = restored(lemon, 10.0)
    assert (back.verdict, back.failures) == (Verdict.RESETTING, ())


# --- boots ------------------------------------------------------------------------------------------------------------


def test_a_reboot_makes_a_healthy_card_unknown_and_a_failed_one_to_be_validated() -> None:
    assert on_boot(HEALTHY, 5.0, BootId("boot-2")).verdict is Verdict.UNKNOWN
    failed = after(HEALTHY, xid(79))
    health = on_boot(failed, 5.0, BootId("boot-2"))
    assert (health.verdict, health.boot_id, health.fatal) == (Verdict.RESETTING, "boot-2", False)
    assert on_boot(health, 6.0, BootId("boot-2")) == health


def test_times_of_another_boot_keep_their_distances() -> None:
    failed = replace(HEALTHY, failures=(1000.0, 90000.0), verdict=Verdict.FAILED)
    assert on_boot(failed, 5.0, BootId("boot-2")).failures == (5.0 - 89000.0, 5.0)


def test_what_fails_is_probed_more_often_with_a_shorter_deadline() -> None:
    assert probe_plan(HEALTHY, LIMITS) == (5.0, 5.0)
    assert probe_plan(after(HEALTHY, xid(109)), LIMITS) == (1.0, 1.0)
    assert probe_plan(after(HEALTHY, lost(5.0)), LIMITS) == (0.25, 1.0)
    assert probe_plan(after(HEALTHY, xid(79)), LIMITS) is None


# --- laws -------------------------------------------------------------------------------------------------------------

_TIMES = st.floats(min_value=0.0, max_value=3.0)
_SIGNALS = st.one_of(
    st.builds(XidSignal, st.just(CARD), st.integers(0, 180), st.just(0.0), st.just(""), st.none() | st.integers(0, 6)),
    st.builds(ProbeSignal, st.just(CARD), st.just(0.0), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 6)),
    st.builds(GoneSignal, st.just(CARD), st.just(0.0)),
    st.builds(UnknownSignal, st.just(CARD), st.just(0.0)),
    st.builds(EccSignal, st.just(CARD), st.just(0.0)),
    st.builds(ResetSignal, st.just(CARD), st.just(0.0), st.sampled_from(ResetResult)),
)
_STATES = st.builds(
    lambda verdict, fatal, on_probation: replace(HEALTHY, verdict=verdict, fatal=fatal, on_probation=on_probation),
    st.sampled_from(Verdict),
    st.booleans(),
    st.booleans(),
)


def _at(signal: HealthSignal, at: float) -> HealthSignal:
    return replace(signal, at=at)


@given(st.lists(st.tuples(_TIMES, _SIGNALS), max_size=30))
@settings(max_examples=200)
def test_without_a_clean_probe_no_card_ever_becomes_healthy(steps: list[tuple[float, HealthSignal]]) -> None:
    health, now = Health(boot_id=BOOT), 1.0
    for delay, signal in steps:
        now += delay
        if isinstance(signal, ProbeSignal) and signal.ok:
            continue
        health = settle(fold(health, _at(signal, now), now, BOOT, LIMITS), False, now, LIMITS)
        assert health.verdict not in (Verdict.HEALTHY, Verdict.PROBATION)


@given(_STATES, _SIGNALS)
def test_repeating_a_signal_at_once_moves_no_verdict_but_a_probes(state: Health, signal: HealthSignal) -> None:
    if isinstance(signal, ProbeSignal):
        return  # each probe is a look of its own
    once = fold(state, _at(signal, 5.0), 5.0, BOOT, LIMITS)
    twice = fold(once, _at(signal, 5.0), 5.0, BOOT, LIMITS)
    assert replace(twice, app_xids=once.app_xids) == once


@given(_STATES, st.lists(st.sampled_from(APP), max_size=20))
def test_application_errors_never_change_a_verdict(state: Health, codes: list[int]) -> None:
    assert replace(after(state, *(xid(code) for code in codes)), app_xids=0) == state


@given(_STATES, _SIGNALS)
def test_a_card_out_of_service_returns_only_by_validation(state: Health, signal: HealthSignal) -> None:
    if state.verdict in OUT_OF_SERVICE - {Verdict.RESETTING}:
        assert fold(state, _at(signal, 5.0), 5.0, BOOT, LIMITS).verdict in OUT_OF_SERVICE


@given(_STATES, _SIGNALS)
def test_every_new_verdict_is_news(state: Health, signal: HealthSignal) -> None:
    new = fold(state, _at(signal, 5.0), 5.0, BOOT, LIMITS)
    assert new.verdict is state.verdict or is_news(state, new)


def test_counters_of_a_suspicion_are_not_news_and_application_errors_are_seldom() -> None:
    suspect = after(HEALTHY, xid(109))
    assert not is_news(suspect, after(suspect, clean(101.0)))
    news = [n for n in range(1, 1000) if is_news(replace(HEALTHY, app_xids=n - 1), replace(HEALTHY, app_xids=n))]
    assert news == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
