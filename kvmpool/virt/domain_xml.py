"""Reads a domain's claims out of its XML, and writes the XML that puts them there.

The XML may come from anybody who can define a domain: no entities, no document type, no network, limited size and
depth. Our element is found by namespace and local name: libvirt hands it out with and without its prefix.
This module does not know libvirt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from lxml import etree

from kvmpool.core.model import ClaimSpec, DomainUuid
from kvmpool.errors import ClaimInvalid, NotFound
from kvmpool.virt.claim_attributes import refusal, shown, spec_of
from kvmpool.virt.shared_memory import put_shared, shared_mib_in

NAMESPACE = "urn:kvmpool:domain:1"
PREFIX = "kvmpool"
MAX_XML_BYTES = 10 << 20  # libvirt's own limit of one message is larger; its domains are of some 10 KiB
MAX_CLAIMS = 16
FW_CFG = "opt/org.kvmpool"  # where the guest finds its files: /sys/firmware/qemu_fw_cfg/by_name/opt/org.kvmpool/*/raw

_OURS = "urn:kvmpool:"
_CLAIMS = f"{{{NAMESPACE}}}claims"
_CLAIM = f"{{{NAMESPACE}}}claim"


@dataclass(frozen=True, slots=True)
class DomainClaims:
    """What a domain's XML says of it and asks for. `claims` is empty for a domain that is not ours."""

    uuid: DomainUuid
    name: str
    claims: tuple[ClaimSpec, ...]
    shared_mib: int = 0  # of its device of shared memory


def claims_of(xml: str) -> DomainClaims:
    """Uuid, name and claims of a domain. Raises ClaimInvalid with one line for virsh's user."""
    root = parse(xml)
    uuid, name = identity_of(root)
    claims = claims_in(root, name)
    return DomainClaims(uuid, name, claims, shared_mib_in(root, uuid, name) if claims else 0)


def parse(xml: str) -> etree._Element:
    """The `<domain>` element. Raises ClaimInvalid for what is not a plain domain XML."""
    raw = xml.encode("utf-8", "surrogatepass")
    if len(raw) > MAX_XML_BYTES:
        raise ClaimInvalid(f"the domain's XML has {len(raw)} bytes. Allowed: at most {MAX_XML_BYTES}")
    if "<!DOCTYPE" in xml or "<!ENTITY" in xml:
        raise ClaimInvalid("the domain's XML has a document type. Allowed: none. Next: take <!DOCTYPE ...> out")
    try:
        root = etree.fromstring(raw, _parser())
    except etree.XMLSyntaxError as error:
        reason = " ".join((error.msg or "nothing in it").split())[:160]
        raise ClaimInvalid(f"the domain's XML cannot be read: {reason}. Next: virsh dumpxml DOMAIN") from error
    if root.getroottree().docinfo.doctype:
        raise ClaimInvalid("the domain's XML has a document type. Allowed: none. Next: take it out")
    if root.tag != "domain":
        raise ClaimInvalid(f"the XML is that of a {shown(str(root.tag))}, not of a domain. Next: virsh dumpxml DOMAIN")
    return root


def _parser() -> etree.XMLParser:
    """A new one each time: parsers are not for two threads. The encoding is ours, whatever the XML says of itself."""
    return etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
    )


def identity_of(root: etree._Element) -> tuple[DomainUuid, str]:
    name = root.findtext("name") or ""
    if not name or not name.isprintable():
        raise ClaimInvalid(f"the domain's XML has no usable <name>: {shown(name)}. Next: virsh dumpxml DOMAIN")
    text = (root.findtext("uuid") or "").strip()
    if not re.fullmatch("[0-9a-fA-F-]{32,36}", text):
        raise refusal(name, f"<uuid> is {shown(text)}. Allowed: 8-4-4-4-12 hexadecimal digits")
    try:
        return DomainUuid(str(UUID(text))), name
    except ValueError as error:
        raise refusal(name, f"<uuid> is {shown(text)}. Allowed: 8-4-4-4-12 hexadecimal digits") from error


def cid_of(xml: str) -> int:
    """The vsock CID of a running domain; 0 where it has none, or none that a guest can have (vsock(7): 0 to 2)."""
    element = parse(xml).find("devices/vsock/cid")
    text = "" if element is None else element.get("address") or ""
    cid = int(text) if re.fullmatch("[0-9]{1,10}", text) else 0
    return cid if 2 < cid < 0xFFFFFFFF else 0


def claims_in(root: etree._Element, domain: str) -> tuple[ClaimSpec, ...]:
    """The claims in a parsed domain. Raises ClaimInvalid."""
    found = [element for element in root.iterfind("metadata/*") if _is_ours(element)]
    for element in found:
        if element.tag != _CLAIMS:
            raise refusal(domain, f"metadata element {shown(str(element.tag))} is unknown. Allowed: {_CLAIMS}")
    if len(found) > 1:
        raise refusal(domain, f"metadata has {len(found)} elements {_CLAIMS}. Allowed: one")
    return _claims(found[0], domain) if found else ()


def _is_ours(element: etree._Element) -> bool:
    return str(element.tag).startswith(f"{{{_OURS}")


