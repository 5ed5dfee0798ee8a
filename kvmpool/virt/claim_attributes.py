"""Reads the attributes of one `<claim>` (design 04 §4.2) into a ClaimSpec that cannot be wrong.

One table says what each attribute may hold, in a pattern for us and in words for people; xml/claim.rng says the same
for editors and is held to it by a test. What two attributes say together is checked here only.
This module does not know where the attributes come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvmpool.core.model import ClaimSpec, Hold, Mode, Numa, OnFailure, OnUnplug, Plug
from kvmpool.errors import ClaimInvalid

_MIB_OF = {"MiB": 1, "GiB": 1024}
_SHOWN_CHARS = 60  # of a wrong value


@dataclass(frozen=True, slots=True)
class Attribute:
    """What an attribute may hold: `form` must match the whole value; `allowed` tells a person."""

    form: re.Pattern[str]
    allowed: str


def _words(*words: str) -> Attribute:
    return Attribute(re.compile("|".join(words)), ", ".join(words))


_YES_NO = _words("yes", "no")
# At most 7 digits of MiB (9.5 TiB): more is a slip, and the schema can say the same.
_MEMORY = Attribute(
    re.compile(r"[1-9][0-9]{0,6}( ?MiB)?|[1-9][0-9]{0,9} ?KiB|[1-9][0-9]{0,3} ?GiB"),
    "1 to 9999999 MiB, or a number with the unit KiB, MiB or GiB (up to 9999 GiB)",
)

ATTRIBUTES: dict[str, Attribute] = {
    "name": Attribute(re.compile("[a-z][a-z0-9]{0,15}"), "a lower-case letter, then up to 15 of a-z and 0-9"),
    "mode": _words("vgpu", "passthrough", "any"),
    "order": Attribute(
        re.compile("vgpu|passthrough|vgpu passthrough|passthrough vgpu"),
        'a list of vgpu and passthrough, each once, for example "passthrough vgpu"',
    ),
    "count": Attribute(re.compile("[1-9]|1[0-6]"), "1 to 16"),
    "memory": _MEMORY,
    "memory_limit": _MEMORY,
    "compute": Attribute(re.compile("0|[1-9][0-9]?|100"), "0 to 100 percent (0: best effort)"),
    "compute_limit": Attribute(re.compile("[1-9][0-9]?|100"), "1 to 100 percent"),
    "model": Attribute(re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:()/+-]{0,63}"), "part of a card's model name, up to 64"),
    "vendor": Attribute(re.compile(r"[A-Za-z0-9]{1,32}"), "a vendor's name or PCI id, for example nvidia or 10de"),
    "min_memory": _MEMORY,
    "numa": _words("any", "preferred", "required"),
    "tenant": Attribute(re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"), "letters, digits, '_', '.', '-', up to 63"),
    "priority": Attribute(re.compile("0|[1-9][0-9]?|100"), "0 to 100"),
    "preemptible": _YES_NO,
    "hold": _words("domain", "process"),
    "plug": _words("live", "boot"),
    "on_unplug": _words("hot-only", "reset", "cold"),
    "on_failure": _words("rebind", "replay", "none"),
    "ha": _YES_NO,
    "required": _YES_NO,
}


def spec_of(domain: str, given: Mapping[str, str]) -> ClaimSpec:
    """The claim that these attributes ask `domain` for.

    Raises ClaimInvalid with one line that names the domain, the claim, the attribute and its allowed values.
    """
    claim = _claim_words(given)
    for name, value in given.items():
        attribute = ATTRIBUTES.get(name)
        if attribute is None:
            known = ", ".join(ATTRIBUTES)
            raise refusal(domain, f"{claim}: attribute {shown(name)} is unknown. Allowed: {known}")
        if not attribute.form.fullmatch(value):
            raise refusal(domain, f"{claim}: {name}={shown(value)} is not allowed. Allowed: {attribute.allowed}")
    for name in ("name", "mode"):
        if name not in given:
            raise refusal(domain, f"{claim}: {name} is missing. Allowed: {ATTRIBUTES[name].allowed}")
    fault = _together(given)
    if fault:
        raise refusal(domain, f"{claim}: {fault}")
    return _spec(given)


def refusal(domain: str, sentence: str) -> ClaimInvalid:
    known = domain and domain.isprintable()
    return ClaimInvalid(f"domain {domain or '?'}: {sentence}. Next: virsh edit {domain if known else 'DOMAIN'}")


def shown(value: str) -> str:
    """A foreign text, quoted, on one line, of limited length."""
    short = value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "..."
    return '"' + short.encode("unicode_escape").decode("ascii") + '"'


def _claim_words(given: Mapping[str, str]) -> str:
    name = given.get("name", "")
    return f"claim {name}" if ATTRIBUTES["name"].form.fullmatch(name) else "a claim"


def _together(given: Mapping[str, str]) -> str:
    """What is wrong with attributes that are right one by one; "" if nothing is."""
    mode = given["mode"]
    if "order" in given and mode != "any":
        return f'order is for mode="any" only, here mode="{mode}". Allowed: leave it out'
    if mode == "vgpu" and "memory" not in given:
        return f'memory is missing, mode="vgpu" needs it. Allowed: {_MEMORY.allowed}'
    only_vgpu = [name for name in ("memory", "memory_limit", "compute", "compute_limit") if name in given]
    if mode == "passthrough" and only_vgpu:
        return f'{only_vgpu[0]} is not for mode="passthrough", which hands out whole cards. Allowed: min_memory'
    if "memory_limit" in given and "memory" not in given:
        return f"memory is missing, memory_limit needs it. Allowed: {_MEMORY.allowed}"
    if "memory_limit" in given and mib_of(given["memory_limit"]) < mib_of(given["memory"]):
        return f"memory_limit={shown(given['memory_limit'])} is less than memory. Allowed: {given['memory']} or more"
    if int(given.get("compute_limit", "100")) < int(given.get("compute", "0")):
        return f"compute_limit={shown(given['compute_limit'])} is less than compute. Allowed: {given['compute']} to 100"
    return ""


def mib_of(text: str) -> int:
    """Of a value that matches the form; KiB are rounded up."""
    number = int(re.match("[0-9]+", text)[0])  # type: ignore[index]
    unit = text.lstrip("0123456789").strip() or "MiB"
    return (number + 1023) // 1024 if unit == "KiB" else number * _MIB_OF[unit]


def _spec(given: Mapping[str, str]) -> ClaimSpec:
    mode = Mode(given["mode"])
    memory_mib = mib_of(given["memory"]) if "memory" in given else 0
    order = tuple(Mode(word) for word in given.get("order", "").split())
    if mode is Mode.ANY and not order:
        order = (Mode.PASSTHROUGH, Mode.VGPU)
    return ClaimSpec(
        name=given["name"],
        mode=mode,
        memory_mib=memory_mib,
        memory_limit_mib=mib_of(given["memory_limit"]) if "memory_limit" in given else memory_mib,
        compute_percent=int(given.get("compute", "0")),
        compute_limit_percent=int(given.get("compute_limit", "100")),
        count=int(given.get("count", "1")),
        order=order,
        model=given.get("model", ""),
        vendor=given.get("vendor", ""),
        min_memory_mib=mib_of(given["min_memory"]) if "min_memory" in given else 0,
        numa=Numa(given.get("numa", "preferred")),
        tenant=given.get("tenant", "default"),
        priority=int(given.get("priority", "50")),
        preemptible=given.get("preemptible") == "yes",
        hold=Hold(given.get("hold", "domain")),
        plug=Plug(given.get("plug", "live")),
        on_unplug=OnUnplug(given.get("on_unplug", "hot-only")),
        on_failure=OnFailure(given.get("on_failure", "rebind")),
        ha=given.get("ha") == "yes",
        required=given.get("required", "yes") == "yes",
    )
