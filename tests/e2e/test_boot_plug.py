"""plug="boot" on a real libvirtd and kvmpoold: a card in the domain before its guest runs, never in its definition."""

from __future__ import annotations

import sys

import pytest
from lxml import etree

from kvmpool.lab import guests
from kvmpool.lab.process import Done
from kvmpool.virt.device_xml import hostdevs_of, kept_bus
from tests.e2e.hostdev import ALIAS, FILES, KEPT, A, B, Bench, guest, passthrough
from tests.e2e.pool import until

pytestmark = pytest.mark.e2e

VM = guest("vm0", 1, passthrough(plug="boot"))


def kvmpool(bench: Bench, *words: str) -> Done:
    return bench.host.run(sys.executable, "-m", "kvmpool.cli.main", *words, check=False)


def refusal(done: Done) -> str:
    assert done.returncode != 0, done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "kvmpool:" in line]
    return line


def address(bench: Bench) -> str:
    (device,) = hostdevs_of(bench.dumped("vm0"))
    assert device.alias == ALIAS
    return device.address


def test_the_guest_finds_its_card_when_it_boots_and_the_definition_stays_as_it_is(bench: Bench) -> None:
    bench.define(VM)
    before = bench.dumped("vm0", "--inactive")
    done = kvmpool(bench, "domain", "start", "vm0")
    assert done.returncode == 0, done.stderr
    card = address(bench)
    assert done.stdout.startswith("vm0 started: vm0/gpu0#")
    assert card in done.stdout
    bench.lab.wait_for_guest(bench.host, VM)
    said = bench.said(VM)
    assert f"CARD {KEPT} 1234:11e8" in said.partition("READY")[0]
    assert "PLUGGED" not in said
    assert bench.dumped("vm0", "--inactive") == before
    assert bench.ready_binding()["worker"] == f"vfio:{card}"
    bench.host.virsh("destroy", "vm0")
    assert bench.dumped("vm0") == before
    until(lambda: not bench.bindings(), 15, "its binding is left")


def test_virsh_start_is_refused_with_the_command_that_does_it(bench: Bench) -> None:
    stderr, _ = bench.refusal(VM)
    (line,) = [line for line in stderr.splitlines() if "kvmpool:" in line]
    assert line.endswith("Next: kvmpool domain start vm0")
    assert not bench.bindings()


def test_a_definition_that_holds_a_card_of_ours_is_refused_whoever_starts_it(bench: Bench) -> None:
    for claim in (passthrough(plug="boot"), passthrough()):
        vm = guest("vm0", 1, claim)
        bench.define(vm)
        xml = bench.dumped("vm0", "--inactive")
        device = guests.hostdev_xml(A, 7).replace("<rom bar='off'/>", f"<alias name='{ALIAS}'/>")
        bench.host.outside(f"{FILES}/stale.xml").write_text(xml.replace("</devices>", f"{device}</devices>"))
        bench.host.virsh("define", f"{FILES}/stale.xml")
        for done in (bench.host.run("virsh", "start", "vm0", check=False), kvmpool(bench, "domain", "start", "vm0")):
            assert "Next: " in refusal(done)
        assert bench.host.virsh("domstate", "vm0").strip() == "shut off"
        until(lambda: not bench.bindings(), 15, "its binding is left")


