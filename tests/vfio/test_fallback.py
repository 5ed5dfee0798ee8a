"""No second card: a claim falls back to a vGPU over vsock or waits; a card that failed is reset and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvmpool.lab import images, vfio_cards
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.process import Done
from kvmpool.lab.vfio_cards import Fault
from kvmpool.native import native
from tests.vfio.conftest import Bench, until

pytestmark = [pytest.mark.e2e, pytest.mark.vfio, pytest.mark.timeout(900)]  # the host is twenty times slower

_WHOLE, _SHARED, _RESETS = (vfio_cards.card(name) for name in ("gpu4", "gpu3", "gpu1"))
_BUS = 3  # the guest's, of the card
_LONG_S = 300.0
_CIDS = "/run/kvmpool/acceptor"
_LOOPBACK_CID, _PORT = 1, 9960
_MEMORY_MIB = 512


def _spec(name: str, number: int, claim: str) -> GuestSpec:
    claims = (f'name="gpu0" {claim}',)
    return GuestSpec(name, number, claims, memory_mib=16, vsock=True, kept=("gpu0",), ports=_BUS - 1)


@pytest.fixture
def pool(bench: Bench) -> Iterator[Bench]:
    """One card that is passed through, one of a host's driver; both are healthy, no domain."""
    bench.lab.lend_to_soft_driver(_SHARED)
    bench.lab.join()
    bench.lab.start_kvmpoold()
    until(lambda: _card(bench, _WHOLE), f"{_WHOLE.name} is not seen")
    bench.lab.client().post(f"/cards/l1/{_WHOLE.address}/mode", {"mode": "passthrough", "dry_run": False})
    for card, mode in ((_WHOLE, "passthrough"), (_SHARED, "vgpu")):
        until(lambda card=card, mode=mode: _is(bench, card, mode), f"{card.name} is not a healthy {mode} card", _LONG_S)  # type: ignore[misc]
    yield bench
    bench.host.sh('for name in $(virsh -q list --name); do virsh -q destroy "$name"; done', timeout_s=_LONG_S)
    until(lambda: not bench.lab.client().get("/bindings"), "bindings are left", _LONG_S)
    bench.host.end_daemon("kvmpoold")
    bench.host.sh("rm -rf /var/lib/kvmpool/*")


def _card(pool: Bench, card: vfio_cards.LabCard) -> dict[str, Any]:
    found: dict[str, Any] = {row["address"]: row for row in pool.lab.client().get("/cards")}.get(card.address, {})
    return found


def _is(pool: Bench, card: vfio_cards.LabCard, mode: str) -> bool:
    seen = _card(pool, card)
    return (seen.get("mode"), seen.get("verdict")) == (mode, "healthy")


def _binding(pool: Bench, label: str) -> dict[str, Any]:
    found: dict[str, Any] = {row["label"]: row for row in pool.lab.client().get("/bindings")}.get(label, {})
    return found


def _claim(pool: Bench, domain: str) -> dict[str, Any]:
    found: dict[str, Any] = pool.lab.client().get(f"/claims/{domain}/gpu0")
    return found


def _start(pool: Bench, spec: GuestSpec) -> None:
    """It runs, and its card has come into its slot."""
    pool.lab.define(spec)
    pool.host.virsh("start", spec.name, timeout_s=_LONG_S)
    pool.lab.wait_for_guest(spec, f"PLUGGED {_BUS:02x}", timeout_s=_LONG_S)
    until(lambda: _claim(pool, spec.name)["state"] == "served", "the claim is not told as served", _LONG_S)


def _dies(pool: Bench) -> None:
    pool.host.inject(_WHOLE, Fault.FALLS_OFF)
    until(lambda: _card(pool, _WHOLE).get("verdict") == "quarantined", "the card is not in quarantine", _LONG_S)


def _comes_back(pool: Bench) -> None:
    """It answers again; a person says that it is repaired, and it serves its probation."""
    pool.host.inject(_WHOLE, Fault.COMES_BACK)
    pool.host.sh('echo 1 >"/sys/bus/pci/devices/$1/remove"; echo 1 >/sys/bus/pci/rescan', _WHOLE.address)
    pool.lab.client().post(f"/cards/l1/{_WHOLE.address}/restore", {"reason": "a test"})
    until(lambda: _is(pool, _WHOLE, "passthrough"), f"{_WHOLE.name} does not come back", _LONG_S)


