"""The story that `kvmpool lab demo` tells: a guest gets a vGPU, its card dies, the same running guest computes on.

It looks from where people look: virsh, kvmpool's API, programs in the guest. Whatever is not as it must be ends it with
an error, after everything was cleaned up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvmpool.errors import KvmpoolError
from kvmpool.lab import leftovers, process
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.hosts import Host
from kvmpool.lab.pool import Lab

T = TypeVar("T")

GUEST = GuestSpec("vm0", 1, ('name="gpu0" mode="vgpu" memory="1024"',))
_CLAIM = f"{GUEST.name}/gpu0"
_FAILOVER_S = 10.0  # the goal is 2 s (make bench measures it); past this the demo has failed
_RELEASE_S = 5.0
_PROGRAM_S = 40.0


class Wrong(KvmpoolError):
    """The story did not go as it must."""


def tell(lab: Lab, say: Callable[[str], None], *, keep: bool = False) -> None:
    """Tell it, about 20 lines with times. Raises Wrong or another KvmpoolError when something is not as it must be."""
    story = _Story(lab, say)
    lab.down()
    host = lab.up(story.line)
    left = leftovers.footprint(host)
    try:
        story.play(host)
    finally:
        if not keep:
            lab.down()
    if keep:
        return
    if remains := leftovers.remains(left):
        raise Wrong(f"the lab left something behind: {'; '.join(remains[:3])}")
    story.line("lab down: no process, mount, namespace or file of it is left")


@dataclass(slots=True)
class _Story:
    lab: Lab
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)

    def line(self, text: str) -> None:
        self.say(f"{time.monotonic() - self.began:6.2f} s  {text}")

    def play(self, host: Host) -> None:
        self._cards(host)
        self._start(host)
        before = self._device()
        self._compute()
        self._fail_card(host)
        after = self._device()
        if after != before:
            changed = [name for name, value in before.items() if after.get(name) != value]
            raise Wrong(f"the guest's device changed its {', '.join(changed)}: {before} became {after}")
        self.line("the guest was not restarted and has the same endpoint, uuid and memory size")
        self._compute()
        self._stop(host)

    def _cards(self, host: Host) -> None:
        healthy = _until(lambda: self._all_healthy(host), 10.0, "the cards did not become healthy")
        for card in healthy:
            self.line(f"card {card['label']}: {card['model']}, {card['memory_mib']} MiB, {card['verdict']}")

    def _all_healthy(self, host: Host) -> list[dict[str, Any]] | None:
        cards: list[dict[str, Any]] = self.lab.client(host).get("/cards")
        return cards if len(cards) == 2 and all(card["verdict"] == "healthy" for card in cards) else None

    def _start(self, host: Host) -> None:
        self.lab.define(host, GUEST)
        self.line(f"virsh define {GUEST.name}: claims {GUEST.claims[0]}")
        host.virsh("start", GUEST.name)
        binding = self._binding(host)
        if binding is None:
            raise Wrong(f"virsh start {GUEST.name} succeeded without a binding")
        self.line(f"virsh start {GUEST.name}: binding {binding['label']} on {binding['card']}, {binding['phase']}")
        self.lab.wait_for_guest(host, GUEST)
        self.line(f"guest {GUEST.name} has booted Linux; its libcuda.so.1 is kvmpool's shim")

    def _device(self) -> dict[str, str]:
        """What the guest knows of its GPU: endpoint, uuid, memory; and the id of its own boot."""
        endpoint = self._in_guest("cat /run/kvmpool/endpoint", 10.0).strip()
        boot = self._in_guest("cat /proc/sys/kernel/random/boot_id", 10.0).strip()
        said = self._in_guest("deviceQuery")
        fields = dict(re.findall(r"^\s*(\S[^:\n]*?)\s*:\s*(\S.*?)\s*$", said, re.MULTILINE))
        if missing := [name for name in ("name", "uuid", "memory MiB") if not fields.get(name)]:
            raise Wrong(f"guest: deviceQuery does not say {', '.join(missing)}: {said.strip()[-300:]}")
        self.line(f"guest: deviceQuery: {fields['uuid']}, {fields['memory MiB']} MiB, endpoint {endpoint}")
        return {"endpoint": endpoint, "boot": boot, **fields}

    def _in_guest(self, script: str, timeout_s: float = _PROGRAM_S) -> str:
        """What it printed. Raises Wrong unless it exits with 0."""
        ran = self.lab.run(GUEST.name, script, timeout_s)
        if ran.code != 0:
            raise Wrong(f"guest: {script}: exit {ran.code}: {ran.output.strip()[-300:]}")
        return ran.output

    def _compute(self) -> None:
        for program in ("vectorAdd", "matrixMul"):
            said = self._in_guest(program).strip().splitlines()
            self.line(f"guest: {program}: {said[-1] if said else 'exit 0'}")

    def _fail_card(self, host: Host) -> None:
        old = self._binding(host)
        if old is None:
            raise Wrong(f"the binding of {_CLAIM} is gone before its card failed")
        began = time.monotonic()
        self.lab.fault(old["card"].partition("/")[2], "xid 79")
        self.line(f"card {old['card']}: Xid 79, it has fallen off the bus")

        def moved() -> dict[str, Any] | None:
            new = self._binding(host)
            return new if new and new["generation"] > old["generation"] else None

        new = _until(moved, _FAILOVER_S, f"{_CLAIM} was not moved within {_FAILOVER_S:g} s")
        if new["card"] == old["card"]:
            raise Wrong(f"{new['label']} is on the dead card {new['card']}")
        took = time.monotonic() - began
        self.line(f"binding {new['label']} on {new['card']}, ready {took:.2f} s after the fault; was {old['label']}")

    def _binding(self, host: Host) -> dict[str, Any] | None:
        """The claim's binding that is ready and that its relay serves."""
        rows: list[dict[str, Any]] = self.lab.client(host).get("/bindings")
        ours = [row for row in rows if row["label"].startswith(_CLAIM + "#")]
        ready = [row for row in ours if row["phase"] == "ready" and row["pointed"]]
        return max(ready, key=lambda row: int(row["generation"]), default=None)

    def _stop(self, host: Host) -> None:
        host.virsh("destroy", GUEST.name)
        began = time.monotonic()
        client = self.lab.client(host)
        _until(lambda: True if not client.get("/bindings") else None, _RELEASE_S, "the binding was not released")
        self.line(f"virsh destroy {GUEST.name}: its binding is released {time.monotonic() - began:.2f} s later")


def _until(look: Callable[[], T | None], seconds: float, wrong: str) -> T:
    """What `look` gives once it is not None. Raises Wrong after `seconds`."""
    seen: list[T] = []

    def found() -> bool:
        value = look()
        if value is not None:
            seen.append(value)
        return bool(seen)

    if not process.holds_within(found, seconds, 0.02):
        raise Wrong(wrong)
    return seen[0]