def test_a_domain_of_domain_define_has_its_card_on_the_root_port_that_is_kept_for_it(bench: Bench) -> None:
    done = kvmpool(bench, "domain", "define", "vm0", "--memory", "64", "--gpu", "mode=passthrough,plug=boot")
    assert done.returncode == 0, done.stderr
    root = etree.fromstring(bench.dumped("vm0", "--inactive"))
    root.set("type", "qemu")  # this machine may have a /dev/kvm that is of no use
    for path in ("cpu", "devices/vsock"):
        for element in root.findall(path):
            element.getparent().remove(element)  # type: ignore[union-attr]
    bench.host.outside(f"{FILES}/vm0.xml").write_text(etree.tostring(root, encoding="unicode"))
    bench.host.virsh("define", "--validate", f"{FILES}/vm0.xml")
    assert kvmpool(bench, "domain", "start", "vm0").returncode == 0
    card = address(bench)
    xml = bench.dumped("vm0")
    (device,) = etree.fromstring(xml).iterfind("devices/hostdev")
    assert device.find("address").get("bus") == "0x10" == kept_bus(xml, ALIAS)  # type: ignore[union-attr]
    shown = {words[0]: kvmpool(bench, *words).stdout for words in (("binding", "list"), ("claim", "show", "vm0/gpu0"))}
    assert f"h0/{card}" in shown["binding"]
    assert "whole card" in shown["binding"]
    until(lambda: "State:       served" in kvmpool(bench, "claim", "show", "vm0/gpu0").stdout, 15, "it is not served")
    assert "Served as:   passthrough" in shown["claim"]


def test_two_domains_get_two_cards_and_a_third_none(bench: Bench) -> None:
    cards = set()
    for number, name in enumerate(("vm0", "vm1"), 1):
        bench.define(guest(name, number, passthrough(plug="boot")))
        assert kvmpool(bench, "domain", "start", name).returncode == 0
        (device,) = hostdevs_of(bench.dumped(name))
        cards.add(device.address)
    assert cards == {A, B}
    bench.define(guest("vm2", 3, passthrough(plug="boot")))
    line = refusal(kvmpool(bench, "domain", "start", "vm2"))
    assert "no card can serve" in line
    assert "Next: kvmpool explain vm2/gpu0" in line
    assert bench.host.virsh("domstate", "vm2").strip() == "shut off"


def test_a_qemu_that_does_not_start_leaves_nothing(bench: Bench) -> None:
    bench.define(VM)
    xml = bench.dumped("vm0", "--inactive")
    broken = xml.replace("acpi-pci-hotplug-with-bridge-support=off", "no-such-property=off")
    bench.host.outside(f"{FILES}/broken.xml").write_text(broken)
    bench.host.virsh("define", f"{FILES}/broken.xml")
    done = kvmpool(bench, "domain", "start", "vm0")
    assert "no-such-property" in done.stderr
    until(lambda: not bench.bindings(), 15, "its binding is left")
    bench.define(VM)
    assert kvmpool(bench, "domain", "start", "vm0").returncode == 0


def test_a_saved_domain_is_not_started_with_another_card(bench: Bench) -> None:
    bench.up(guest("vm0"))
    bench.host.virsh("managedsave", "vm0")
    try:
        bench.define(VM)
        line = refusal(kvmpool(bench, "domain", "start", "vm0"))
        assert "saved state" in line
        until(lambda: not bench.bindings(), 15, "its binding is left")
    finally:
        bench.host.virsh("managedsave-remove", "vm0")


def test_a_card_with_on_unplug_cold_is_replaced_by_power_off_and_on(bench: Bench) -> None:
    vm = guest("vm0", 1, passthrough(plug="boot", on_unplug="cold"))
    bench.define(vm)
    assert kvmpool(bench, "domain", "start", "vm0").returncode == 0
    bench.lab.wait_for_guest(bench.host, vm)
    first, pid = address(bench), bench.processes("qemu-system-x86_64")
    bench.ready_binding()
    bench.api.post(f"/cards/{first}/drain", {"reason": "to be replaced"})
    until(lambda: bench.processes("qemu-system-x86_64") not in ([], pid), 30, "the domain is not started again")
    until(lambda: (row := bench.binding()) and row["worker"] != f"vfio:{first}", 20, "the other card serves nobody")
    assert {first, address(bench)} == {A, B}
    kinds = [event["kind"] for event in bench.api.get("/events") if event["subject"] == "vm0"]
    assert kinds.count("forced") == 1
    bench.api.post(f"/cards/{first}/uncordon", {})
