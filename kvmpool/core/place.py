"""Decides which card serves a claim: filter, score, choose (design 07). A refusal names its first failing predicate.

A plan sees its own earlier decisions: `Taken` is built from the binding rows of every phase (a releasing binding still
holds its memory) and grows with each Bind of the plan.
This module does not know how a claim came to wait, nor the breaker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvmpool.core.model import (
    Binding,
    Card,
    CardId,
    Claim,
    ClaimSpec,
    Hold,
    Host,
    HostName,
    Mode,
    Numa,
    OnFailure,
    Rows,
    Verdict,
)

COMPUTE_PERCENT = 100  # of one card
_VENDORS = {"10de": "NVIDIA", "1002": "AMD", "8086": "Intel"}  # PCI ids and the names people write (pci.ids)
VFIO = "vfio-pci"  # the driver of a card that is passed through


@dataclass(frozen=True, slots=True)
class Use:
    """What bindings hold of one card."""

    memory_mib: int = 0
    compute_percent: int = 0
    modes: frozenset[Mode] = frozenset()
    bindings: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """What is held of every card, earlier decisions of the same plan included."""

    by_card: dict[CardId, Use] = field(default_factory=dict)

    def of(self, card: CardId) -> Use:
        return self.by_card.get(card, Use())

    def plus(self, binding: Binding) -> Taken:
        use = self.of(binding.card)
        more = Use(
            use.memory_mib + binding.memory_mib,
            use.compute_percent + binding.compute_percent,
            use.modes | {binding.mode},
            use.bindings + 1,
        )
        return Taken({**self.by_card, binding.card: more})


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the score's terms; each term lies in 0..1 and more is better."""

    pack: float = 1.0  # fuller cards first, so that whole ones stay free; negative spreads
    local: float = 0.5  # a card of the domain's own host needs no network
    steady: float = 0.5  # cards that have failed within a week come last


@dataclass(frozen=True, slots=True)
class Choice:
    """The card a claim gets (None: no card fits), and why each refused one does not. In the order of labels."""

    card: Card | None
    refused: tuple[tuple[str, str], ...] = ()
    scores: tuple[tuple[str, float], ...] = ()
    mode: Mode = Mode.VGPU  # in which `card` serves the claim


def taken_by(bindings: Iterable[Binding]) -> Taken:
    taken = Taken()
    for binding in bindings:
        taken = taken.plus(binding)
    return taken


def unsupported(spec: ClaimSpec) -> str | None:
    """Why this version cannot perform a valid claim, in one clause; None if it can. `prepare` then refuses at once."""
    if spec.mode is Mode.ANY and Mode.VGPU in modes(spec) and not spec.memory_mib:
        return 'mode="any" that may become a vGPU needs memory: how much of a card it then gets'
    if spec.count != 1:
        return f'count="{spec.count}" is not supported yet: only count="1" is; use one claim a card'
    if spec.hold is not Hold.DOMAIN:
        return f'hold="{spec.hold.value}" is not supported yet: only hold="domain" is'
    if spec.on_failure is OnFailure.REPLAY:
        return 'on_failure="replay" is not supported yet: only "rebind" and "none" are'
    if spec.memory_limit_mib > spec.memory_mib:
        return "memory_limit above memory is not supported yet: leave it out"
    if spec.numa is Numa.REQUIRED:
        return 'numa="required" is not supported yet: only "any" and "preferred" are'
    if spec.ha:
        return 'ha="yes" is not supported yet: only ha="no" is'
    return None


_WEIGHTS = Weights()


def modes(spec: ClaimSpec) -> tuple[Mode, ...]:
    """What may serve the claim, in its own order."""
    return (spec.mode,) if spec.mode is not Mode.ANY else (spec.order or (Mode.PASSTHROUGH, Mode.VGPU))


def choose_card(
    claim: Claim, rows: Rows, taken: Taken, ratio: float, *, avoid: CardId | None = None, weights: Weights = _WEIGHTS
) -> Choice:
    """The best card that fits `claim`; `avoid` only where nothing else fits. A total order: ties go by card id.

    A claim of mode "any" gets the first of its modes for which a card fits.
    """
    choices = []
    for mode in modes(claim.spec):
        asked = replace(claim, spec=replace(claim.spec, mode=mode))
        choices.append(_choose(asked, rows, taken, ratio, avoid, weights))
        if choices[-1].card is not None:
            return choices[-1]
    if len(choices) == 1:
        return choices[0]
    named = zip(modes(claim.spec), choices, strict=True)
    refused = [(label, f"as {mode.value}: {why}") for mode, choice in named for label, why in choice.refused]
    return Choice(None, tuple(sorted(refused)))


def _choose(claim: Claim, rows: Rows, taken: Taken, ratio: float, avoid: CardId | None, weights: Weights) -> Choice:
    refused: list[tuple[str, str]] = []
    fitting: list[Card] = []
    for card in sorted(rows.cards.values(), key=lambda card: (card.label, card.id)):
        reason = first_failing(claim, card, rows, taken, ratio)
        if reason:
            refused.append((card.label, reason))
        else:
            fitting.append(card)
    scored = [(score(claim, card, taken, ratio, weights), card) for card in fitting]
    best = min(scored, key=lambda pair: (pair[1].id == avoid, -pair[0], pair[1].id), default=None)
    scores = tuple((card.label, points) for points, card in scored)
    return Choice(best[1] if best else None, tuple(refused), scores, claim.spec.mode)


