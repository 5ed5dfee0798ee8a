"""Passthrough claims for real: kvmpoold, the hook, libvirtd and vfio-pci; the guest reads its card."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvmpool.lab import vfio_cards
from kvmpool.lab.vfio_cards import Fault, LabCard
from tests.vfio import passing
from tests.vfio.conftest import Bench, until
from tests.vfio.passing import LONG_S, Passing

pytestmark = [pytest.mark.e2e, pytest.mark.vfio, pytest.mark.timeout(900)]  # the host is twenty times slower

_EDU, _NVME, _NVME2, _, _EDU2 = vfio_cards.CARDS
_CARDS = (_EDU, _NVME, _NVME2, _EDU2)
_NVME_CLAIM = 'mode="passthrough" model="8086:5845"'
_EDU_CLAIM = 'mode="passthrough" model="1234:11e8"'
_NVME_READS = "0f0107ff 00401820"  # its capabilities: see test_passthrough.py
_ALIAS = "ua-kvmpool-gpu0"


@pytest.fixture(scope="module")
def _passing(_bench: Bench) -> Iterator[Passing]:
    """The host has joined, two of its cards by `host join --mode`, two by a person's wish afterwards."""
    _bench.reset()
    pool = Passing(_bench)
    modes = [word for card in (_EDU, _EDU2) for word in ("--mode", f"{card.address}=passthrough")]
    _bench.lab.join(*modes)
    _bench.lab.start_kvmpoold()
    for card in (_NVME, _NVME2):
        until(lambda card=card: pool.card(card), f"{card.name} is not seen")  # type: ignore[misc]
        pool.switch(card, "passthrough")
    yield pool
    pool.ready(_CARDS)  # no card is left dead
    _bench.host.end_daemon("kvmpoold")
    _bench.host.sh("rm -rf /var/lib/kvmpool/* /etc/kvmpool/conf.d")


@pytest.fixture
def pool(_passing: Passing) -> Passing:
    """No domain; four cards are passthrough, healthy and free."""
    _passing.ready(_CARDS)
    return _passing


def test_a_claim_s_card_is_in_its_domain_at_the_fixed_address_and_free_after_its_end(pool: Passing) -> None:
    host = pool.bench.host
    assert [host.driver(card.address) for card in _CARDS] == ["vfio-pci"] * 4
    said = pool.start(passing.spec("vm0", 1, _NVME_CLAIM))
    [card] = [line for line in said.splitlines() if line.startswith("CARD ")]
    assert card.split()[1:3] == ["03:00.0", _NVME.ids]
    assert card.endswith(_NVME_READS)
    [(alias, address, bus)] = pool.devices("vm0")
    assert (alias, bus) == (_ALIAS, "03")
    assert address in (_NVME.address, _NVME2.address)
    [binding] = pool.get("/bindings")
    assert (binding["phase"], binding["mode"], binding["card"]) == ("ready", "passthrough", f"l1/{address}")
    until(lambda: pool.get("/claims/vm0/gpu0")["state"] == "served", "the claim is not told as served")
    host.virsh("destroy", "vm0")
    until(lambda: not pool.get("/bindings"), "the binding's row is not gone")
    label = binding["label"]
    kinds = [kind for subject, kind, _ in pool.events() if subject == label]
    assert kinds == ["bound", "ready", "served", "released", "freed"]
    assert pool.card(_NVME)["bindings"] == pool.card(_NVME2)["bindings"] == []
    assert host.driver(address) == "vfio-pci"


def test_a_third_domain_is_refused_with_each_card_s_reason(pool: Passing) -> None:
    for number in (1, 2):
        pool.start(passing.spec(f"vm{number}", number, _NVME_CLAIM))
    pool.bench.lab.define(passing.spec("vm3", 3, _NVME_CLAIM))
    said = pool.bench.refusal("start", "vm3")
    assert "vm3/gpu0: no card can serve a passthrough claim" in said
    assert f"l1/{_NVME.address}: passed through to another domain" in said
    assert f"l1/{_EDU.address}: model" in said


# --- a card dies in use -----------------------------------------------------------------------------------------------


def _its(pool: Passing, name: str, pair: tuple[LabCard, LabCard]) -> tuple[LabCard, LabCard]:
    """The card that is in the domain, and the other one of the pair."""
    [(_, address, _)] = pool.devices(name)
    return pair if pair[0].address == address else (pair[1], pair[0])


def _swapped(pool: Passing, name: str, old: LabCard, new: LabCard, bus: str, since: float, fault: str) -> None:
    """The domain gets the other card at the same address, the old one alone is out of service; prints the times."""
    others = [card for card in _CARDS if card is not old]
    failed = until(lambda: pool.event_at(f"l1/{old.address}", "failed", since), f"{old.name} is not found failed")
    until(lambda: pool.devices(name) == [(_ALIAS, new.address, bus)], "the other card does not come", LONG_S)
    label = until(lambda: pool.get(f"/claims/{name}/gpu0")["binding"], "the claim has no binding")
    served = until(lambda: pool.event_at(label, "served", since), "the claim is not told as served")
    until(lambda: pool.event_at(f"l1/{old.address}", "quarantined", since), "the dead card is not in quarantine")
    assert [pool.verdict(card) for card in others] == ["healthy"] * 3, "another card is blamed"
    print(f"{fault}: known after {failed - since:.2f} s, the other card is there after {served - since:.2f} s")


