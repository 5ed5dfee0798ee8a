"""A real kvmpoold in a temp folder, over soft cards and without libvirt; its processes and its hook are real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from kvmpool.api.client import Client
from kvmpool.dataplane.relays import ProcessRelays
from kvmpool.dataplane.workers import ProcessWorkers
from kvmpool.errors import KvmpoolError
from kvmpool.host import install
from kvmpool.native import native
from kvmpool.softgpu import state as softgpu
from kvmpool.softgpu.faults import Fault

UUID = "9f1c2d3e-0000-4000-8000-000000000001"
CARDS = tuple(
    softgpu.CardSpec(
        index, f"GPU-5f0f0000-0000-4000-8000-00000000000{index}", f"0000:4{index + 1}:00.0", "Soft GPU", 4096
    )
    for index in range(2)
)


def xml(memory: str = "512", *, name: str = "vm0", uuid: str = UUID, claim: str = "gpu0") -> str:
    """A domain with one claim."""
    ours = f'<k:claim name="{claim}" mode="vgpu" memory="{memory}"/>'
    metadata = f'<metadata><k:claims xmlns:k="urn:kvmpool:domain:1">{ours}</k:claims></metadata>'
    return f"<domain type='kvm'><name>{name}</name><uuid>{uuid}</uuid>{metadata}</domain>"


class RealHost:
    """As a context: kvmpoold runs inside, and afterwards no process of it is left."""

    def __init__(self, folder: Path, *, libvirt_uri: str = "", config: str = "") -> None:
        self.folder = folder
        self.run = folder / "run"
        self.soft = folder / "soft"
        self.file = folder / "kvmpoold.toml"
        self.log = folder / "kvmpoold.log"
        self.daemon: subprocess.Popen[bytes] | None = None
        self.client = Client(self.run / "kvmpoold.sock")
        uri = libvirt_uri or f"qemu+unix:///system?socket={folder}/no-libvirt"
        self.file.write_text(
            f'[host]\nname = "h0"\n[paths]\nrun = "{self.run}"\nstate = "{folder}/state"\n[api]\ngroup = "root"\n'
            f'[device]\nkmsg = "{self.soft}/kmsg"\nsysroot = "{self.soft}"\nudev = ""\n'
            f'[libvirt]\nuri = "{uri}"\n[dataplane]\nlisten = "tcp:127.0.0.1:0"\n{config}'
        )
        softgpu.create(self.soft, CARDS)
        install.apply(install.plan_join(folder, socket=self.client.socket))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)
        asyncio.run(self._sweep())

    async def _sweep(self) -> None:
        workers = ProcessWorkers(self.run / "workers")
        relays = ProcessRelays(self.run / "relays", self.run / "guests", listen="unix")
        for relay in await relays.list():
            await relays.close(relay.domain)
        for worker in await workers.list():
            await workers.stop(worker.claim, worker.generation, worker.pid)

    # --- the daemon ---------------------------------------------------------------------------------------------------

    def start(self, *program: str, **environment: str) -> None:
        """Start it and return when it answers. `program`: a module and its options instead of kvmpoold's own."""
        libraries = {"LD_LIBRARY_PATH": str(native("softgpu-cuda").parent), "KVMPOOL_SOFTGPU": str(self.soft)}
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", *(program or ("kvmpool.kvmpoold",)), "--config", self.file],
                env=os.environ | libraries | environment,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.until(lambda: self._answers(), "kvmpoold does not answer", 60)

    def _answers(self) -> bool:
        try:
            self.client.get("/status")
        except KvmpoolError:
            assert self.daemon is not None
            assert self.daemon.poll() is None, self.log.read_text()
            return False
        return True

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit status."""
        if self.daemon is None:
            return 0
        self.daemon.send_signal(number)
        try:
            return self.daemon.wait(10)
        finally:
            self.daemon = None

    # --- what a test does ---------------------------------------------------------------------------------------------

    def hook(self, op: str, text: str, domain: str = "vm0") -> subprocess.CompletedProcess[str]:
        """The installed hook, called as libvirtd calls it."""
        subop = "end" if op in ("stopped", "release") else "begin"
        return subprocess.run(
            [self.folder / install.HOOK, domain, op, subop, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            cwd="/",
        )

    def prepare(self, text: str, domain: str = "vm0") -> None:
        done = self.hook("prepare", text, domain)
        assert done.returncode == 0, f"{done.stderr}\n{self.log.read_text()}"

    def guest(self, uuid: str = UUID, claim: str = "gpu0") -> dict[str, str]:
        """What a program of the guest needs, found as fw_cfg hands it over."""
        files = self.run / "guests" / uuid
        return {
            "LD_LIBRARY_PATH": str(native("shim").parent),
            "KVMPOOL_ENDPOINT": (files / "endpoint").read_text(),
            "KVMPOOL_TOKEN": (files / "token").read_text(),
            "KVMPOOL_CLAIM": claim,
            "KVMPOOL_NO_VSOCK": "1",
            "PATH": os.environ["PATH"],
        }

    def inject(self, card: str, words: str) -> None:
        softgpu.inject(self.soft, card, Fault.parse(words))

    def get(self, path: str) -> Any:
        return self.client.get(path)

    def until(self, what: Callable[[], object], complaint: str, limit_s: float = 30.0) -> float:
        """Seconds until `what` held."""
        begun = time.monotonic()
        while not what():
            if time.monotonic() - begun > limit_s:
                raise AssertionError(f"{complaint} within {limit_s} s\n{self.log.read_text()}")
            time.sleep(0.02)
        return time.monotonic() - begun

    def healthy(self) -> bool:
        cards = self.get("/cards")
        return len(cards) == len(CARDS) and all(card["verdict"] == "healthy" for card in cards)
