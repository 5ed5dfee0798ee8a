"""The domains of this host for who provisions VMs: define, start, stop, show. What libvirt does, virsh does as well.

Paths and statuses belong to app.py; the domain's XML is planned in virt/plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Protocol

from fastapi import Body, FastAPI
from pydantic import BaseModel, ConfigDict, Field

from kvmpool.api.boot_starts import BootStarts
from kvmpool.api.resources import Resources
from kvmpool.api.shapes import DefinedBody, DomainBody
from kvmpool.errors import NotFound, Unreachable
from kvmpool.ports import Clock
from kvmpool.virt.claim_attributes import spec_of
from kvmpool.virt.domain_xml import claims_of
from kvmpool.virt.plan import DomainPlan, checked, claims_xml, disk_of, gpu_of, memory_of

STOP_MAX_S = 3600.0
_LOOKS, _LOOK_S = 40, 0.05  # 2 s: the loop is woken, and lists the domains


class Provision(Protocol):
    """libvirt's side of it (virt/connection.py)."""

    async def define(self, plan: DomainPlan, *, only_print: bool) -> str: ...

    async def stop(self, domain: str, *, force: bool, timeout_s: float) -> None: ...


class DefineBody(BaseModel):
    """POST /v1/domains. `disks`, `memory`, `gpus`, `networks`: as `kvmpool domain define` takes them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    memory: str
    vcpus: int = 1
    disks: Annotated[list[str], Field(max_length=16)] = []
    networks: Annotated[list[str], Field(max_length=16)] = []
    gpus: Annotated[list[str], Field(max_length=64)] = []
    cdrom: str = ""
    uefi: bool = False
    only_print: bool = False


class StopBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    force: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=STOP_MAX_S)] = 60.0


class Domains:
    """The provisioning of one daemon's host."""

    def __init__(
        self,
        provision: Provision,
        starts: BootStarts,
        resources: Resources,
        clock: Clock,
        wake: Callable[[str], None],
    ) -> None:
        self._provision = provision
        self._starts = starts
        self._resources = resources
        self._clock = clock
        self._wake = wake

    async def define(self, body: DefineBody) -> DefinedBody:
        """Raises ClaimInvalid, Refused, Unreachable; then nothing was defined."""
        plan = checked(
            DomainPlan(
                name=body.name,
                memory_mib=memory_of(body.memory),
                vcpus=body.vcpus,
                disks=tuple(disk_of(disk) for disk in body.disks),
                networks=tuple(body.networks),
                gpus=tuple(gpu_of(gpu, number) for number, gpu in enumerate(body.gpus)),
                cdrom=body.cdrom,
                uefi=body.uefi,
            )
        )
        xml = await self._provision.define(plan, only_print=body.only_print)
        if not body.only_print:
            self._wake(f"{plan.name} defined")
        asked = claims_of(xml)
        return DefinedBody(name=asked.name, uuid=asked.uuid, claims=[spec.name for spec in asked.claims], xml=xml)

    async def claim_xml(self, attributes: dict[str, str]) -> dict[str, str]:
        """The `<metadata>` of one claim. Raises ClaimInvalid."""
        spec_of("DOMAIN", attributes)
        return {"xml": claims_xml((attributes,))}

    async def start(self, name: str) -> DomainBody:
        await self._starts.start(name)
        self._wake(f"{name} started")
        return await self._seen(name, running=True)

    async def stop(self, name: str, body: StopBody) -> DomainBody:
        await self._provision.stop(name, force=body.force, timeout_s=body.timeout_s)
        self._wake(f"{name} stopped")
        return await self._seen(name, running=False)

    async def show(self, name: str) -> DomainBody:
        """Raises NotFound."""
        for domain in await self._resources.domains():
            if name in (domain["name"], domain["uuid"]):
                claims = [claim for claim in await self._resources.claims() if claim["uuid"] == domain["uuid"]]
                return DomainBody(name=domain["name"], uuid=domain["uuid"], state=domain["state"], claims=claims)
        raise NotFound(f"no domain {name!r} on this host. Next: kvmpool domain list")

    async def _seen(self, name: str, *, running: bool) -> DomainBody:
        """The domain once the loop, which looks at libvirt on its own, has seen the change."""
        for _ in range(_LOOKS):
            try:
                body = await self.show(name)
            except NotFound:  # a transient domain is gone when it has stopped
                body = DomainBody(name=name, uuid="", state="gone", claims=[])
            if (body["state"] not in ("shut off", "gone")) is running:
                return body
            await self._clock.sleep(_LOOK_S)
        done = "started" if running else "stopped"
        raise Unreachable(f"domain {name} has {done}, but was not seen so in libvirt yet. Next: virsh domstate {name}")


def route_domains(app: FastAPI, domains: Domains) -> None:
    """The routes; GET /v1/domains is one of the reads."""

    @app.post("/v1/domains", response_model=None)
    async def _define(body: Annotated[DefineBody, Body()]) -> Any:
        return await domains.define(body)

    @app.post("/v1/claim-xml", response_model=None)
    async def _xml(attributes: Annotated[dict[str, str], Body()]) -> Any:
        return await domains.claim_xml(attributes)

    @app.post("/v1/domains/{domain}/start", response_model=None)
    async def _start(domain: str) -> Any:
        return await domains.start(domain)

    @app.post("/v1/domains/{domain}/stop", response_model=None)
    async def _stop(domain: str, body: Annotated[StopBody, Body()]) -> Any:
        return await domains.stop(domain, body)

    @app.get("/v1/domains/{domain}", response_model=None)
    async def _show(domain: str) -> Any:
        return await domains.show(domain)
