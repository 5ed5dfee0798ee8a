"""When automatic failover stops."""

from __future__ import annotations

from kvmpool.core import breaker
from kvmpool.core.model import Breaker, CardId, Rows, Settings
from tests.core.build import card, failed, rows

SETTINGS = Settings()


def memory(*entries: tuple[float, int]) -> Breaker:
    return Breaker(failovers=tuple((at, CardId(f"GPU-{n}")) for at, n in entries))


def pool(size: int, *entries: tuple[float, int], fatal: bool = False) -> Rows:
    down = {n for _, n in entries}
    cards = [failed(n, fatal=fatal) if n in down else card(n) for n in range(size)]
    return rows(cards, memory=memory(*entries))


def trips(size: int, *entries: tuple[float, int], now: float = 50.0, card_n: int = 9, fatal: bool = False) -> str:
    found = pool(size, *entries, fatal=fatal)
    return breaker.would_trip(found, CardId(f"GPU-{card_n}"), (), SETTINGS, now)


def test_two_cards_may_fail_in_the_smallest_pool_the_third_trips() -> None:
    small = rows([failed(0), failed(1), card(2)])
    assert breaker.would_trip(small, CardId("GPU-0"), (), SETTINGS, 1.0) == ""
    assert breaker.would_trip(small, CardId("GPU-1"), (CardId("GPU-0"),), SETTINGS, 1.0) == ""
    reason = breaker.would_trip(small, CardId("GPU-2"), (CardId("GPU-0"), CardId("GPU-1")), SETTINGS, 1.0)
    assert "3 of 3 cards on h0" in reason


def test_a_share_of_a_large_host_may_fail() -> None:
    settings = Settings(breaker_pool_fraction=1.0)
    ten = pool(10, (10.0, 0), (20.0, 1))
    assert breaker.would_trip(ten, CardId("GPU-9"), (), settings, 50.0) == ""
    ten = pool(10, (10.0, 0), (20.0, 1), (30.0, 2))
    assert "4 of 10 cards on h0" in breaker.would_trip(ten, CardId("GPU-9"), (), settings, 50.0)


def test_the_share_of_the_pool_counts_too() -> None:
    assert "3 of 10 cards in the pool" in trips(10, (10.0, 0), (20.0, 1))


def test_what_is_older_than_the_window_is_forgotten() -> None:
    assert trips(10, (10.0, 0), (20.0, 1), now=71.0) == ""


def test_cards_lost_within_two_seconds_behind_one_host_are_one_incident() -> None:
    lost_together = ((40.0, 0), (40.5, 1), (41.0, 2), (41.5, 3))
    assert trips(10, *lost_together, now=41.6, fatal=True) == ""
    assert trips(10, *lost_together, now=41.6, fatal=False) != ""


def test_losses_that_go_on_for_longer_are_more_than_one_incident() -> None:
    assert trips(10, (40.0, 0), (43.0, 1), now=46.0, fatal=True) != ""


def test_a_card_counts_once_however_many_bindings_it_gives_up() -> None:
    again = breaker.record(memory((10.0, 0)), CardId("GPU-0"), "", SETTINGS, 12.0)
    assert again.failovers == ((10.0, "GPU-0"),)
    assert trips(10, (10.0, 9), (11.0, 9), (12.0, 1)) == ""


def test_the_memory_keeps_only_the_window() -> None:
    kept = breaker.record(memory((10.0, 0)), CardId("GPU-1"), "vm0/gpu0", SETTINGS, 80.0)
    assert kept.failovers == ((80.0, "GPU-1"),)
    assert kept.broken == ((80.0, "vm0/gpu0"),)


def test_a_claim_whose_workers_keep_breaking_waits() -> None:
    found = Breaker()
    for at in (1.0, 2.0, 3.0):
        assert not breaker.broken_too_often(found, "vm0/gpu0", SETTINGS, at)
        found = breaker.record(found, None, "vm0/gpu0", SETTINGS, at)
    assert breaker.broken_too_often(found, "vm0/gpu0", SETTINGS, 4.0)
    assert not breaker.broken_too_often(found, "vm1/gpu0", SETTINGS, 4.0)
    assert not breaker.broken_too_often(found, "vm0/gpu0", SETTINGS, 61.5)


def test_a_person_closes_it_and_the_count_starts_anew() -> None:
    open_ = breaker.opened(memory((10.0, 0), (11.0, 1)), "3 of 3 cards", 12.0)
    assert (open_.open_reason, open_.opened_at) == ("3 of 3 cards", 12.0)
    assert breaker.closed(open_, [card(0)], 13.0) == Breaker()


def test_what_the_person_looked_at_does_not_open_it_again_but_new_failures_do() -> None:
    cards = [failed(n) for n in range(4)] + [card(n) for n in range(4, 12)]
    seen = breaker.closed(memory((10.0, 0), (11.0, 1)), cards, 20.0)
    found = rows([failed(n) for n in range(8)] + [card(n) for n in range(8, 12)], memory=seen)
    ids = [CardId(f"GPU-{n}") for n in range(8)]
    assert [breaker.would_trip(found, each, tuple(ids[:n]), SETTINGS, 21.0) != "" for n, each in enumerate(ids)] == [
        *(False for _ in range(6)),
        *(True for _ in range(2)),
    ]


def test_entries_of_another_boot_count_only_until_the_window_has_passed() -> None:
    assert trips(10, (100000.0, 0), (100001.0, 1), now=5.0) == ""
