"""The host daemon: config -> adapters -> loops and API. The only place that chooses implementations.

    kvmpoold [--config FILE] [--check] [--version]

One event loop, one TaskGroup. SIGTERM ends it and disturbs nothing: workers, relays and guests go on, and the next
daemon finds them. An adapter that cannot work now (no libvirt, no driver) says so in the status and is asked again.
"""

from __future__ import annotations

import argparse
import asyncio
import grp
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from starlette.types import ASGIApp

from kvmpool import __version__
from kvmpool.api import access
from kvmpool.api.app import Server, build_app
from kvmpool.api.boot_starts import BootStarts, StartingPlugs
from kvmpool.api.card_modes import CardModes
from kvmpool.api.domains import Domains
from kvmpool.api.hooks import Hooks
from kvmpool.api.resources import Resources
from kvmpool.api.runs import Runs
from kvmpool.core.model import DomainSeen, HostName, WorkerSeen
from kvmpool.daemon import journal
from kvmpool.daemon.card_loop import CardLoop
from kvmpool.daemon.clock import HostClock
from kvmpool.daemon.cluster_loop import ClusterLoop
from kvmpool.daemon.config import DEFAULT_FILE, Config, DataplaneSection, load
from kvmpool.daemon.domain_loop import DomainLoop
from kvmpool.daemon.ledger import Ledger
from kvmpool.daemon.notify import feed, notify, watchdog_s
from kvmpool.daemon.seen import SeenDomains, SeenWorkers
from kvmpool.daemon.switches import parsed
from kvmpool.daemon.turns import Loop
from kvmpool.daemon.vsock import VsockDomains
from kvmpool.daemon.wake import follow
from kvmpool.dataplane.acceptor import Acceptor
from kvmpool.dataplane.local import LocalPlaces
from kvmpool.dataplane.processes import HostProcesses
from kvmpool.dataplane.relays import VSOCK_PORT, ProcessRelays
from kvmpool.dataplane.workers import Confinement, ProcessWorkers
from kvmpool.device.cards import SystemCards
from kvmpool.device.health_source import SystemHealthSource
from kvmpool.device.modprobe import modprobe
from kvmpool.device.vfio import LOOK_DEADLINE_S, VfioModes
from kvmpool.errors import KvmpoolError, Refused
from kvmpool.ports import Hypervisor
from kvmpool.store.sqlite import SqliteStore
from kvmpool.virt.connection import Libvirt

log = logging.getLogger("kvmpool.kvmpoold")

# A turn asks ports that have deadlines of some seconds each; one that takes this long stands still.
TURN_LIMIT_S = 20.0
END_S = 2.0  # for the requests under way, then for the loops
LEAVE_S = 8.0  # the unit's TimeoutStopSec is 10 s


@dataclass(frozen=True, slots=True)
class _Observed:
    """api.resources.Observed: the last looks of the loops."""

    seen_domains: SeenDomains
    cards: SystemCards
    seen_workers: SeenWorkers

    def domains(self) -> tuple[DomainSeen, ...]:
        return self.seen_domains.last

    async def workers(self) -> tuple[WorkerSeen, ...]:
        return await self.seen_workers.now()

    def libvirt_fault(self) -> str:
        return self.seen_domains.fault

    def nvml_fault(self) -> str:
        return self.cards.nvml_fault