def _claims(element: etree._Element, domain: str) -> tuple[ClaimSpec, ...]:
    if element.attrib:
        name = str(next(iter(element.attrib)))
        raise refusal(domain, f"<claims>: attribute {shown(name)} is unknown. Allowed: none")
    if len(element) > MAX_CLAIMS:
        raise refusal(domain, f"{len(element)} claims. Allowed: at most {MAX_CLAIMS}")
    _refuse_text(element, domain)
    specs: list[ClaimSpec] = []
    for child in element:
        if child.tag != _CLAIM:
            raise refusal(domain, f"element {shown(str(child.tag))} in <claims>. Allowed: {_CLAIM}")
        _refuse_text(child, domain)
        if len(child):
            raise refusal(domain, f"<claim> has an element {shown(str(child[0].tag))} in it. Allowed: none")
        spec = spec_of(domain, {str(name): str(value) for name, value in child.attrib.items()})
        if spec.name in (other.name for other in specs):
            raise refusal(domain, f"claim {spec.name}: name={shown(spec.name)} twice. Allowed: each name once")
        specs.append(spec)
    return tuple(specs)


def _refuse_text(element: etree._Element, domain: str) -> None:
    for text in (element.text, *(child.tail for child in element)):
        if text and text.strip(" \t\r\n"):
            raise refusal(domain, f"text {shown(text.strip())} in the claims. Allowed: elements only")


# --- writing ----------------------------------------------------------------------------------------------------------


def with_claim(xml: str, attributes: Mapping[str, str]) -> str:
    """The claims element of the domain `xml` with one claim more, as setMetadata takes it (no namespace, no prefix).

    Raises ClaimInvalid where the claim is not valid or its name is taken, or the claims that are there are not valid.
    """
    root = parse(xml)
    _, domain = identity_of(root)
    before = _attributes(root)
    wanted = dict(attributes)
    if any(each.get("name") == wanted.get("name", "") for each in before):
        raise refusal(domain, f"claim {wanted['name']} exists. Allowed: another name, or remove it first")
    if len(before) >= MAX_CLAIMS:
        raise refusal(domain, f"it has {len(before)} claims. Allowed: at most {MAX_CLAIMS}")
    claims_in(root, domain)
    spec_of(domain, wanted)
    return _claims_xml([*before, wanted])


def without_claim(xml: str, name: str) -> str | None:
    """The claims element without the claim `name`; None when no claim is left. Raises NotFound."""
    root = parse(xml)
    _, domain = identity_of(root)
    before = _attributes(root)
    after = [each for each in before if each.get("name") != name]
    if len(after) == len(before):
        known = ", ".join(each.get("name", "?") for each in before) or "none"
        raise NotFound(f"domain {domain} has no claim {shown(name)}; it has: {known}. Next: kvmpool claim list")
    return _claims_xml(after) if after else None


def _attributes(root: etree._Element) -> list[dict[str, str]]:
    claims = root.iterfind(f"metadata/{_CLAIMS}/{_CLAIM}")
    return [{str(name): str(value) for name, value in claim.attrib.items()} for claim in claims]


def _claims_xml(claims: list[dict[str, str]]) -> str:
    element = etree.Element("claims")
    for attributes in claims:
        etree.SubElement(element, "claim", attributes)
    return etree.tostring(element, encoding="unicode")


def namespaced(claims: str) -> etree._Element:
    """A claims element as libvirt stores it: in our namespace."""
    plain = etree.fromstring(claims, _parser())
    element = etree.Element(_CLAIMS, nsmap={PREFIX: NAMESPACE})
    for claim in plain:
        etree.SubElement(element, _CLAIM, {str(name): str(value) for name, value in claim.attrib.items()})
    return element


def with_metadata(xml: str, claims: str | None) -> str:
    """The domain with this claims element (None: with none) instead of the one it had; others' metadata stays."""
    root = parse(xml)
    metadata = root.find("metadata")
    if metadata is None:
        metadata = etree.Element("metadata")
        root.insert(0, metadata)
    for element in [each for each in metadata if each.tag == _CLAIMS]:
        metadata.remove(element)
    if claims is not None:
        metadata.append(namespaced(claims))
    if not len(metadata):
        root.remove(metadata)
    return etree.tostring(root, encoding="unicode")


def fw_cfg_entries(folder: str) -> dict[str, str]:
    """fw_cfg name -> file for a guest that is told its endpoint and token by the firmware device (design 08)."""
    return {f"{FW_CFG}/{name}": f"{folder}/{name}" for name in ("endpoint", "token")}


def with_fw_cfg(xml: str, entries: Mapping[str, str]) -> str | None:
    """The domain with exactly these of our fw_cfg entries; None where it has them already. Others' entries stay."""
    root = parse(xml)
    ours = {
        entry.get("name", ""): entry.get("file", "")
        for entry in root.iterfind("sysinfo[@type='fwcfg']/entry")
        if entry.get("name", "").startswith(f"{FW_CFG}/")
    }
    if ours == dict(entries):
        return None
    sysinfo = root.find("sysinfo[@type='fwcfg']")
    if sysinfo is None:
        sysinfo = etree.Element("sysinfo", type="fwcfg")
        os_element = root.find("os")
        root.insert(len(root) if os_element is None else root.index(os_element) + 1, sysinfo)
    for parent in root.iterfind("sysinfo[@type='fwcfg']"):
        for entry in [each for each in parent if (each.get("name") or "").startswith(f"{FW_CFG}/")]:
            parent.remove(entry)
    for name, file in entries.items():
        etree.SubElement(sysinfo, "entry", name=name, file=file)
    if not len(sysinfo):
        root.remove(sysinfo)
    return etree.tostring(root, encoding="unicode")


def with_shared(xml: str, mib: int) -> str | None:
    """The domain with a device of shared memory of that size (0: with none); None where it is so already."""
    root = parse(xml)
    uuid, _ = identity_of(root)
    return etree.tostring(root, encoding="unicode") if put_shared(root, uuid, mib) else None
