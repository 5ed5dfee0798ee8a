"""Keeps each domain's definition as it was before kvmpool first edited it, and puts it back for who leaves the pool.

One file a domain, UUID.xml, readable by root alone (a definition holds passwords), on disk before the edit. A domain
that others have edited meanwhile keeps their edits: then only what is kvmpool's is taken out of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import libvirt
from lxml import etree

from kvmpool.errors import Refused, Unreachable
from kvmpool.virt.domain_xml import parse, with_fw_cfg, with_metadata, with_shared

_DEFINITION = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE


class Originals:
    """One folder of the state directory. Raises Unreachable where it cannot be written or read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, uuid: str, xml: str) -> None:
        """The first word holds: a later one is an edit of ours. On disk when it returns."""
        path = self.folder / f"{uuid}.xml"
        if path.exists():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished = self.folder / f".{uuid}.new"
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(xml)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror}; the domain was not edited") from error

    def names(self) -> tuple[str, ...]:
        """The uuids, sorted."""
        try:
            return tuple(sorted(path.stem for path in self.folder.glob("*.xml")))
        except OSError as error:
            raise Unreachable(f"{self.folder}: {error.strerror}") from error

    def read(self, uuid: str) -> str:
        try:
            return (self.folder / f"{uuid}.xml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Unreachable(f"{self.folder / uuid}.xml cannot be read. Next: look at it, then remove it") from error

    def forget(self, uuid: str) -> None:
        (self.folder / f"{uuid}.xml").unlink(missing_ok=True)


def give_back(uri: str, originals: Originals) -> tuple[str, ...]:
    """Every kept definition put back, a line each; a domain that runs has it from its next start on.

    Raises Unreachable without libvirt, Refused where it does not take a definition: those before are put back.
    """
    kept = originals.names()
    if not kept:
        return ()
    try:
        connection = libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise Unreachable(f"{uri}: {error.get_error_message()}. Next: systemctl start libvirtd") from error
    try:
        return tuple(_put_back(connection, originals, uuid) for uuid in kept)
    finally:
        connection.close()


def _put_back(connection: libvirt.virConnect, originals: Originals, uuid: str) -> str:
    try:
        domain = connection.lookupByUUIDString(uuid)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
            raise Unreachable(f"domain {uuid}: {error.get_error_message()}") from error
        originals.forget(uuid)
        return f"domain {uuid} is not there any more"
    name, before, now = domain.name(), originals.read(uuid), domain.XMLDesc(_DEFINITION)
    edited = _bare(now) != _bare(before)
    try:
        if now != before:
            connection.defineXML(_without_ours(now) if edited else before)
    except libvirt.libvirtError as error:
        raise Refused(f"domain {name}: {error.get_error_message()}. Next: virsh edit {name}") from error
    originals.forget(uuid)
    if edited:
        return f"domain {name} was edited by others too: only what is kvmpool's was taken out"
    return f"domain {name} is defined as before kvmpool"


def _without_ours(xml: str) -> str:
    without = with_fw_cfg(xml, {}) or xml
    without = with_shared(without, 0) or without
    return with_metadata(without, None)


def _bare(xml: str) -> bytes:
    """A definition without what is ours and without what means nothing: to compare with another."""
    root = parse(_without_ours(xml))
    for element in root.iter():
        if not (element.text or "").strip():
            element.text = None
        element.tail = None
    return etree.tostring(root, method="c14n")
