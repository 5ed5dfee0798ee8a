"""A Linux guest in the VFIO lab's host computes on a vGPU over a real vhost-vsock: `make test-slow`, an hour or more.

Two machines are emulated one in the other, without KVM: the guest's kernel alone boots for a good part of that. What it
shows beyond test_fallback.py and tests/e2e/test_vsock.py is the device between a guest and its host.
"""

from __future__ import annotations

import sys
import time

import pytest

from kvmpool.lab import guests, images, vfio_cards
from kvmpool.lab.guests import GuestSpec
from tests.vfio.conftest import Bench, until

pytestmark = [pytest.mark.e2e, pytest.mark.vfio, pytest.mark.slow_vfio, pytest.mark.timeout(4 * 3600)]

_SHARED = vfio_cards.card("gpu3")
_VM = GuestSpec("vm9", 9, ('name="gpu0" mode="vgpu" memory="512"',), 192, vsock=True)
_BOOT_S, _RUN_S, _COMMAND_S = 2 * 3600.0, 3600.0, 600.0
_IN_GUEST = """
import sys
from pathlib import Path
from kvmpool.lab import guests
ran = guests.run(Path(sys.argv[1]), "vectorAdd", float(sys.argv[2]))
print(ran.output, end="")
sys.exit(ran.code)
"""


def test_a_linux_guest_adds_vectors_on_its_vgpu_over_vhost_vsock(bench: Bench) -> None:
    host, lab = bench.host, bench.lab
    lab.lend_to_soft_driver(_SHARED)
    lab.join()
    lab.start_kvmpoold()
    until(lambda: _is_healthy(bench), "the card with a driver is not healthy", _COMMAND_S)
    image = images.linux()
    initrd = lab.folder.path / "linux.cpio"  # the host sees this machine's files
    initrd.write_bytes(image.initrd)
    host.write("/run/vm9.xml", guests.linux_xml(_VM, image.kernel, str(initrd)))
    host.virsh("define", "--validate", "/run/vm9.xml", timeout_s=_COMMAND_S)
    began = time.monotonic()
    host.virsh("start", _VM.name, timeout_s=_COMMAND_S)
    started = time.monotonic()
    lab.wait_for_guest(_VM, "READY", _BOOT_S)
    ready = time.monotonic()
    done = host.run(sys.executable, "-c", _IN_GUEST, _VM.channel, str(_RUN_S), timeout_s=_RUN_S + _COMMAND_S)
    print(f"start {started - began:.0f} s, boot {ready - started:.0f} s, vectorAdd {time.monotonic() - ready:.0f} s")
    host.virsh("destroy", _VM.name, timeout_s=_COMMAND_S)
    assert "vectorAdd: PASS" in done.stdout


def _is_healthy(bench: Bench) -> bool:
    cards = {row["address"]: row for row in bench.lab.client().get("/cards")}
    return bool(cards.get(_SHARED.address, {}).get("verdict") == "healthy")
