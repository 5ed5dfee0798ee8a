"""`kvmpool domain` on the real libvirtd: what it defines starts, is served and stops; what cannot be is told."""

from __future__ import annotations

import sys

import pytest
from lxml import etree

from kvmpool.lab.process import Done
from tests.e2e.pool import Pool, until

pytestmark = pytest.mark.e2e

DISK = "/var/lib/libvirt/images/vm0.img"
WORDS = ("--memory", "64MiB", "--disk", DISK, "--gpu", "memory=1GiB,compute=25")


def _kvmpool(pool: Pool, *words: str) -> Done:
    return pool.host.run(sys.executable, "-m", "kvmpool.cli.main", *words, timeout_s=60, check=False)


@pytest.fixture
def image(pool: Pool) -> None:
    disk = pool.host.outside(DISK)
    disk.parent.mkdir(parents=True, exist_ok=True)
    disk.touch()
    with disk.open("r+b") as file:
        file.truncate(1 << 20)


@pytest.mark.usefixtures("image")
def test_a_defined_domain_starts_served_at_the_port_of_its_card_and_stops(pool: Pool) -> None:
    done = _kvmpool(pool, "domain", "define", "vm0", *WORDS, "--start")
    assert done.returncode == 0, done.stderr
    assert "vm0 defined with gpu0\n" in done.stdout
    assert "vm0 started: vm0/gpu0#" in done.stdout
    assert pool.ready_binding()["memory_mib"] == 1024
    root = etree.fromstring(pool.host.virsh("dumpxml", "vm0").encode())
    [index] = [
        port.get("index")
        for port in root.iterfind("devices/controller")
        if port.find("alias[@name='ua-kvmpool-gpu0-port']") is not None
    ]
    assert index == "16"
    taken = {address.get("bus") for address in root.iterfind("devices/*/address[@type='pci']")}
    assert f"0x{int(index):02x}" not in taken, "the card's port is kept for the card"
    shown = _kvmpool(pool, "domain", "show", "vm0")
    assert "running" in shown.stdout
    assert "vm0/gpu0" in shown.stdout
    stubborn = _kvmpool(pool, "domain", "stop", "vm0", "--timeout", "1")  # SeaBIOS answers no ACPI button
    assert stubborn.returncode == 7
    assert "Next: kvmpool domain stop vm0 --force" in stubborn.stderr
    assert _kvmpool(pool, "domain", "stop", "vm0", "--force").stdout == "vm0 stopped\n"
    until(lambda: not pool.bindings(), 10.0, "the binding of a stopped domain is left")


@pytest.mark.usefixtures("image")
def test_what_is_only_printed_is_not_defined_and_can_be_defined_by_virsh(pool: Pool) -> None:
    printed = _kvmpool(pool, "domain", "define", "vm0", *WORDS, "--print-xml")
    assert printed.returncode == 0, printed.stderr
    assert "vm0" not in pool.host.virsh("list", "--all", "--name").split()
    file = pool.host.outside("/run/printed.xml")
    file.write_text(printed.stdout)
    pool.host.virsh("define", "--validate", "/run/printed.xml")
    file.unlink()
    again = _kvmpool(pool, "domain", "define", "vm0", *WORDS)
    assert (again.returncode, again.stdout) == (4, "")
    assert "domain vm0 exists" in again.stderr


def test_a_domain_that_cannot_be_is_refused_in_one_line_and_not_defined(pool: Pool) -> None:
    wrong = {
        ("--memory", "64MiB", "--disk", "/none.img"): "/none.img does not exist",
        ("--memory", "64MiB", "--gpu", "mode=vgpu"): "memory is missing",
        ("--memory", "64MiB", "--gpu", "memory=1GiB,colour=red"): 'attribute "colour" is unknown',
        ("--memory", "lots"): "Allowed: 64 MiB to 64 TiB",
    }
    for words, told in wrong.items():
        done = _kvmpool(pool, "domain", "define", "vm0", *words)
        assert (done.returncode, done.stdout) == (4, ""), done.stderr
        assert told in done.stderr
        assert done.stderr.count("\n") == 1
    assert "vm0" not in pool.host.virsh("list", "--all", "--name").split()
    gone = _kvmpool(pool, "domain", "start", "vm7")
    assert gone.returncode == 3
    assert "no domain 'vm7'" in gone.stderr


@pytest.mark.usefixtures("image")
def test_a_start_that_no_card_can_serve_says_what_virsh_would(pool: Pool) -> None:
    words = ("--memory", "64MiB", "--disk", DISK, "--gpu", "memory=999GiB")
    assert _kvmpool(pool, "domain", "define", "vm0", *words).returncode == 0
    refused = _kvmpool(pool, "domain", "start", "vm0")
    assert refused.returncode == 4
    assert "no card" in refused.stderr
    assert "Next: kvmpool explain vm0/gpu0" in refused.stderr


def test_the_snippet_of_a_claim_is_printed_for_other_tools(pool: Pool) -> None:
    done = _kvmpool(pool, "claim", "xml", "--memory", "4GiB", "--set", "priority=70")
    assert done.returncode == 0, done.stderr
    assert etree.fromstring(done.stdout).tag == "metadata"
    assert 'priority="70"' in done.stdout
    assert _kvmpool(pool, "claim", "xml").returncode == 4
