"""What a host remembers of its plugs: which failures count, and how long it waits after one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmpool.core.model import AttachDevice, Generation, Mode
from kvmpool.daemon.plugging import Plugging
from kvmpool.errors import DeadlinePassed, KvmpoolError, Refused, Unreachable
from tests.core.build import binding, card, claim

VM = claim(0)
ATTACH = AttachDevice(VM.key.domain, replace(binding(VM, card()), mode=Mode.PASSTHROUGH), "0000:41:00.0")
KEY = (VM.key, Generation(ATTACH.binding.generation))


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (Refused("libvirt: No more available PCI slots"), 1),
        (Unreachable("libvirt: internal error: unable to execute QEMU command 'device_add'"), 1),
        (DeadlinePassed("libvirt: cannot acquire state change lock (held by monitor=remoteDispatchDomainCreate)"), 0),
    ],
)
def test_an_attach_that_waits_for_the_domain_s_lock_is_no_failure_of_its_card(
    error: KvmpoolError, counted: int
) -> None:
    plugging = Plugging()
    assert plugging.failed(ATTACH, error, 100.0) == 5.0
    assert plugging.failures.get(KEY, (0, ""))[0] == counted
    assert plugging.at == {VM.key.domain: 100.0}, "a list from before says nothing of it"
