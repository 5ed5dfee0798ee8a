"""What a person reads of a passthrough binding: served once its card is in the domain, and in which mode, and why."""

from __future__ import annotations

from dataclasses import replace

from kvmpool.api.bodies import Look, binding_body, card_body, claim_bodies, explain_body
from kvmpool.api.shapes import ClaimBody
from kvmpool.cli.binding import BINDING_COLUMNS
from kvmpool.cli.binding import _fields as binding_fields
from kvmpool.cli.card import CARD_COLUMNS
from kvmpool.cli.claim import CLAIM_COLUMNS
from kvmpool.cli.claim import _fields as claim_fields
from kvmpool.core.model import Binding, Card, Claim, Generation, Mode, Phase, Plug, Settings
from kvmpool.core.plug import worker_of
from tests.core.build import H0, binding, card, claim, rows, spec

WHOLE = replace(card(0), mode=Mode.PASSTHROUGH, driver="vfio-pci")
SHARED = card(1)
ASKS = replace(claim(0, spec(0, mode=Mode.PASSTHROUGH)))
ANY = replace(claim(0, spec(4096, mode=Mode.ANY, order=(Mode.PASSTHROUGH, Mode.VGPU))), endpoint="tcp:1.2.3.4:5")
ONE = Generation(1)


def passed(of: Claim, phase: Phase = Phase.READY) -> Binding:
    asked = replace(of, spec=replace(of.spec, memory_mib=0, memory_limit_mib=0))
    worker = worker_of(WHOLE.address) if phase is Phase.READY else ""
    return replace(binding(asked, WHOLE, phase=phase), mode=Mode.PASSTHROUGH, worker=worker, compute_limit_percent=0)


def look(of: Claim, bound: Binding | None, *cards: Card) -> Look:
    return Look(rows(cards or (WHOLE, SHARED), [of], [bound] if bound else []), Settings(), H0, now=1.0, wall=1.0)


def told(of: Claim, bound: Binding | None, *cards: Card) -> ClaimBody:
    (body,) = claim_bodies(look(of, bound, *cards))
    return body


def test_a_card_serves_its_claim_once_it_is_in_the_domain() -> None:
    waits = told(ASKS, passed(ASKS))
    assert (waits["state"], waits["reason"]) == ("starting", "its card is not in the domain yet")
    served = told(replace(ASKS, pointed=ONE), passed(ASKS))
    assert (served["state"], served["serves"], served["reason"]) == ("served", "passthrough", "")


def test_with_plug_boot_the_next_card_waits_for_the_next_start_and_says_so() -> None:
    boot = replace(ASKS, spec=replace(ASKS.spec, plug=Plug.BOOT))
    assert told(boot, passed(boot))["reason"] == "its card is not in the domain yet"
    after = told(replace(boot, served=Generation(0)), passed(boot))
    assert (after["state"], after["reason"]) == (
        "starting",
        'with plug="boot" the domain gets its card at its next start',
    )


def test_a_claim_of_mode_any_says_which_mode_serves_it_and_why() -> None:
    first = told(replace(ANY, pointed=ONE), passed(ANY))
    assert (first["state"], first["serves"], first["reason"]) == ("served", "passthrough", "")
    second = replace(ANY, pointed=ONE)
    bound = binding(ANY, SHARED)
    fell = told(second, bound, SHARED)
    assert (fell["state"], fell["serves"]) == ("served", "vgpu")
    assert fell["reason"] == "as vgpu: no card fits passthrough; it is asked for again at the next start"
    assert "a card for passthrough is free now" in told(second, bound)["reason"]
    here = look(second, bound)
    explained = explain_body(here, told(second, bound))
    assert (explained["serves"], explained["reason"]) == ("vgpu", told(second, bound)["reason"])


def test_no_memory_worker_or_relay_is_told_of_a_whole_card() -> None:
    of = replace(ASKS, pointed=ONE)
    here = look(of, passed(ASKS))
    body = binding_body(here, passed(ASKS))
    fields = dict(binding_fields(dict(body)))
    assert fields["Memory"] == fields["Compute"] == "whole card"
    assert fields["In the domain"] == "yes"
    assert not {"Page-locked", "Sessions", "Worker", "Worker's socket", "Endpoint", "Relay points here"} & fields.keys()
    assert [each.text(body) for each in BINDING_COLUMNS if each.heading in ("USED/MEMORY", "SESSIONS")] == [
        "whole card",
        "-",
    ]
    claimed = told(of, passed(ASKS))
    assert dict(claim_fields(dict(claimed)))["Memory"] == "whole card"
    assert next(each.text(claimed) for each in CLAIM_COLUMNS if each.heading == "MEMORY") == "whole card"
    taken = next(each for each in CARD_COLUMNS if each.heading == "TAKEN/MEMORY")
    assert taken.text(card_body(here, WHOLE)) == "all/8GiB"
    assert taken.text(card_body(look(ASKS, None), WHOLE)) == "none/8GiB"
    assert taken.text(card_body(here, SHARED)) == "0MiB/8GiB"
