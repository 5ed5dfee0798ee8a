"""A domain as `kvmpool domain define` writes it: golden files, each also defined on libvirt, and what is refused."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import libvirt
import pytest
from lxml import etree

from kvmpool.errors import ClaimInvalid
from kvmpool.virt.device_xml import hostdev_xml, kept_bus, with_hostdevs
from kvmpool.virt.domain_xml import NAMESPACE, claims_of
from kvmpool.virt.plan import (
    Disk,
    DomainPlan,
    card_port,
    checked,
    claims_xml,
    disk_of,
    domain_xml,
    gpu_of,
    memory_of,
)

GOLDEN = Path(__file__).with_name("golden")
ID = UUID("4f2e1c8a-7d39-4b60-9a15-c0de00000001")
GUESTS = "/run/kvmpool/guests"
DISK = Disk("/var/lib/libvirt/images/vm0.qcow2", "qcow2")
PLANS = {
    "vgpu": DomainPlan("vm0", 4096, 2, (DISK,), ("default",), (gpu_of("memory=4GiB,compute=25", 0),)),
    "passthrough": DomainPlan(
        "vm0",
        65536,
        16,
        (DISK, Disk("/srv/scratch.img", "raw")),
        ("bridge=br0", "default"),
        (gpu_of("mode=passthrough,model=A100,plug=boot", 0), gpu_of("mode=any,order=passthrough vgpu,memory=8GiB", 1)),
        uefi=True,
    ),
    "bare": DomainPlan("vm0", 512, 1, cdrom="/srv/debian.iso", kvm=False),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_the_golden_text(name: str) -> None:
    assert domain_xml(PLANS[name], ID, GUESTS) == (GOLDEN / f"{name}.xml").read_text()


@pytest.mark.parametrize("name", PLANS)
def test_libvirt_validates_and_keeps_it(name: str) -> None:
    root = etree.fromstring((GOLDEN / f"{name}.xml").read_bytes())
    root.set("type", "test")  # libvirt's driver inside this process; the schema is the same
    connection = libvirt.open("test:///default")
    try:
        domain = connection.defineXMLFlags(etree.tostring(root, encoding="unicode"), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
        kept = domain.XMLDesc(0)
        assert claims_of(kept) == claims_of((GOLDEN / f"{name}.xml").read_text())
        domain.undefine()
    finally:
        connection.close()


def test_each_card_has_a_root_port_of_its_own_behind_those_that_libvirt_fills() -> None:
    root = etree.fromstring(domain_xml(PLANS["passthrough"], ID, GUESTS))
    ports = {port.get("index"): port.find("alias") for port in root.iterfind("devices/controller")}
    named = {index: alias.get("name") for index, alias in ports.items() if alias is not None}
    assert named == {"16": card_port("gpu0"), "17": card_port("gpu1")}
    assert sorted(ports, key=lambda index: int(index or "")) == [str(index) for index in range(18)]


def test_only_a_domain_that_may_get_a_vgpu_has_files_of_kvmpoold() -> None:
    # QEMU does not start where a file of fw_cfg is missing, and of a passthrough claim kvmpoold writes none.
    only = DomainPlan("vm0", 512, 1, gpus=(gpu_of("mode=passthrough", 0),))
    assert "fwcfg" not in domain_xml(only, ID, GUESTS)
    assert "fwcfg" in domain_xml(PLANS["passthrough"], ID, GUESTS)


def test_the_snippet_of_a_claim_is_the_metadata_of_a_domain() -> None:
    snippet = claims_xml((gpu_of("memory=4GiB", 0),))
    root = etree.fromstring(snippet)
    assert root.tag == "metadata"
    [claim] = root.iterfind(f"{{{NAMESPACE}}}claims/{{{NAMESPACE}}}claim")
    assert dict(claim.attrib) == {"name": "gpu0", "mode": "vgpu", "memory": "4GiB"}


@pytest.mark.parametrize(
    ("text", "disk"),
    [
        ("/a/b.qcow2", Disk("/a/b.qcow2", "qcow2")),
        ("/a/b.img", Disk("/a/b.img", "raw")),
        ("/dev/vg/vm0,format=raw", Disk("/dev/vg/vm0", "raw")),
    ],
)
def test_a_disk_names_its_format(text: str, disk: Disk) -> None:
    assert disk_of(text) == disk


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: disk_of("vm0.qcow2"), "not an absolute path"),
        (lambda: disk_of("/dev/vg/vm0"), "does not say its format"),
        (lambda: disk_of("/a.img,format=vmdk"), "format=raw or ,format=qcow2"),
        (lambda: disk_of("/a.img,"), "format=raw or ,format=qcow2"),
        (lambda: memory_of("4 gigs"), "Allowed: 64 MiB to 64 TiB"),
        (lambda: memory_of("1"), "Allowed: 64 MiB to 64 TiB"),
        (lambda: memory_of("999999TiB"), "Allowed: 64 MiB to 64 TiB"),
        (lambda: gpu_of("vgpu", 0), "is not KEY=VALUE"),
        (lambda: gpu_of("mode=vgpu,mode=any", 0), "is there twice"),
        (lambda: checked(DomainPlan("a/b", 512, 1)), 'name "a/b"'),
        (lambda: checked(DomainPlan("a", 512, 0)), "0 vcpus"),
        (lambda: checked(DomainPlan("a", 512, 1, networks=("bridge=a b",))), 'network "bridge=a b"'),
        (lambda: checked(DomainPlan("a", 512, 1, cdrom="x.iso")), "not an absolute path"),
        (lambda: checked(DomainPlan("a", 512, 1, disks=(DISK,) * 5)), "5 disks"),
        (lambda: checked(DomainPlan("a", 512, 1, gpus=(gpu_of("", 0),))), "memory"),
        (lambda: checked(DomainPlan("a", 512, 1, gpus=(gpu_of("memory=1GiB", 0),) * 2)), "each name once"),
        (lambda: checked(DomainPlan("a", 512, 1, gpus=(gpu_of("mode=warp", 0),))), "vgpu, passthrough, any"),
    ],
)
def test_what_no_domain_can_be_is_one_line_that_says_what(make: object, says: str) -> None:
    with pytest.raises(ClaimInvalid) as caught:
        make()  # type: ignore[operator]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# --- xml/, which people copy ------------------------------------------------------------------------------------------

XML = Path(__file__).parents[2] / "xml"


@pytest.mark.parametrize("name", ["domain.xml", "passthrough.xml"])
def test_an_example_is_a_domain_that_libvirt_takes_and_whose_claims_are_valid(name: str) -> None:
    text = (XML / name).read_text()
    root = etree.fromstring(text.encode())
    root.set("type", "test")
    connection = libvirt.open("test:///default")
    try:
        domain = connection.defineXMLFlags(etree.tostring(root, encoding="unicode"), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
        assert claims_of(domain.XMLDesc(0)).claims == claims_of(text).claims != ()
        domain.undefine()
    finally:
        connection.close()


def _plain(element: etree._Element) -> str:
    """Without comments and blanks."""
    text = etree.tostring(element, encoding="unicode", with_tail=False)
    return str(etree.canonicalize(text, strip_text=True))


def test_the_passthrough_example_is_what_we_write() -> None:
    gpu = gpu_of("mode=passthrough,on_unplug=reset", 0)
    disk = Disk("/var/lib/libvirt/images/vm1.qcow2", "qcow2")
    plan = DomainPlan("vm1", 8192, 4, (disk,), ("default",), (gpu,))
    example = etree.fromstring((XML / "passthrough.xml").read_bytes())
    written = etree.fromstring(domain_xml(plan, UUID(example.findtext("uuid") or ""), GUESTS))
    assert _plain(example) == _plain(written)


def test_the_hostdev_example_is_the_card_that_we_attach_to_that_domain() -> None:
    example = etree.fromstring((XML / "hostdev.xml").read_bytes())
    bus = kept_bus((XML / "passthrough.xml").read_text(), "ua-kvmpool-gpu0")
    assert _plain(example) == _plain(etree.fromstring(hostdev_xml("ua-kvmpool-gpu0", "0000:41:00.0", bus)))
    domain = with_hostdevs((XML / "passthrough.xml").read_text(), {"ua-kvmpool-gpu0": "0000:41:00.0"})
    (device,) = etree.fromstring(domain).iterfind("devices/hostdev")
    assert _plain(device) == _plain(example)