def first_failing(claim: Claim, card: Card, rows: Rows, taken: Taken, ratio: float) -> str:
    """The first predicate that `card` does not meet for `claim`, as a clause; "" if it fits."""
    return (
        _host_refuses(card, rows.hosts)
        or ("its wish row cannot be read" if card.id in rows.unread.wishes else "")
        or _health_refuses(claim.spec, card)
        or _wish_refuses(card, rows)
        or _kind_refuses(claim.spec, card)
        or _passthrough_refuses(claim, card, taken.of(card.id))
        or _capacity_refuses(claim.spec, card, taken.of(card.id), ratio)
    )


def capacity_mib(card: Card, ratio: float) -> int:
    """What may be guaranteed of a card in all."""
    return int(card.memory_mib * ratio)


def score(claim: Claim, card: Card, taken: Taken, ratio: float, weights: Weights) -> float:
    """How well a fitting card suits; only comparisons mean anything."""
    total = max(1, capacity_mib(card, ratio))
    used = (taken.of(card.id).memory_mib + claim.spec.memory_mib) / total
    return (
        weights.pack * used
        + weights.local * (card.host == claim.host)
        + weights.steady / (1 + len(card.health.failures))
    )


def binding_spec_differs(binding: Binding, spec: ClaimSpec) -> bool:
    """Was the claim changed since this binding was made (a domain started anew with other metadata)?"""
    if binding.mode not in modes(spec):
        return True
    if binding.mode is Mode.PASSTHROUGH:
        return False  # a whole card, whatever the words
    return binding != replace(
        binding,
        memory_mib=spec.memory_mib,
        memory_limit_mib=spec.memory_limit_mib,
        compute_percent=spec.compute_percent,
        compute_limit_percent=spec.compute_limit_percent,
    )


def _host_refuses(card: Card, hosts: dict[HostName, Host]) -> str:
    host = hosts.get(card.host)
    if host is None or not host.up:
        return f"host {card.host} is not up"
    if card.health.boot_id != host.boot_id:
        return "unknown: not probed since its host started"
    return ""


def _health_refuses(spec: ClaimSpec, card: Card) -> str:
    verdict = card.health.verdict
    if verdict is Verdict.HEALTHY or (verdict is Verdict.PROBATION and spec.preemptible):
        return ""
    why = f": {card.health.reason}" if card.health.reason else ""
    tail = "; it takes only preemptible claims" if verdict is Verdict.PROBATION else ""
    return f"{verdict.value}{why}{tail}"


def _wish_refuses(card: Card, rows: Rows) -> str:
    wish = rows.wishes.get(card.id)
    if wish is None:
        return ""
    if wish.mode is not None and wish.mode is not card.mode:
        why = f": {card.switching.fault}" if card.switching.fault else ""
        return f"its mode is to be {wish.mode.value}{why}"
    if not (wish.cordoned or wish.drain):
        return ""
    word = "cordoned" if wish.cordoned else "being drained"
    by = f" by {wish.by}" if wish.by else ""
    return f"{word}{by}" + (f": {wish.reason}" if wish.reason else "")


def _kind_refuses(spec: ClaimSpec, card: Card) -> str:
    if card.mode is not spec.mode:
        return f"in mode {card.mode.value}, the claim asks for {spec.mode.value}"
    vendor = card.pci.ids[:4] or "10de"  # a card without ids was told by NVIDIA's driver
    name, asked = _VENDORS.get(vendor, vendor), spec.vendor.lower().removeprefix("0x")
    if asked and asked not in (vendor, name.lower()):
        return f"vendor {name}, the claim asks for {spec.vendor}"
    if spec.model and spec.model.lower() not in card.model.lower():
        return f"model {card.model}, the claim asks for {spec.model}"
    if card.memory_mib < spec.min_memory_mib:
        return f"{card.memory_mib} MiB in all, the claim asks for a card of {spec.min_memory_mib} MiB"
    return ""


def _passthrough_refuses(claim: Claim, card: Card, use: Use) -> str:
    """A whole card, on the domain's own host, already with the driver that hands it out."""
    if claim.spec.mode is not Mode.PASSTHROUGH:
        return ""
    if card.host != claim.host:
        return f"on host {card.host}, the domain is on {claim.host}: only a card of its own host can be passed through"
    if card.driver != VFIO:
        return f"still on driver {card.driver or 'none'}, not on {VFIO}"
    if use.bindings:
        return "passed through to another domain"
    return ""


def _capacity_refuses(spec: ClaimSpec, card: Card, use: Use, ratio: float) -> str:
    if use.modes - {spec.mode}:
        return "still held in the other mode"
    if spec.mode is Mode.PASSTHROUGH:
        return ""
    total = capacity_mib(card, ratio)
    if spec.memory_mib > total - use.memory_mib:
        return f"{max(0, total - use.memory_mib)} of {total} MiB free, the claim asks for {spec.memory_mib}"
    if spec.compute_percent > COMPUTE_PERCENT - use.compute_percent:
        free = max(0, COMPUTE_PERCENT - use.compute_percent)
        return f"{free} % of its compute free, the claim asks for {spec.compute_percent} %"
    return ""
