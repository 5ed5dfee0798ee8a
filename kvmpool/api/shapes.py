"""The JSON bodies of the API as types: what resources.py answers, what the CLI prints. Every field is always present.

Sizes in MiB, compute in percent of one card, times in wall-clock seconds (for display). "" means: none.
"""

from __future__ import annotations

from typing import TypedDict


class StatusBody(TypedDict):
    """GET /v1/status"""

    host: str
    version: str
    leader: str
    store: str  # "sqlite, revision 120"
    libvirt: str  # "connected" or why not
    nvml: str  # "ok" or why not
    paused: bool
    breaker: str  # "" closed, else why it is open
    hosts: list[HostBody]
    cards: list[CardBody]
    claims: list[ClaimBody]
    faults: list[str]  # store rows that could not be read, config in force that is not what the file says, ...


class HostBody(TypedDict):
    """GET /v1/hosts -> list"""

    name: str
    state: str  # "up", "down"
    version: str
    boot_id: str
    cards: int
    cards_healthy: int
    bindings: int


class CardBody(TypedDict):
    """GET /v1/cards -> list; GET /v1/cards/{id | host/address | unique prefix of the uuid} -> one"""

    id: str
    host: str
    address: str
    label: str  # host/address
    model: str
    mode: str  # the one it is in
    mode_wish: str  # the one it is to be in; "": as it is found
    mode_ticket: int  # of the last wish for a mode
    mode_answered: int  # of the last such wish that was carried out or refused
    mode_fault: str  # why it is not in the mode that is wished for
    iommu_group: str
    functions: list[str]  # addresses that change their driver with it
    verdict: str
    reason: str
    since_s: float  # age of the verdict
    cordoned: bool  # nothing new
    drain: bool  # nothing new, and what it has moves where there is room
    cordon_reason: str
    driver: str
    compute_capability: str
    numa_node: int
    memory_mib: int
    memory_taken_mib: int  # by binding rows, in any phase
    compute_taken_percent: int
    last_xid: int
    app_xids: int
    bindings: list[str]  # labels


class ModeBody(TypedDict):
    """POST /v1/cards/{id}/mode {"mode": ..., "dry_run": bool}"""

    card: CardBody
    steps: list[str]  # what is to be done, or would be; none where the card is in that mode


class ClaimBody(TypedDict):
    """GET /v1/claims -> list; GET /v1/claims/{domain name or uuid}/{claim} -> one"""

    domain: str
    uuid: str
    name: str
    label: str  # domain/name
    state: str  # "served", "starting", "waiting", "inactive", "invalid"
    host: str
    mode: str
    serves: str  # in which mode it is bound now, "vgpu" or "passthrough"; "": it is not bound
    memory_mib: int
    memory_limit_mib: int
    compute_percent: int  # 0: best effort
    compute_limit_percent: int  # 100: none
    priority: int
    preemptible: bool
    on_failure: str
    binding: str  # label
    card: str  # label
    endpoint: str
    reason: str  # why it waits or is invalid, or is served in another mode than its first


class DomainBody(TypedDict):
    """GET /v1/domains/{name or uuid}, POST .../start and .../stop -> one; `state` in libvirt's words"""

    name: str
    uuid: str
    state: str
    claims: list[ClaimBody]


class DefinedBody(TypedDict):
    """POST /v1/domains {name, memory, vcpus, disks, networks, gpus, cdrom, uefi, only_print} -> what was defined"""

    name: str
    uuid: str
    claims: list[str]  # names
    xml: str


class BindingBody(TypedDict):
    """GET /v1/bindings -> list; GET /v1/bindings/{label or domain/claim} -> one"""

    label: str
    domain: str
    uuid: str
    claim: str
    generation: int
    phase: str
    reason: str
    mode: str
    card: str  # label
    card_id: str
    card_host: str
    memory_mib: int
    memory_limit_mib: int
    memory_used_mib: int  # as its worker says; 0 where no worker answers
    pinned_mib: int  # page-locked host memory that the guest may have; likewise
    pinned_used_mib: int
    compute_percent: int  # 0: best effort
    compute_limit_percent: int  # 100: none
    sessions: int
    transports: list[str]  # of its sessions: shm, unix, tcp, vsock
    worker: str  # address
    worker_pid: int
    endpoint: str
    pointed: bool  # the domain's relay serves this generation; in mode passthrough: its card is in the domain


class EventBody(TypedDict):
    """GET /v1/events -> list, oldest first; ?follow=1[&last=N]: one JSON object a line, the last N first, no end"""

    at: float  # wall clock
    host: str
    subject: str
    kind: str
    reason: str


class CardReason(TypedDict):
    card: str  # label
    fits: bool
    reason: str  # first failing predicate, or the score's terms


class ExplainBody(TypedDict):
    """GET /v1/claims/{domain}/{name}/explain"""

    label: str
    state: str
    serves: str  # as of a claim
    binding: str
    reason: str
    cards: list[CardReason]


class BreakerBody(TypedDict):
    """GET /v1/breaker"""

    open: bool
    reason: str
    recent: list[str]


class ErrorBody(TypedDict):
    """Any answer with a status >= 400; `kind` is api.client.kind_of's word."""

    error: str
    kind: str


# POST /v1/cards/{id}/cordon, /drain, /restore {"reason": "..."} and /uncordon -> CardBody
# POST /v1/breaker/close -> BreakerBody
# GET /v1/domains -> [{"name", "uuid", "state"}], as libvirt has them
# POST /v1/domains/{name}/claims {attributes of <claim>: text} -> ClaimBody
# POST /v1/claim-xml {attributes of <claim>: text} -> {"xml": the <metadata> of that claim}
# DELETE /v1/domains/{name}/claims/{claim} -> {}
#   (edits the domain's metadata through libvirt, validated; a running domain's live claims change at its next start)
