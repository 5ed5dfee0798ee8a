"""Passthrough claims for real: kvmpoold, the hook, libvirtd and vfio-pci; the guest reads its card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmpool.lab import vfio_cards
from tests.vfio import passing
from tests.vfio.conftest import Bench, until
from tests.vfio.passing import LONG_S, Passing

pytestmark = [pytest.mark.e2e, pytest.mark.vfio, pytest.mark.timeout(900)]  # the host is twenty times slower

_EDU, _NVME, _NVME2, _, _EDU2 = vfio_cards.CARDS
_CARDS = (_EDU, _NVME, _NVME2, _EDU2)
_NVME_CLAIM = 'mode="passthrough" model="8086:5845"'
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
    pool.ready(())
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
    assert [kind for subject, kind, _ in pool.events() if subject == label] == [
        "bound",
        "ready",
        "served",
        "released",
        "freed",
    ]
    assert pool.card(_NVME)["bindings"] == pool.card(_NVME2)["bindings"] == []
    assert host.driver(address) == "vfio-pci"
    host.virsh("start", "vm0", timeout_s=LONG_S)
    until(lambda: pool.devices("vm0"), "its next start gets no card")


def test_a_third_domain_is_refused_with_each_card_s_reason(pool: Passing) -> None:
    for number in (1, 2):
        pool.start(passing.spec(f"vm{number}", number, _NVME_CLAIM))
    pool.bench.lab.define(passing.spec("vm3", 3, _NVME_CLAIM))
    said = pool.bench.refusal("start", "vm3")
    assert "vm3/gpu0: no card can serve a passthrough claim" in said
    assert f"l1/{_NVME.address}: passed through to another domain" in said
    assert f"l1/{_EDU.address}: model" in said