def test_a_claim_falls_back_to_a_vgpu_whose_guest_is_known_by_its_cid(pool: Bench) -> None:
    spec = _spec("vm0", 1, f'mode="any" order="passthrough vgpu" memory="{_MEMORY_MIB}"')
    _start(pool, spec)
    first = _binding(pool, "vm0/gpu0#1")
    assert (first["mode"], first["card"]) == ("passthrough", f"l1/{_WHOLE.address}")
    _dies(pool)
    label = until(lambda: _fallen_back(pool), "the claim gets no vGPU", _LONG_S)
    second = _binding(pool, label)
    assert (second["mode"], second["card"]) == ("vgpu", f"l1/{_SHARED.address}")
    assert "<hostdev" not in pool.host.virsh("dumpxml", "vm0"), "the dead card is in its domain"
    cid = pool.host.virsh("dumpxml", "vm0").partition("<cid auto='yes' address='")[2].partition("'")[0]
    assert pool.host.read(f"{_CIDS}/{cid}") == spec.uuid
    stranger = _device_query(pool)
    assert stranger.returncode != 0
    assert "46" in stranger.stdout + stranger.stderr, "who has no CID of a domain is not refused"
    # From here on the lab says who CID 1 is; kvmpoold, which knows better, would correct it with its next look.
    pool.host.sh('kill -STOP "$(cat /run/kvmpoold.pid)"; printf %s "$1" >"$2"', spec.uuid, f"{_CIDS}/{_LOOPBACK_CID}")
    served = _device_query(pool)
    pool.host.sh('kill -CONT "$(cat /run/kvmpoold.pid)"')
    assert served.returncode == 0, served.stdout + served.stderr
    assert f"memory MiB: {_MEMORY_MIB}\n" in served.stdout
    _comes_back(pool)


def _fallen_back(pool: Bench) -> str:
    claim = _claim(pool, "vm0")
    return str(claim["binding"]) if claim["state"] == "served" and claim["binding"] != "vm0/gpu0#1" else ""


def _device_query(pool: Bench) -> Done:
    """The example program, in the host as if it were a guest, over vsock's loopback."""
    program = next(path for path in images.programs() if path.name == "deviceQuery")
    pool.host.copy(program, "/run/deviceQuery")
    environment = {
        "LD_LIBRARY_PATH": str(native("shim").parent),
        "KVMPOOL_ENDPOINT": f"vsock:{_LOOPBACK_CID}:{_PORT}",
    }
    script = "chmod +x /run/deviceQuery && exec /run/deviceQuery"
    return pool.host.run("sh", "-c", script, check=False, environment=environment, timeout_s=_LONG_S)


def test_a_claim_without_fallback_waits_with_the_reason_and_is_served_when_a_card_returns(pool: Bench) -> None:
    _start(pool, _spec("vm1", 2, 'mode="passthrough"'))
    _dies(pool)
    until(lambda: not _claim(pool, "vm1")["binding"], "the claim still has the dead card", _LONG_S)
    why = _claim(pool, "vm1")
    assert why["state"] == "waiting"
    assert "no card can serve a passthrough claim" in why["reason"]
    assert f"l1/{_WHOLE.address}: quarantined" in why["reason"]
    _comes_back(pool)
    until(lambda: _claim(pool, "vm1")["state"] == "served", "the claim is not served by the card that is back", _LONG_S)
    assert _WHOLE.address[5:7] in pool.host.virsh("dumpxml", "vm1").partition("<hostdev")[2].partition("</source>")[0]


def test_a_free_card_with_a_fatal_error_is_reset_and_comes_back_by_probation(pool: Bench) -> None:
    """vfio-pci's own reset of a real function (FLR): the last part of a failover, here without a domain."""
    client = pool.lab.client()
    client.post(f"/cards/l1/{_RESETS.address}/mode", {"mode": "passthrough", "dry_run": False})
    until(lambda: _is(pool, _RESETS, "passthrough"), f"{_RESETS.name} is not a healthy passthrough card", _LONG_S)
    pool.host.inject(_RESETS, Fault.AER_FATAL)
    until(lambda: "resetting" in _kinds(pool), "it is not reset", _LONG_S)
    until(lambda: _is(pool, _RESETS, "passthrough"), "it does not come back", _LONG_S)
    kinds = _kinds(pool)
    assert kinds[kinds.index("quarantined") :] == ["quarantined", "resetting", "probation", "healthy"]
    assert f"{_RESETS.address}: resetting it" in pool.host.read("/run/kvmpoold.log"), "nobody reset it"


def _kinds(pool: Bench) -> list[str]:
    subject = f"l1/{_RESETS.address}"
    return [event["kind"] for event in pool.lab.client().get("/events") if event["subject"] == subject]
