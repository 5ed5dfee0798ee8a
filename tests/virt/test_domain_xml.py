"""Claims in domain XML: what is read, and that every other thing is refused in one line for virsh's user."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from kvmpool.core.model import ClaimSpec, Hold, Mode, Numa, OnFailure, OnUnplug, Plug
from kvmpool.errors import ClaimInvalid, NotFound
from kvmpool.native import data
from kvmpool.virt.claim_attributes import ATTRIBUTES
from kvmpool.virt.domain_xml import (
    NAMESPACE,
    cid_of,
    claims_of,
    fw_cfg_entries,
    with_claim,
    with_fw_cfg,
    with_shared,
    without_claim,
)
from kvmpool.virt.shared_memory import wanted_mib

UUID = "4f2e1c8a-7d39-4b60-9a15-c0de00000001"


def domain(metadata: str, name: str = "vm0", uuid: str = UUID) -> str:
    return (
        f"<domain type='kvm'><name>{name}</name><uuid>{uuid}</uuid><metadata>{metadata}</metadata>"
        "<os><type>hvm</type></os><devices/></domain>"
    )


def claims(*each: Mapping[str, str], uri: str = NAMESPACE) -> str:
    inner = "".join("<k:claim " + " ".join(f"{n}={quoteattr(v)}" for n, v in one.items()) + "/>" for one in each)
    return f"<k:claims xmlns:k='{uri}'>{inner}</k:claims>"


VGPU = {"name": "gpu0", "mode": "vgpu", "memory": "4096"}


def test_a_domain_without_claims_is_not_ours() -> None:
    for metadata in ("", "<x:y xmlns:x='urn:other'/>", f"<claims xmlns='{NAMESPACE}'/>"):
        found = claims_of(domain(metadata))
        assert (found.uuid, found.name, found.claims) == (UUID, "vm0", ())


def test_the_shortest_claim_takes_the_defaults() -> None:
    (spec,) = claims_of(domain(claims(VGPU))).claims
    assert spec == ClaimSpec("gpu0", Mode.VGPU, memory_mib=4096, memory_limit_mib=4096)


def test_every_attribute_is_read() -> None:
    full = VGPU | {
        "memory": "4GiB",
        "memory_limit": "8192 MiB",
        "compute": "25",
        "compute_limit": "50",
        "count": "2",
        "model": "H100",
        "vendor": "nvidia",
        "min_memory": "1024KiB",
        "numa": "required",
        "tenant": "team-a",
        "priority": "100",
        "preemptible": "yes",
        "hold": "process",
        "plug": "boot",
        "on_unplug": "cold",
        "on_failure": "none",
        "ha": "yes",
        "required": "no",
    }
    (spec,) = claims_of(domain(claims(full))).claims
    assert spec == ClaimSpec(
        name="gpu0",
        mode=Mode.VGPU,
        memory_mib=4096,
        memory_limit_mib=8192,
        compute_percent=25,
        compute_limit_percent=50,
        count=2,
        model="H100",
        vendor="nvidia",
        min_memory_mib=1,
        numa=Numa.REQUIRED,
        tenant="team-a",
        priority=100,
        preemptible=True,
        hold=Hold.PROCESS,
        plug=Plug.BOOT,
        on_unplug=OnUnplug.COLD,
        on_failure=OnFailure.NONE,
        ha=True,
        required=False,
    )
    assert set(full) | {"order"} == set(ATTRIBUTES)


def test_any_mode_has_an_order() -> None:
    one, two = claims_of(
        domain(claims({"name": "a", "mode": "any", "order": "vgpu passthrough"}, {"name": "b", "mode": "any"}))
    ).claims
    assert one.order == (Mode.VGPU, Mode.PASSTHROUGH)
    assert two.order == (Mode.PASSTHROUGH, Mode.VGPU)


def test_uuid_is_normalised_and_prefix_does_not_matter() -> None:
    found = claims_of(domain(f"<claims xmlns='{NAMESPACE}'><claim name='a' mode='any'/></claims>", uuid=UUID.upper()))
    assert found.uuid == UUID
    assert found.claims[0].name == "a"


BAD_VALUES = [
    ("name", ["", "Gpu0", "0gpu", "gpu-0", "g" * 17, "gpu0 ", "gpü"]),
    ("mode", ["", "VGPU", "gpu", "vgpu ", "any\n"]),
    ("count", ["0", "17", "-1", "1.0", "01", "٣", "99999999999999999999"]),
    ("memory", ["0", "-1", "4096MB", "4 TiB", "10000000", "01", "1e3", "", "4096  MiB", "GiB", "99999GiB", "0x10"]),
    ("memory_limit", ["0", "-4096", "1024 mib"]),
    ("min_memory", ["0", "1.5GiB"]),
    ("compute", ["-1", "101", "25%", "007"]),
    ("compute_limit", ["0", "101", "-5"]),
    ("model", ["", "a\nb", "x" * 65, "<b>"]),
    ("vendor", ["", "10de:2330"]),
    ("numa", ["none"]),
    ("tenant", ["", "../x", "a b", "t" * 64]),
    ("priority", ["-1", "101", "high"]),
    ("preemptible", ["true", "1", "YES"]),
    ("hold", ["session"]),
    ("plug", ["hot"]),
    ("on_unplug", ["hot"]),
    ("on_failure", ["migrate"]),
    ("ha", ["maybe"]),
    ("required", [""]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES for value in values])
def test_a_wrong_value_names_domain_attribute_and_the_allowed_ones(name: str, value: str) -> None:
    line = refused(domain(claims(VGPU | {name: value})))
    assert "domain vm0" in line
    assert f"{name}=" in line
    assert f"Allowed: {ATTRIBUTES[name].allowed}" in line


def refused(xml: str) -> str:
    with pytest.raises(ClaimInvalid) as caught:
        claims_of(xml)
    line = str(caught.value)
    assert "\n" not in line
    assert line.isprintable()
    return line


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mode": "vgpu", "memory": "1"}, "name is missing. Allowed: a lower-case letter"),
        ({"name": "gpu0"}, "claim gpu0: mode is missing. Allowed: vgpu, passthrough, any"),
        ({"name": "gpu0", "mode": "vgpu"}, 'memory is missing, mode="vgpu" needs it'),
        (VGPU | {"colour": "red"}, 'attribute "colour" is unknown. Allowed: name, mode, order'),
        (VGPU | {"Memory": "1"}, 'attribute "Memory" is unknown'),
        (VGPU | {"order": "vgpu"}, 'order is for mode="any" only'),
        ({"name": "g", "mode": "any", "order": "vgpu vgpu"}, "each once"),
        ({"name": "g", "mode": "passthrough", "memory": "1"}, 'memory is not for mode="passthrough"'),
        ({"name": "g", "mode": "any", "memory_limit": "5"}, "memory is missing, memory_limit needs it"),
        (VGPU | {"memory_limit": "4095"}, 'memory_limit="4095" is less than memory. Allowed: 4096 or more'),
        (VGPU | {"compute": "60", "compute_limit": "50"}, "is less than compute. Allowed: 60 to 100"),
    ],
)
def test_what_attributes_say_together_must_make_sense(given: dict[str, str], says: str) -> None:
    line = refused(domain(claims(given)))
    assert says in line
    assert "domain vm0" in line


SHAPES = [
    (claims(VGPU, VGPU), 'claim gpu0: name="gpu0" twice'),
    (claims(VGPU) + claims(VGPU), "has 2 elements"),
    (claims(VGPU, uri="urn:kvmpool:domain:2"), "{urn:kvmpool:domain:2}claims"),
    (claims(VGPU, uri="urn:kvmpool:domain"), "{urn:kvmpool:domain}claims"),
    (
        f"<k:claim xmlns:k='{NAMESPACE}' name='gpu0' mode='any'/>",
        'claim" is unknown. Allowed: {urn:kvmpool:domain:1}claims',
    ),
    (f"<k:claims xmlns:k='{NAMESPACE}'><claim name='gpu0' mode='any'/></k:claims>", 'element "claim" in <claims>'),
    (f"<k:claims xmlns:k='{NAMESPACE}'><k:claims/></k:claims>", "in <claims>. Allowed: {urn:kvmpool:domain:1}claim"),
    (f"<k:claims xmlns:k='{NAMESPACE}' v='1'/>", 'attribute "v" is unknown'),
    (f"<k:claims xmlns:k='{NAMESPACE}'>gpu</k:claims>", 'text "gpu"'),
    (f"<k:claims xmlns:k='{NAMESPACE}'><k:claim name='a' mode='any'>x</k:claim></k:claims>", 'text "x"'),
    (f"<k:claims xmlns:k='{NAMESPACE}'><k:claim name='a' mode='any'/>x</k:claims>", 'text "x"'),
    (f"<k:claims xmlns:k='{NAMESPACE}'><k:claim name='a' mode='any'><k:x/></k:claim></k:claims>", "has an element"),
    (f"<k:claims xmlns:k='{NAMESPACE}'><k:claim k:name='a' mode='any'/></k:claims>", "is unknown"),
    (claims(*({"name": f"g{n}", "mode": "any"} for n in range(17))), "17 claims. Allowed: at most 16"),
]


@pytest.mark.parametrize(("metadata", "says"), SHAPES)
def test_a_wrong_shape_is_refused(metadata: str, says: str) -> None:
    line = refused(domain(metadata))
    assert says in line
    assert "domain vm0" in line


BOMB = (
    "<!DOCTYPE domain [<!ENTITY a 'aaaaaaaaaa'>"
    + "".join(f"<!ENTITY {chr(98 + n)} '{('&' + chr(97 + n) + ';') * 10}'>" for n in range(8))
    + "]>"
)


@pytest.mark.parametrize(
    ("xml", "says"),
    [
        ("", "cannot be read"),
        ("virsh", "cannot be read"),
        (domain(claims(VGPU))[:-20], "cannot be read"),
        (domain(claims(VGPU))[:200], "cannot be read"),
        (domain("&x;"), "cannot be read"),
        (domain("\x00"), "cannot be read"),
        (domain("\udcff"), "cannot be read"),
        ("<domain>" + "<a>" * 100_000, "cannot be read"),
        ("<network><name>n</name></network>", 'that of a "network"'),
        (f"<d:domain xmlns:d='urn:x'><name>n</name><uuid>{UUID}</uuid></d:domain>", "not of a domain"),
        (BOMB + domain("&i;"), "document type"),
        ("<!DOCTYPE domain [<!ENTITY x SYSTEM 'file:///etc/passwd'>]>" + domain(claims(VGPU)), "document type"),
        ("<!DOCTYPE domain SYSTEM 'http://127.0.0.1:1/x.dtd'>" + domain(claims(VGPU)), "document type"),
        ("<?xml version='1.0' encoding='UTF-7'?>+ADwAIQ-DOCTYPE domain+AD4-" + domain(""), "cannot be read"),
        (f"<domain><uuid>{UUID}</uuid></domain>", "no usable <name>"),
        (domain("", name="a\nb"), "no usable <name>"),
        ("<domain><name>vm0</name></domain>", 'domain vm0: <uuid> is ""'),
        (domain("", uuid="4f2e1c8a"), "<uuid> is"),
        (domain("", uuid="g" * 32), "<uuid> is"),
        (domain("", uuid="-" * 36), "<uuid> is"),
        (domain("<!--" + "x" * (10 << 20) + "-->"), "Allowed: at most 10485760"),
    ],
)
def test_xml_that_is_broken_or_hostile_is_refused_in_one_line(xml: str, says: str) -> None:
    assert says in refused(xml)


def test_comments_between_claims_are_no_text() -> None:
    commented = claims(VGPU).replace("<k:claim ", "<!-- one --><k:claim ")
    assert len(claims_of(domain(commented)).claims) == 1


def test_the_example_domain_is_valid() -> None:
    text = data("xml", "domain.xml").read_text()
    found = claims_of(text)
    assert found.claims[0].memory_mib == 4096
    assert with_fw_cfg(text, fw_cfg_entries(f"/run/kvmpool/guests/{found.uuid}")) is None


# --- the schema says the same -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema() -> etree.RelaxNG:
    return etree.RelaxNG(etree.parse(data("xml", "claim.rng")))


def schema_takes(schema: etree.RelaxNG, metadata: str) -> bool:
    return schema.validate(etree.fromstring(metadata))


def words_of(xml: str) -> str:
    try:
        claims_of(xml)
    except ClaimInvalid as refusal:
        return str(refusal)
    return ""


# What two attributes (or two claims) say together is beyond the schema.
BEYOND = ("is less than", "twice", "claims. Allowed: at most")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES for value in values])
def test_the_schema_refuses_what_the_parser_refuses(schema: etree.RelaxNG, name: str, value: str) -> None:
    assert not schema_takes(schema, claims(VGPU | {name: value}))


@pytest.mark.parametrize(("metadata", "says"), [shape for shape in SHAPES if "<k:claims" in shape[0][:9]])
def test_the_schema_refuses_wrong_shapes(schema: etree.RelaxNG, metadata: str, says: str) -> None:
    beyond = any(words in says for words in BEYOND) or metadata.count("<k:claims ") > 1
    assert beyond or not schema_takes(schema, metadata)


_GOOD = {
    "name": ["gpu0", "a"],
    "mode": ["vgpu", "passthrough", "any"],
    "order": ["vgpu", "passthrough vgpu"],
    "count": ["1", "16"],
    "memory": ["1", "9999999", "4096 MiB", "4GiB", "9999999999KiB"],
    "memory_limit": ["9999999", "1KiB"],
    "compute": ["0", "100", "7"],
    "compute_limit": ["1", "100"],
    "model": ["NVIDIA H100 80GB HBM3"],
    "vendor": ["10de"],
    "min_memory": ["80GiB"],
    "numa": ["any"],
    "tenant": ["default"],
    "priority": ["0", "100"],
    "preemptible": ["yes"],
    "hold": ["domain", "process"],
    "plug": ["live", "boot"],
    "on_unplug": ["cold"],
    "on_failure": ["replay"],
    "ha": ["no"],
    "required": ["no"],
}


@st.composite
def some_claim(draw: st.DrawFn) -> dict[str, str]:
    names = draw(st.lists(st.sampled_from([*ATTRIBUTES, "colour"]), unique=True, max_size=8))
    chosen = {"name", "mode", *names} if draw(st.booleans()) else set(names)
    noise = st.text("agpu0123456789 -.GKMiBxX", max_size=8)
    return {
        n: draw(
            st.sampled_from(_GOOD.get(n, ["x"])) | noise
            if draw(st.integers(0, 5)) == 0
            else st.sampled_from(_GOOD.get(n, ["x"]))
        )
        for n in sorted(chosen)
    }


@settings(max_examples=1500, deadline=None)
@given(given_claims=st.lists(some_claim(), max_size=3))
def test_schema_and_parser_agree(given_claims: list[dict[str, str]]) -> None:
    schema = etree.RelaxNG(etree.parse(data("xml", "claim.rng")))
    metadata = claims(*given_claims)
    line = words_of(domain(metadata))
    takes = schema_takes(schema, metadata)
    if takes:
        assert not line or any(words in line for words in BEYOND)
    else:
        assert line


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_no_text_raises_anything_but_claim_invalid(text: str) -> None:
    for xml in (text, domain(text), domain(claims(VGPU))[: len(text)] + text):
        assert "\n" not in words_of(xml)


# --- writing ----------------------------------------------------------------------------------------------------------


def read_back(element: str | None) -> tuple[ClaimSpec, ...]:
    """As libvirt stores it: our namespace on every element of it."""
    text = (element or "").replace("<claims", f"<claims xmlns='{NAMESPACE}'", 1)
    return claims_of(domain(text)).claims


def test_a_claim_is_added_and_removed() -> None:
    one = with_claim(domain("<x:y xmlns:x='urn:other'/>"), VGPU)
    assert [spec.name for spec in read_back(one)] == ["gpu0"]
    two = with_claim(domain(one.replace("<claims", f"<claims xmlns='{NAMESPACE}'")), {"name": "gpu1", "mode": "any"})
    assert [spec.name for spec in read_back(two)] == ["gpu0", "gpu1"]
    back = without_claim(domain(two.replace("<claims", f"<claims xmlns='{NAMESPACE}'")), "gpu0")
    assert [spec.name for spec in read_back(back)] == ["gpu1"]
    assert without_claim(domain(claims(VGPU)), "gpu0") is None


def test_what_cannot_be_added_or_removed_is_refused() -> None:
    with pytest.raises(ClaimInvalid, match="claim gpu0 exists"):
        with_claim(domain(claims(VGPU)), VGPU)
    with pytest.raises(ClaimInvalid, match=r'memory="-1" is not allowed\. Allowed: 1 to'):
        with_claim(domain(""), VGPU | {"memory": "-1"})
    with pytest.raises(ClaimInvalid, match='numa="" is not allowed'):
        with_claim(domain(""), VGPU | {"numa": ""})
    with pytest.raises(NotFound, match='no claim "gpu9"; it has: gpu0'):
        without_claim(domain(claims(VGPU)), "gpu9")


def test_a_claim_that_cannot_be_read_can_be_removed() -> None:
    assert without_claim(domain(claims(VGPU | {"colour": "red"})), "gpu0") is None


def test_fw_cfg_entries_are_set_replaced_and_taken_out_beside_those_of_others() -> None:
    entries = fw_cfg_entries("/run/kvmpool/guests/u")
    assert entries["opt/org.kvmpool/token"] == "/run/kvmpool/guests/u/token"
    others = domain("").replace("</os>", "</os><sysinfo type='fwcfg'><entry name='opt/com.other'>x</entry></sysinfo>")
    for before in (domain(""), others):
        after = with_fw_cfg(before, entries)
        assert after is not None
        assert with_fw_cfg(after, entries) is None
        assert ("opt/com.other" in after) == (before is others)
        moved = with_fw_cfg(after, fw_cfg_entries("/elsewhere"))
        assert moved is not None
        assert moved.count("opt/org.kvmpool/") == 2
        gone = with_fw_cfg(moved, {})
        assert gone is not None
        assert "opt/org.kvmpool" not in gone
        assert ("<sysinfo" in gone) == (before is others)


@pytest.mark.parametrize(
    ("devices", "cid"),
    [
        ("<vsock model='virtio'><cid auto='yes' address='7'/></vsock>", 7),
        ("<vsock model='virtio'><cid auto='yes'/></vsock>", 0),
        ("<vsock model='virtio'><cid auto='no' address='2'/></vsock>", 0),
        ("<vsock model='virtio'><cid auto='no' address='4294967295'/></vsock>", 0),
        ("<vsock model='virtio'><cid auto='no' address='-1'/></vsock>", 0),
        ("", 0),
    ],
)
def test_a_running_domains_vsock_address_is_read(devices: str, cid: int) -> None:
    assert cid_of(f"<domain><name>vm0</name><devices>{devices}</devices></domain>") == cid


def sharing(shmem: str) -> str:
    return domain(claims(VGPU)).replace("<devices/>", f"<devices>{shmem}</devices>")


def shmem(name: str = f"kvmpool-{UUID}", model: str = "ivshmem-plain", size: str = "<size unit='M'>64</size>") -> str:
    return f"<shmem name='{name}'><model type='{model}'/>{size}</shmem>"


@pytest.mark.parametrize(
    ("size", "mib"),
    [("<size unit='M'>64</size>", 64), ("<size unit='KiB'>8192</size>", 8), ("<size>8388608</size>", 8)],
)
def test_a_domain_s_shared_memory_is_read(size: str, mib: int) -> None:
    assert claims_of(sharing(shmem(size=size))).shared_mib == mib
    assert claims_of(sharing(shmem("somebody-else") + shmem(size=size))).shared_mib == mib
    assert claims_of(sharing(shmem("somebody-else"))).shared_mib == 0


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (shmem("kvmpool-00000000-0000-4000-8000-000000000000"), f"is not its own. Allowed: kvmpool-{UUID}"),
        (shmem("kvmpool-"), "is not its own"),
        (shmem() + shmem(), "it has 2"),
        (shmem(model="ivshmem-doorbell"), "Allowed: ivshmem-plain"),
        (f"<shmem name='kvmpool-{UUID}'/>", "Allowed: ivshmem-plain"),
        (shmem(size=""), "a power of two from 8MiB to 64GiB"),
        (shmem(size="<size unit='M'>96</size>"), "a power of two"),
        (shmem(size="<size unit='M'>4</size>"), "a power of two"),
        (shmem(size="<size unit='T'>1</size>"), "a power of two"),
        (shmem(size="<size unit='M'>-64</size>"), "a power of two"),
    ],
)
def test_shared_memory_that_is_not_the_domain_s_own_is_refused(device: str, told: str) -> None:
    with pytest.raises(ClaimInvalid, match=told.replace("(", ".")):
        claims_of(sharing(device))


def test_shared_memory_is_written_changed_and_taken_out_again() -> None:
    other, kept = shmem("somebody-else"), 'name="somebody-else"'
    given = with_shared(sharing(other), 64)
    assert given is not None
    assert (claims_of(given).shared_mib, kept in given) == (64, True)
    assert with_shared(given, 64) is None
    more = with_shared(given, 128)
    assert more is not None
    assert claims_of(more).shared_mib == 128
    without = with_shared(more, 0)
    assert without is not None
    assert (claims_of(without).shared_mib, kept in without) == (0, True)
    assert with_shared(without, 0) is None


@pytest.mark.parametrize("text", ["96MiB", "4MiB", "1TiB", "-8MiB", "", "128GiB"])
def test_shared_memory_of_a_size_that_no_device_has_is_refused(text: str) -> None:
    with pytest.raises(ClaimInvalid, match="a power of two from 8MiB to 64GiB, or 0 for none"):
        wanted_mib("vm0", text)


def test_shared_memory_of_a_right_size_is_taken() -> None:
    assert [wanted_mib("vm0", text) for text in ("0", "8", "64MiB", "1 GiB")] == [0, 8, 64, 1024]