def test_a_card_that_falls_off_the_bus_is_replaced_while_the_guest_runs(pool: Passing) -> None:
    guest = passing.spec("vm1", 1, _EDU_CLAIM)
    pool.start(guest)
    old, new = _its(pool, "vm1", (_EDU, _EDU2))
    since = pool.clock()
    pool.bench.host.inject(old, Fault.FALLS_OFF)
    _swapped(pool, "vm1", old, new, "03", since, "falls off the bus")
    said = pool.plugged(guest, 2)
    assert said.count("BOOTED") == 1, "the guest was started anew"
    cards = [line for line in said.splitlines() if line.startswith("CARD 03:00.0")]
    assert len(cards) == 2
    assert cards[1].endswith("010000ed fffffffa"), "the guest does not read the other card"
    assert not pool.event_at("vm1", "forced", since)


def test_a_fatal_error_of_a_card_stops_its_domain_which_is_reset_and_gets_the_other_card(pool: Passing) -> None:
    guest = passing.spec("vm2", 2, _NVME_CLAIM)
    pool.start(guest)
    old, new = _its(pool, "vm2", (_NVME, _NVME2))
    since = pool.clock()
    pool.bench.host.inject(old, Fault.AER_FATAL)
    _swapped(pool, "vm2", old, new, "03", since, "AER fatal")
    [reason] = [why for subject, kind, why in pool.events() if (subject, kind) == ("vm2", "forced")]
    assert reason == f"QEMU has stopped the domain for an error of {old.address}: only a reset lets it go on"
    assert pool.bench.state("vm2").startswith("running")
    until(lambda: pool.bench.host.read(guest.console).count("PLUGGED 03") >= 3, "the guest does not see the other card")


def test_a_guest_that_never_answers_is_reset_as_its_claim_says(pool: Passing) -> None:
    gpu = "mode=passthrough,model=1234:11e8,on_unplug=reset"
    pool.kvmpool("domain", "define", "vm3", "--memory", "64", "--gpu", gpu)
    pool.bench.host.virsh("start", "vm3", timeout_s=LONG_S)
    [(alias, _, bus)] = until(lambda: pool.devices("vm3"), "the card is not attached", LONG_S)
    assert (alias, bus) == (_ALIAS, "10"), "not at the port that is kept for it"
    old, new = _its(pool, "vm3", (_EDU, _EDU2))
    since = pool.clock()
    pool.bench.host.inject(old, Fault.FALLS_OFF)
    _swapped(pool, "vm3", old, new, "10", since, "falls off the bus, guest without an answer")
    [reason] = [why for subject, kind, why in pool.events() if (subject, kind) == ("vm3", "forced")]
    assert reason == f'the guest did not give {old.address} back in 2 tries: on_unplug="reset"'


# --- again and again --------------------------------------------------------------------------------------------------


def test_cards_that_come_and_go_leave_nothing_in_kvmpoold(pool: Passing) -> None:
    """Each cycle drains the card in use: it leaves the running domain, and the other one comes."""
    cycles = int(os.environ.get("KVMPOOL_PLUG_CYCLES", "2"))
    pool.start(passing.spec("vm4", 4, _NVME_CLAIM))
    _cycle(pool)
    before = _footprint(pool)
    for _ in range(cycles):
        _cycle(pool)
    after = _footprint(pool)
    print(f"{cycles} cycles: descriptors, threads, KiB, bindings: {before} -> {after}")
    assert after[0] <= before[0] + 2, "descriptors are left"
    assert after[1] <= before[1] + 2, "threads are left"
    assert after[2] <= before[2] + 8192, "memory is left"
    assert after[3] == before[3] == 1


def _cycle(pool: Passing) -> None:
    old, new = _its(pool, "vm4", (_NVME, _NVME2))
    client = pool.bench.lab.client()
    client.post(f"/cards/l1/{old.address}/drain", {"reason": "a test"})
    until(lambda: pool.devices("vm4") == [(_ALIAS, new.address, "03")], "the other card does not come", LONG_S)
    client.post(f"/cards/l1/{old.address}/uncordon")
    until(lambda: len(pool.get("/bindings")) == 1, "the old binding's row stays")


def _footprint(pool: Passing) -> tuple[int, int, int, int]:
    """Of kvmpoold: open descriptors, threads, resident KiB; and the rows of bindings."""
    script = "cd \"/proc/$1\" && ls fd | wc -l; awk '/^Threads|^VmRSS/ { print $2 }' status"
    pid = pool.bench.host.daemon_pid("kvmpoold")
    fds, rss, threads = (int(word) for word in pool.bench.host.sh(script, str(pid)).stdout.split())
    return fds, threads, rss, len(pool.get("/bindings"))


# --- the host starts anew ---------------------------------------------------------------------------------------------


def test_after_a_reboot_the_modes_are_back_and_nothing_runs_that_nobody_started(pool: Passing) -> None:
    guest = passing.spec("vm5", 5, _NVME_CLAIM)
    pool.start(guest)
    [before] = pool.get("/bindings")
    since = pool.clock()
    pool.bench.lab.reboot()
    host = pool.bench.host
    assert [host.driver(card.address) for card in _CARDS] == [""] * 4, "drivers came back by themselves"
    host.start_libvirt()
    pool.bench.lab.start_kvmpoold()
    for card in _CARDS:
        until(lambda card=card: host.driver(card.address) == "vfio-pci", f"{card.name}'s mode is not back", LONG_S)  # type: ignore[misc]
    for card in _CARDS:
        until(lambda card=card: pool.verdict(card) == "healthy", f"{card.name} is not healthy", LONG_S)  # type: ignore[misc]
    until(lambda: not pool.get("/bindings"), "the bindings of before the reboot stay")
    assert ("vm5", "withdrawn", "the host has rebooted") in pool.events()
    assert not pool.event_at("vm5", "prepare", since)
    assert host.virsh("list", "--name").split() == []
    pool.start(guest)
    [after] = pool.get("/bindings")
    assert after["generation"] > before["generation"]
    assert host.sh("pgrep -c qemu-system").stdout.split() == ["1"]
