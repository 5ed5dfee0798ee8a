"""Decides how a domain's passthrough cards are plugged: its claims and bindings, its devices, in; steps out. Pure.

    READY, its card not in the domain         attach it; after several failures report the binding broken
    likewise, and plug="boot"                 it waits for the domain's next start; with on_unplug="cold" that is now
    READY, its card in the domain             the claim row says that it is served
    another card in the claim's place         ask the guest to give it back; the new one follows once it is gone
    the guest does not give it back           after `unplug_limit` tries what the claim's on_unplug says
    QEMU has stopped the guest for its error  reset the domain, whatever on_unplug says: nothing else lets it go on, and
                                              only a guest that runs gives a card back (design 05 §5.1)
    RELEASING or LOST, card in no domain      forget the row: this list of domains is the proof that the card is free
    domain without rows                       its devices are left alone: it was started by somebody else, or the store
                                              was lost, and a running guest keeps what it has

A list of domains that was asked for before the last plug ended says nothing of that domain (`fresh` False).
The binding of a passthrough card names it in `worker`: "vfio:0000:41:00.0" (address_of).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvmpool.core.model import (
    AttachDevice,
    Binding,
    Claim,
    ClaimKey,
    DetachDevice,
    DomainSeen,
    ForceUnplug,
    Forget,
    Generation,
    HostdevSeen,
    Mode,
    OnUnplug,
    Phase,
    Plug,
    PlugStep,
    RecordPointed,
    ReportBroken,
)

ALIAS = "ua-kvmpool-"  # libvirt keeps an alias of a user that begins with "ua-" as it is
ATTACH_LIMIT = 3
UNPLUG_LIMIT = 8  # x 20 s a try unless configured: a guest that boots needs a minute or two until it answers
_VFIO = "vfio:"


def alias_of(claim: str) -> str:
    """The alias of a claim's card in its domain; the same for every card that serves it."""
    return f"{ALIAS}{claim}"


def worker_of(address: str) -> str:
    """What a passthrough binding that is ready has for a worker."""
    return f"{_VFIO}{address}"


def address_of(binding: Binding) -> str:
    """The host address of a passthrough binding's card; "" while it was never ready."""
    return binding.worker.removeprefix(_VFIO) if binding.worker.startswith(_VFIO) else ""


@dataclass(frozen=True, slots=True)
class PlugView:
    """One domain's share of a look. `bindings`: its passthrough bindings in every phase."""

    claims: tuple[Claim, ...]
    bindings: tuple[Binding, ...]
    seen: DomainSeen | None  # None: not in the list
    fresh: bool
    failures: Mapping[tuple[ClaimKey, Generation], tuple[int, str]] = field(
        default_factory=dict
    )  # attaches that failed
    tries: Mapping[ClaimKey, int] = field(default_factory=dict)  # unplugs in a row that the guest did not answer
    unplug_limit: int = UNPLUG_LIMIT


def plug_steps(view: PlugView) -> Iterator[PlugStep]:
    """The steps of one domain; every prefix is safe."""
    if not view.fresh:
        return
    running = view.seen is not None and view.seen.running
    devices = view.seen.hostdevs if view.seen is not None and running else ()
    if running:
        for claim in sorted(view.claims, key=lambda claim: claim.key):
            if claim.spec.mode is not Mode.VGPU:
                mine = [binding for binding in view.bindings if binding.claim == claim.key]
                yield from _claim(view, claim, mine, devices)
    held = {device.address for device in devices}
    for binding in sorted(view.bindings, key=lambda binding: (binding.claim, binding.generation)):
        if binding.phase in (Phase.RELEASING, Phase.LOST) and address_of(binding) not in held:
            why = "its card is in no domain"
            yield Forget(binding, f"{why} ({binding.reason})" if binding.reason else why)


def _claim(view: PlugView, claim: Claim, mine: list[Binding], devices: tuple[HostdevSeen, ...]) -> Iterator[PlugStep]:
    alias = alias_of(claim.key.name)
    ready = _newest(binding for binding in mine if binding.phase is Phase.READY)
    device = next((device for device in devices if device.alias == alias), None)
    serves = ready is not None and device is not None and device.address == address_of(ready)
    pointed = ready.generation if serves and ready is not None else None
    if claim.pointed != pointed and (pointed is not None or _was_passthrough(claim, mine)):
        yield RecordPointed(claim.key, pointed, claim.endpoint)
    if device is None and ready is not None:
        yield from (_attach(view, ready) if claim.spec.plug is Plug.LIVE else _await_start(claim, ready))
    elif device is not None and not serves and not _may_stay(device, mine):
        yield _detach(view, claim, device, ready)


def _attach(view: PlugView, ready: Binding) -> Iterator[PlugStep]:
    times, reason = view.failures.get((ready.claim, ready.generation), (0, ""))
    if times >= ATTACH_LIMIT:
        yield ReportBroken(ready, f"its card could not be attached ({times} tries): {reason}")
    else:
        yield AttachDevice(ready.claim.domain, ready, address_of(ready))


def _await_start(claim: Claim, ready: Binding) -> Iterator[PlugStep]:
    """Nobody is powered off for a card that an optional claim has got meanwhile: only for the one it had."""
    if claim.spec.on_unplug is OnUnplug.COLD and claim.served is not None:
        why = f'{ready.label} can have its card only from its start on: on_unplug="cold"'
        yield ForceUnplug(claim.key.domain, claim.domain_name, alias_of(claim.key.name), OnUnplug.COLD, why)


def _detach(view: PlugView, claim: Claim, device: HostdevSeen, ready: Binding | None) -> PlugStep:
    reason = f"{ready.label} is to take its place" if ready is not None else "no binding of its claim is ready"
    how = claim.spec.on_unplug
    if how is OnUnplug.COLD and claim.spec.plug is Plug.BOOT and ready is not None:
        told = f'{device.address} has to leave and {ready.label} to be there at its start: on_unplug="cold"'
        return ForceUnplug(claim.key.domain, claim.domain_name, device.alias, how, told)
    if view.seen is not None and view.seen.halted:
        halted = f"QEMU has stopped the domain for an error of {device.address}: only a reset lets it go on"
        return ForceUnplug(claim.key.domain, claim.domain_name, device.alias, OnUnplug.RESET, halted)
    if view.tries.get(claim.key, 0) >= view.unplug_limit and how is not OnUnplug.HOT_ONLY:
        tried = f'the guest did not give {device.address} back in {view.unplug_limit} tries: on_unplug="{how.value}"'
        return ForceUnplug(claim.key.domain, claim.domain_name, device.alias, how, tried)
    return DetachDevice(claim.key.domain, claim.domain_name, device.alias, device.address, reason)


def _may_stay(device: HostdevSeen, mine: list[Binding]) -> bool:
    """A binding of it is on its way to be ready, and none that had it is to be released."""
    leaving = any(b.phase in (Phase.RELEASING, Phase.LOST) and address_of(b) == device.address for b in mine)
    return not leaving and any(binding.phase in (Phase.PREPARING, Phase.BROKEN) for binding in mine)


def _was_passthrough(claim: Claim, mine: list[Binding]) -> bool:
    """The generation that the claim row calls served is a card's, not a relay's: the relay's are not ours to unsay."""
    return any(binding.generation == claim.pointed for binding in mine)


def _newest(bindings: Iterable[Binding]) -> Binding | None:
    return max(bindings, key=lambda binding: binding.generation, default=None)
