"""Mode switches on a fake bus: both ways, refused before anything is changed, undone, wedged (design 04 §4.4)."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvmpool.core.model import Mode
from kvmpool.device.vfio import NO_DRIVER
from kvmpool.errors import CardBusy, CardLost, CardWedged, KvmpoolError, Refused, SwitchFailed
from kvmpool.lab.fake_bus import FakeFunction, bind, hang, ignore, make, make_process, refuse
from tests.device.switching import AUDIO, CARD, OTHER, PORT, SOUND, TWIN, A, Bench

PASS, VGPU, OFF = Mode.PASSTHROUGH, Mode.VGPU, Mode.OFF


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.bus:
        yield made


def switch(bench: Bench, mode: Mode, address: str = A) -> None:
    asyncio.run(bench.modes().switch(bench.card(address), mode))


def refused(bench: Bench, mode: Mode = PASS, kind: type[KvmpoolError] = Refused, address: str = A) -> str:
    """The one line; nothing was changed, and nothing is left in the journal."""
    before = bench.everything()
    with pytest.raises(kind) as error:
        switch(bench, mode, address)
    assert bench.everything() == before
    assert bench.modes().journal.under_way() == ()
    assert "\n" not in str(error.value)
    return str(error.value)


# --- well -------------------------------------------------------------------------------------------------------------


def test_all_functions_go_together_and_come_back(bench: Bench) -> None:
    before = bench.everything()
    switch(bench, PASS)
    assert bench.drivers() == {A: "vfio-pci", AUDIO: "vfio-pci", TWIN: "nvidia"}
    assert bench.overrides() == {A: "vfio-pci", AUDIO: "vfio-pci", TWIN: ""}
    assert bench.nodes() == ["41"]
    switch(bench, OFF)
    assert bench.drivers() == {A: "", AUDIO: "", TWIN: "nvidia"}
    assert bench.overrides()[A] == NO_DRIVER
    switch(bench, VGPU)
    assert bench.drivers() == {A: "nvidia", AUDIO: "snd_hda_intel", TWIN: "nvidia"}
    assert bench.everything()[:3] == before[:3]
    assert asyncio.run(bench.modes().give_back()) == (
        f"{A} is on nvidia, as before kvmpool", f"{AUDIO} is on snd_hda_intel, as before kvmpool"
    )  # fmt: skip
    assert bench.everything() == before
    assert bench.modes().journal.origins() == ()


def test_a_card_in_the_wished_mode_is_not_touched(bench: Bench) -> None:
    switch(bench, PASS)
    done = list(bench.bus.log)
    switch(bench, PASS)
    assert bench.bus.log == done
    assert asyncio.run(bench.modes().plan(bench.card(), PASS)) == ()


def test_a_plan_tells_every_change_and_makes_none(bench: Bench) -> None:
    before = bench.everything()
    assert asyncio.run(bench.modes().plan(bench.card(), PASS)) == (
        f"give {A} to vfio-pci (now: nvidia)", f"give {AUDIO} to vfio-pci (now: snd_hda_intel)"
    )  # fmt: skip
    assert bench.everything() == before
    assert not bench.state.exists()


def test_a_driver_that_is_not_loaded_is_loaded_where_somebody_can(bench: Bench) -> None:
    loaded: list[str] = []

    async def load(module: str) -> None:
        loaded.append(module)
        make(bench.root, ())

    async def story() -> None:
        modes = bench.modes()
        modes._load = load
        plan = await modes.plan(bench.card(), PASS)
        assert plan[0] == "load vfio-pci"
        await modes.switch(bench.card(), PASS)

    folder = bench.root / "sys/bus/pci/drivers/vfio-pci"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert refused(bench) == f"h0/{A}: the driver vfio-pci is not loaded. Next: modprobe vfio-pci"
    asyncio.run(story())
    assert loaded == ["vfio-pci"]
    assert bench.drivers()[A] == "vfio-pci"


# --- refused: nothing is changed --------------------------------------------------------------------------------------


def test_iommu_siblings_on_a_host_driver_make_a_group_not_viable(tmp_path: Path) -> None:
    disk = FakeFunction("0000:43:00.0", "144d", "a80a", "010802", "41", "nvme", ports=(PORT,))
    port = FakeFunction("0000:00:01.0", "8086", "1901", "060400", "41", "pcieport")
    bench = Bench(tmp_path, CARD, SOUND, disk, port)
    with bench.bus:
        assert refused(bench) == (
            f"vfio {A}: group 41 is not viable: 0000:43:00.0 (nvme) would have to be given away too. "
            "Next: unbind it if nothing needs it, or put the card into a slot with ACS"
        )
        assert bench.card().pci.foreign == ("0000:43:00.0",)
        (bench.root / "sys/bus/pci/devices/0000:43:00.0/driver").unlink()
        (bench.root / "sys/bus/pci/drivers/nvme/0000:43:00.0").unlink()
        switch(bench, PASS)  # a mate without a driver is fine, and stays so
        assert bench.drivers()["0000:43:00.0"] == ""
        assert bench.drivers()["0000:00:01.0"] == "pcieport"


def test_two_cards_of_one_group_are_one_unit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, CARD, SOUND, replace(OTHER, group="41"))
    with bench.bus:
        assert bench.card(TWIN).pci.functions == (A, AUDIO, TWIN)
        switch(bench, PASS, TWIN)
        assert set(bench.drivers().values()) == {"vfio-pci"}
        switch(bench, VGPU)
        assert bench.drivers() == {A: "nvidia", AUDIO: "snd_hda_intel", TWIN: "nvidia"}


def test_without_an_iommu_passthrough_is_never_offered(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replace(CARD, group=""), replace(SOUND, group=""))
    with bench.bus:
        assert refused(bench) == (
            f"host doesn't support passthrough of host PCI devices: h0/{A} is in no IOMMU group. "
            "Next: boot with intel_iommu=on (Intel) or enable AMD-Vi in the firmware; kvmpool doctor"
        )


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"ids": "10de:2331:10de:16c1"}, f"{A} is 10de:2330:10de:16c1 now, h0/{A} was 10de:2331:10de:16c1"),
        ({"slot": "0000:00-02.0-00.0"}, f"{A} is in slot 0000:00-01.0-00.0 now, h0/{A} was in 0000:00-02.0-00.0"),
    ],
)
def test_a_renumbered_bus_is_noticed(bench: Bench, was: dict[str, str], now: str) -> None:
    card = bench.card()
    before = bench.everything()
    with pytest.raises(Refused) as error:
        asyncio.run(bench.modes().switch(replace(card, pci=replace(card.pci, **was)), PASS))  # type: ignore[arg-type]
    assert str(error.value) == (
        f"the wrong device is passed: {now}. Next: kvmpool card list; the bus was numbered anew"
    )  # fmt: skip
    assert bench.everything() == before


def test_a_twin_card_is_left_alone_and_new_id_is_never_written(bench: Bench) -> None:
    switch(bench, PASS)
    assert bench.drivers()[TWIN] == "nvidia"
    assert bench.overrides()[TWIN] == ""
    assert not any((bench.root / "sys/bus/pci/drivers").glob("*/remove_id"))
    assert [p.read_text() for p in (bench.root / "sys/bus/pci/drivers").glob("*/new_id")] == ["", "", ""]


def test_a_boot_framebuffer_on_the_card_is_named_with_the_remedy(bench: Bench) -> None:
    (bench.root / "proc/iomem").write_text("e0000000-efffffff : PCI Bus 0000:41\n  e0000000-e02fffff : BOOTFB\n")
    assert refused(bench) == (
        f"h0/{A}: BAR 0: can't reserve [mem 0xe0000000-0xe02fffff]: the boot console has it. "
        "Next: boot with video=efifb:off (or initcall_blacklist=sysfb_init), or another console"
    )
    (bench.root / "proc/iomem").write_text("a0000000-a02fffff : BOOTFB\n")
    (bench.root / "sys/bus/pci/devices" / A / "boot_vga").write_text("1\n")
    console = bench.root / "sys/class/vtconsole/vtcon1"
    console.mkdir(parents=True)
    (console / "name").write_text("(M) frame buffer device\n")
    (console / "bind").write_text("1\n")
    assert refused(bench).startswith(f"h0/{A} is the boot display (boot_vga), and a console is bound to it. Next:")
    (console / "bind").write_text("0\n")
    switch(bench, PASS)


def test_a_process_with_the_node_open_is_named_with_its_unit(bench: Bench) -> None:
    about = bench.root / f"proc/driver/nvidia/gpus/{A}/information"
    about.parent.mkdir(parents=True)
    about.write_text("Model: \t\t Soft H100\nDevice Minor: \t 3\n")
    make_process(bench.root, 77, "python3", "/dev/nvidia3", cgroup="/system.slice/jupyter.service")
    assert refused(bench, kind=CardBusy) == (
        f"h0/{A} is in use by pid 77 (python3, jupyter.service) with /dev/nvidia3 open. "
        "Next: systemctl stop jupyter.service, then try again"
    )
    with pytest.raises(CardBusy, match=r"pid 77 \(python3, jupyter.service\)"):
        asyncio.run(bench.modes().plan(bench.card(), PASS))
    (bench.root / "proc/77/fd/3").unlink()
    line = "7f00-7f01 rw-s 0 00:06 9  /dev/nvidia3\n"
    (bench.root / "proc/77/maps").write_text("00-01 r--p 0 00:00 0 \n" + line)  # closed, and still mapped
    assert "pid 77" in refused(bench, kind=CardBusy)
    (bench.root / "proc/77/maps").write_text(line.replace("nvidia3", "nvidia30"))
    switch(bench, PASS)


def test_a_domain_that_has_the_card_is_named(bench: Bench) -> None:
    switch(bench, PASS)
    words = "qemu-system-x86_64 -name guest=vm7,debug-threads=on -S"
    scope = "/machine.slice/machine-qemu.scope"
    make_process(bench.root, 99, "qemu-system-x86", "/dev/vfio/41", cmdline=words, cgroup=scope)
    assert refused(bench, VGPU, CardBusy) == (
        f"h0/{A} is in use by pid 99 (qemu-system-x86, domain vm7) with /dev/vfio/41 open. "
        "Next: virsh shutdown vm7, then try again"
    )


def test_a_host_whose_processes_cannot_be_seen_switches_nothing(bench: Bench) -> None:
    for file in sorted((bench.root / "proc").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
    line = refused(bench, kind=KvmpoolError)
    assert line == f"{bench.root}: /proc cannot be read, so who holds the card is not known"


def test_a_card_in_d3cold_is_a_dead_card(bench: Bench) -> None:
    (bench.root / "sys/bus/pci/devices" / A / "config").write_bytes(b"\xff" * 256)
    assert refused(bench) == (
        f"h0/{A}: Unable to change power state from D3cold to D0, device inaccessible "
        "(its config space reads all ones). Next: power the host off and on; kvmpool card show"
    )


def test_a_card_is_kept_out_of_d3cold_before_vfio_has_it(bench: Bench) -> None:
    seen: list[str] = []

    def checkpoint(point: str) -> None:
        if point == "before-override":
            seen.append((bench.root / "sys/bus/pci/devices" / A / "d3cold_allowed").read_text().strip())

    asyncio.run(bench.modes(checkpoint).switch(bench.card(), PASS))
    assert seen[0] == "0"


# --- begun, and undone ------------------------------------------------------------------------------------------------


def test_a_silent_non_bind_is_noticed_and_undone(bench: Bench) -> None:
    def checkpoint(point: str) -> None:
        if point == "before-verify":  # as a kernel whose vfio-pci does not take the device: probed, and nobody's
            bench.bus.settle()
            bench.bus._unbind("vfio-pci", A)

    before = bench.everything()
    with pytest.raises(SwitchFailed) as error:
        asyncio.run(bench.modes(checkpoint).switch(bench.card(), PASS))
    assert str(error.value) == (
        f"h0/{A}: {A} has no driver after its probe, not vfio-pci; it is on {A} (nvidia), {AUDIO} (snd_hda_intel) again"
    )
    assert bench.everything() == before


def test_a_vfio_node_that_is_missing_is_no_passthrough(bench: Bench) -> None:
    def checkpoint(point: str) -> None:
        if point == "before-verify":
            bench.bus.settle()
            (bench.root / "dev/vfio/41").unlink()

    with pytest.raises(SwitchFailed, match=r"Could not open '/dev/vfio/41': .* is on vfio-pci, the node was not made"):
        asyncio.run(bench.modes(checkpoint).switch(bench.card(), PASS))
    assert bench.drivers() == {A: "nvidia", AUDIO: "snd_hda_intel", TWIN: "nvidia"}


def test_a_probe_that_does_nothing_at_all_leaves_a_card_that_is_told_as_such(bench: Bench) -> None:
    ignore(bench.root, "drivers_probe")
    with pytest.raises(SwitchFailed, match=f"{AUDIO} was not given back: it has no driver, it had snd_hda_intel"):
        switch(bench, PASS)
    (entry,) = bench.modes().journal.under_way()  # it stays, for the next try
    assert [old.driver for old in entry.before] == ["nvidia", "snd_hda_intel"]
    make_again(bench, "drivers_probe")
    (line,) = asyncio.run(bench.modes().recover())
    assert line == f"{A}: a switch to passthrough was cut off: undone"
    assert bench.drivers() == {A: "nvidia", AUDIO: "snd_hda_intel", TWIN: "nvidia"}


def make_again(bench: Bench, file: str) -> None:
    path = bench.root / "sys/bus/pci" / file
    path.unlink()
    path.with_name(path.name + ".unread").unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("file", ["drivers/nvidia/unbind", "drivers_probe"])
def test_einval_is_told_in_the_kernels_words(bench: Bench, file: str) -> None:
    refuse(bench.root, file)
    word = f"writing '{A}' to /sys/bus/pci/{file}: Invalid argument"
    with pytest.raises(SwitchFailed) as error:
        switch(bench, PASS)
    assert "Invalid argument" in str(error.value)
    if "unbind" in file:
        assert str(error.value).startswith(f"h0/{A}: {word}; it is on")
        assert bench.drivers() == {A: "nvidia", AUDIO: "snd_hda_intel", TWIN: "nvidia"}
        assert bench.overrides() == {A: "", AUDIO: "", TWIN: ""}


def test_a_card_that_leaves_the_bus_meanwhile_is_lost(bench: Bench) -> None:
    def checkpoint(point: str) -> None:
        if point == "after-unbind":
            bench.bus.settle()
            for address in (A, AUDIO):
                (bench.root / "sys/bus/pci/devices" / address).unlink(missing_ok=True)

    with pytest.raises(CardLost, match="has left the bus"):
        asyncio.run(bench.modes(checkpoint).switch(bench.card(), PASS))


# --- wedged -----------------------------------------------------------------------------------------------------------


def test_an_unbind_that_hangs_wedges_the_card_and_nothing_else(bench: Bench) -> None:
    hang(bench.root, "drivers/nvidia/unbind")
    beats: list[float] = []

    async def story() -> str:
        async def beat() -> None:
            while True:
                beats.append(time.monotonic())
                await asyncio.sleep(0.01)

        beating = asyncio.ensure_future(beat())
        try:
            with pytest.raises(CardWedged) as error:
                await bench.modes().switch(bench.card(), PASS)
        finally:
            beating.cancel()
        return str(error.value)

    begun = time.monotonic()
    line = asyncio.run(story())
    assert re.fullmatch(
        rf"{A}: nvidia does not let go of it \(writing '{A}' to \S+/unbind did not end within 3 s; "
        rf'the kernel log may say "Attempting to remove device {A} with non-zero usage count!"\)\. '
        r"Next: reboot the host",
        line,
    )
    assert time.monotonic() - begun < 30
    assert max(b - a for a, b in zip(beats, beats[1:], strict=False)) < 2.0, "the loop stood still"
    tried = list(bench.bus.log)
    for act in (bench.modes().plan(bench.card(), PASS), bench.modes().switch(bench.card(), VGPU)):
        with pytest.raises(CardWedged, match="does not let go"):  # no retry, also by the next daemon
            asyncio.run(act)
    assert "does not let go" in asyncio.run(bench.modes().recover())[0]
    assert bench.bus.log == tried


def test_after_a_reboot_a_wedged_card_is_free_again(bench: Bench) -> None:
    hang(bench.root, "drivers/nvidia/unbind")
    with pytest.raises(CardWedged):
        switch(bench, PASS)
    make_again(bench, "drivers/nvidia/unbind")
    (bench.root / "sys/bus/pci/devices" / A / "driver_override").write_text("(null)\n")  # as the kernel starts
    (bench.root / "sys/bus/pci/devices" / AUDIO / "driver_override").write_text("(null)\n")
    modes = bench.modes(boot="boot-2")
    (line,) = asyncio.run(modes.recover())
    assert line == f"{A}: the host has rebooted during a switch to passthrough; nothing to undo"
    asyncio.run(bench.modes(boot="boot-2").switch(bench.card(), PASS))
    assert bench.drivers()[A] == "vfio-pci"


# --- not given back ---------------------------------------------------------------------------------------------------


def test_what_a_domain_uses_is_adopted_and_never_reset(bench: Bench) -> None:
    class Killed(BaseException):
        pass

    def checkpoint(point: str) -> None:
        if point == "before-finish":
            raise Killed

    with pytest.raises(Killed):
        asyncio.run(bench.modes(checkpoint).switch(bench.card(), PASS))
    (bench.root / "sys/bus/pci/devices" / AUDIO / "driver_override").write_text("(null)\n")  # not quite done
    make_process(bench.root, 99, "qemu-system-x86", "/dev/vfio/41", cmdline="qemu -name guest=vm7")
    (line,) = asyncio.run(bench.modes().recover())
    assert line.startswith(f"{A}: a switch to passthrough was cut off: in use, so left as it is (pid 99")
    assert bench.drivers() == {A: "vfio-pci", AUDIO: "vfio-pci", TWIN: "nvidia"}
    assert bench.modes().journal.under_way() == ()


def test_leaving_is_refused_while_a_domain_has_the_card(bench: Bench) -> None:
    switch(bench, PASS)
    make_process(bench.root, 99, "qemu-system-x86", "/dev/vfio/41", cmdline="qemu -name guest=vm7")
    with pytest.raises(CardBusy, match="domain vm7"):
        asyncio.run(bench.modes().give_back())
    assert bench.drivers()[A] == "vfio-pci"


def test_leaving_gives_back_an_override_that_was_there_before(bench: Bench) -> None:
    (bench.root / "sys/bus/pci/devices" / AUDIO / "driver_override").write_text("snd_hda_intel\n")
    before = bench.everything()
    switch(bench, PASS)
    switch(bench, OFF)
    asyncio.run(bench.modes().give_back())
    assert bench.everything() == before


def test_a_card_that_was_on_vfio_before_kvmpool_goes_back_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replace(CARD, bound=False), replace(SOUND, bound=False))
    for address in (A, AUDIO):
        bind(bench.root, address, "vfio-pci")  # by ids on the kernel's command line: without an override
    (bench.root / "dev/vfio/41").touch()
    before = bench.everything()
    with bench.bus:
        switch(bench, VGPU)
        assert bench.drivers() == {A: "nvidia", AUDIO: "snd_hda_intel"}
        asyncio.run(bench.modes().give_back())
        assert bench.everything() == before
