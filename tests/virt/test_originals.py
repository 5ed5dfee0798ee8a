"""A domain's definition comes back byte for byte, and edits of others are kept (libvirt's own test driver)."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from kvmpool.errors import Unreachable
from kvmpool.virt import edit
from kvmpool.virt.originals import Originals, give_back
from tests.virt.test_connection import definition

URI = "test:///default"  # one for the whole process
CLAIM = {"name": "gpu0", "mode": "vgpu", "memory": "4GiB"}
FLAGS = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE


@pytest.fixture
def connection() -> Iterator[libvirt.virConnect]:
    opened = libvirt.open(URI)
    yield opened
    for domain in opened.listAllDomains():
        if domain.name() == "kept":
            domain.undefine()
    opened.close()


def test_a_definition_comes_back_byte_for_byte(connection: libvirt.virConnect, tmp_path: Path) -> None:
    originals = Originals(tmp_path / "domains")
    domain = connection.defineXML(definition("kept"))
    before = domain.XMLDesc(FLAGS)
    edit.add_claim(connection, "kept", CLAIM, "/run/guests", originals.keep)
    edit.add_claim(connection, "kept", CLAIM | {"name": "gpu1"}, "/run/guests", originals.keep)  # not the first edit
    assert connection.lookupByName("kept").XMLDesc(FLAGS) != before
    (file,) = originals.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "it may hold passwords"
    assert give_back(URI, originals) == ("domain kept is defined as before kvmpool",)
    assert connection.lookupByName("kept").XMLDesc(FLAGS) == before
    assert give_back(URI, originals) == ()


def test_what_others_edited_meanwhile_is_kept(connection: libvirt.virConnect, tmp_path: Path) -> None:
    originals = Originals(tmp_path / "domains")
    connection.defineXML(definition("kept"))
    edit.add_claim(connection, "kept", CLAIM, "/run/guests", originals.keep)
    text = connection.lookupByName("kept").XMLDesc(FLAGS)
    connection.defineXML(text.replace("<os>", "<title>ours</title><os>", 1))
    assert give_back(URI, originals) == (
        "domain kept was edited by others too: only what is kvmpool's was taken out",
    )  # fmt: skip
    after = connection.lookupByName("kept").XMLDesc(FLAGS)
    assert "<title>ours</title>" in after
    assert "kvmpool" not in after


def test_a_domain_that_is_gone_is_forgotten_and_no_libvirt_is_said(tmp_path: Path) -> None:
    originals = Originals(tmp_path / "domains")
    originals.keep("9f1c2d3e-0000-4000-8000-00000000dead", "<domain/>")
    with pytest.raises(Unreachable):
        give_back("test:///no/such/file", originals)
    assert give_back(URI, originals) == ("domain 9f1c2d3e-0000-4000-8000-00000000dead is not there any more",)
    assert originals.names() == ()