class Daemon:
    """Everything that runs in one kvmpoold, made and not yet started."""

    def __init__(self, config: Config) -> None:
        """Raises Refused where another daemon has the store, Unreachable where the socket cannot be made."""
        self.config = config
        self.clock = HostClock()
        host = HostName(config.host.name)
        self.store = SqliteStore(config.store_file, self.clock)
        try:
            self.listening = access.listen(config.socket, config.api.group)
        except KvmpoolError:
            asyncio.get_running_loop().create_task(self.store.close())
            raise
        run = config.run_dir
        self.libvirt = Libvirt(config.libvirt.uri, str(run / "guests"), config.originals_dir, config.plug.answer_s)
        device = config.device
        self.cards = self._cards()
        self.modes = self._modes()
        self.health = self._health()
        relays = self._relays()
        workers = ProcessWorkers(run / "workers", confinement=_confinement(config.dataplane))
        seen = _Observed(SeenDomains(self._hypervisor()), self.cards, SeenWorkers(workers))
        settings = config.settings
        self.cluster = ClusterLoop(self.store, self.clock, host, settings)
        self.card = CardLoop(
            self.store,
            self.clock,
            host,
            self.cards,
            [self.health],
            seen.seen_workers,
            limits=config.health,
            inventory_interval_s=device.inventory_interval_s,
            modes=self.modes,
            initial_modes=parsed(config.cards.modes, config.cards.default_mode),
        )
        self.processes = HostProcesses()
        self.ledger = Ledger(self.store, self.clock, host)
        self.hooks = Hooks(self.store, self.ledger, self.clock, settings, self.wake)
        self.starts = BootStarts(self.libvirt, self.hooks)
        self.domain = self._domain_loop(seen.seen_domains, relays)
        self.loops: tuple[Loop, ...] = (self.cluster, self.card, self.domain)
        self.server = Server(self._api(seen))

    def _api(self, seen: _Observed) -> ASGIApp:
        config, run = self.config, self.config.run_dir
        resources = Resources(
            self.store, self.ledger, config.store.kind, self.clock, config.settings, seen, self.libvirt, self.wake
        )
        runs = Runs(self.hooks, self.ledger, LocalPlaces(run / "relays", run / "guests"), self.processes)
        card_modes = CardModes(resources, self.ledger, self.modes, seen.seen_workers, self.wake)
        domains = Domains(self.libvirt, self.starts, resources, self.clock, self.wake)
        return build_app(self.hooks, resources, config.api.group, runs, card_modes, domains)

    def _domain_loop(self, domains: SeenDomains, relays: ProcessRelays) -> DomainLoop:
        plugs, where = StartingPlugs(self.libvirt, self.starts), (self.store, self.clock, self.ledger.host)
        tries = self.config.plug.tries
        return DomainLoop(*where, domains, relays, plugs=plugs, processes=self.processes, unplug_limit=tries)

    def _relays(self) -> ProcessRelays:
        run, keys = self.config.run_dir, self.config.dataplane
        group = _guest_group(keys.guest_group)
        return ProcessRelays(run / "relays", run / "guests", listen=keys.listen, guest_group=group)

    def _cards(self) -> SystemCards:
        device = self.config.device
        return SystemCards(
            self.clock,
            root=Path(device.sysroot),
            match=self.config.cards.match,
            nvml=device.nvml,
            look_deadline_s=device.look_deadline_s,
        )

    def _health(self) -> SystemHealthSource:
        device = self.config.device
        return SystemHealthSource(
            self.cards,
            self.clock,
            kernel_log=Path(device.kmsg) if device.kmsg else None,
            udev_source=device.udev,
            bus_poll_s=device.inventory_interval_s / 2,
        )

    def _modes(self) -> VfioModes:
        sysroot = self.config.device.sysroot
        return VfioModes(
            Path(sysroot),
            self.config.modes_dir,
            self.clock.boot_id(),
            self.cards.addresses,
            let_go=self.cards.let_go,
            load=modprobe if sysroot == "/" else None,  # of another tree the kernel has no modules
            look_deadline_s=max(LOOK_DEADLINE_S, self.config.device.look_deadline_s),
        )

    def _hypervisor(self) -> Hypervisor:
        """libvirt; where guests dial by vsock, with the acceptor's map kept beside it."""
        kind, _, port = self.config.dataplane.listen.partition(":")
        if kind != "vsock":
            return self.libvirt
        run = self.config.run_dir
        return VsockDomains(self.libvirt, Acceptor(run / "acceptor", run / "relays", port=int(port or VSOCK_PORT)))

    def wake(self, why: str) -> None:
        """All loops look again; the domains are asked for anew."""
        log.debug("woken: %s", why)
        for loop in self.loops:
            loop.wake.ring()
        self.domain.refresh()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Ends by itself only with an exception."""
        try:
            await self._remember()
            for line in await self.modes.recover():
                log.warning("%s", line)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop.run(), name=loop.name) for loop in self.loops]
                bells = [loop.wake.ring for loop in self.loops]
                tasks.append(group.create_task(follow(self.store, self.clock, bells), name="follow"))
                serving = group.create_task(self.server.run_on(self.listening), name="api")
                interval_s = watchdog_s()
                if interval_s is not None:
                    feeding = feed(self.loops, self.clock, TURN_LIMIT_S, interval_s / 3)
                    tasks.append(group.create_task(feeding, name="watchdog"))
                log.info("host %s: kvmpoold %s answers on %s", self.config.host.name, __version__, self.config.socket)
                notify(f"READY=1\nSTATUS=answers on {self.config.socket}")
                await stop.wait()
                log.info("host %s: kvmpoold ends; guests, workers and relays go on", self.config.host.name)
                notify("STOPPING=1")
                self.server.should_exit = True
                await asyncio.wait({serving}, timeout=END_S)
                await _let_go({*tasks, serving})
        finally:
            await self._close()

    async def _remember(self) -> None:
        """Which card was where, as the last daemon published it: a card that is silent now still has its name."""
        for card in (await self.ledger.read()).rows.cards.values():
            if card.host == self.config.host.name:
                self.cards.remember(card.id, card.address, card.pci)

    async def _close(self) -> None:
        for loop in self.loops:
            await loop.close()
        self.processes.close()
        await self.health.close()
        await self.cards.close()
        await self.libvirt.close()
        await self.store.close()
        self.config.socket.unlink(missing_ok=True)


def _guest_group(named: str) -> str:
    """QEMU's group: its processes read endpoint and token of their guest. Named as Debian, Fedora, others do."""
    if named != "auto":
        return named
    known = {entry.gr_name for entry in grp.getgrall()}
    return next((group for group in ("libvirt-qemu", "qemu", "kvm") if group in known), "")


def _confinement(keys: DataplaneSection) -> Confinement:
    return Confinement(
        user=keys.worker_user,
        memory_mib=keys.session_memory_mib,
        tasks=keys.session_tasks,
        cpus=keys.session_cpus,
        pinned_mib=keys.pinned_mib,
        launch_timeout_s=keys.launch_timeout_s,
        mps=keys.mps,
    )


async def _let_go(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: asyncio.wait_for of Python 3.11 may swallow one cancellation."""
    until = asyncio.get_running_loop().time() + END_S
    while tasks and asyncio.get_running_loop().time() < until:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.2)
    if tasks:
        log.error("these do not end: %s; leaving without them", ", ".join(sorted(task.get_name() for task in tasks)))
        _leave(1)


def _leave(status: int) -> NoReturn:
    """End now: a thread that hangs in a driver or in libvirt must not hold up a restart. Nothing is left to save."""
    logging.shutdown()
    os._exit(status)


async def _main(config: Config) -> None:
    stop = asyncio.Event()
    running = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        running.call_later(LEAVE_S, _leave, 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, end)
    await Daemon(config).run(stop)


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of the `kvmpoold` script. Exit codes: 0 ended by a signal, 2 usage, 4 refused, 6 else."""
    options = _parse(argv)
    try:
        config = load(options.config)
        if options.check:
            files = ", ".join(config.files) or f"{DEFAULT_FILE} is missing, the defaults hold"
            print(f"the configuration is good ({files})")
            return
        journal.set_up()
        asyncio.run(_main(config))
        _leave(0)
    except BaseExceptionGroup:
        log.exception("kvmpoold ends: a part of it that must not end has")
        _leave(1)
    except KvmpoolError as error:
        for line in str(error).splitlines():
            print(f"kvmpoold: {line}", file=sys.stderr)
        sys.exit(4 if isinstance(error, Refused) else 6)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvmpoold", description="The host daemon of kvmpool.")
    parser.add_argument("--config", type=Path, help=f"configuration file [default: {DEFAULT_FILE}]")
    parser.add_argument("--check", action="store_true", help="read the configuration, tell every fault, and exit")
    parser.add_argument("--version", action="version", version=f"kvmpoold {__version__}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
