"""The HTTP API: routes, limits, errors as `{"error", "kind"}`, and the server on its unix socket.

What an answer contains is decided in hooks.py and resources.py. No answer carries a traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from socket import socket
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmpool.api import access
from kvmpool.api.card_modes import CardModes
from kvmpool.api.client import kind_of
from kvmpool.api.domains import Domains, route_domains
from kvmpool.api.hooks import HookCall, Hooks
from kvmpool.api.resources import Cordon, Resources
from kvmpool.api.runs import Runs
from kvmpool.errors import Conflict, DeadlinePassed, Denied, KvmpoolError, NotFound, Refused, Unreachable

log = logging.getLogger("kvmpool.api")

HOOK_BODY_MAX = 64 << 20  # the hook hands on at most 16 MiB of XML; JSON may write a byte as six
BODY_MAX = 64 << 10
GRACE_S = 1  # for requests under way when the daemon stops; followers of events never end by themselves

_TOO_LARGE = "the request's body is larger than allowed"
_STATUS: tuple[tuple[type[KvmpoolError], int], ...] = (
    (Denied, 403),
    (Refused, 409),
    (NotFound, 404),
    (Conflict, 409),
    (DeadlinePassed, 504),
    (Unreachable, 503),
)


class HookBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    domain: str
    subop: str = ""
    extra: str = "-"
    xml: str


class ReasonBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    reason: str = ""


class ModeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    mode: str
    dry_run: bool = False


def build_app(
    hooks: Hooks,
    resources: Resources,
    group: str,
    runs: Runs | None = None,
    modes: CardModes | None = None,
    domains: Domains | None = None,
) -> ASGIApp:
    """The ASGI application. `group`: whose members may call."""
    app = FastAPI(title="kvmpool", docs_url=None, redoc_url=None, openapi_url=None)
    _handle_errors(app)
    _route_hooks(app, hooks)
    _route_reads(app, resources)
    _route_wishes(app, resources)
    if runs is not None:
        _route_runs(app, runs)
    if modes is not None:
        _route_modes(app, modes)
    if domains is not None:
        route_domains(app, domains)
    return _Guard(app, group)


class Server(uvicorn.Server):
    """uvicorn inside somebody's TaskGroup: leaves the process's signals alone."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=access.PeerProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                limit_concurrency=256,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=GRACE_S,
                h11_max_incomplete_event_size=32 << 10,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_on(self, listening: socket) -> None:
        """Serve until `should_exit`; closes the socket."""
        await self.serve(sockets=[listening])


# --- errors -----------------------------------------------------------------------------------------------------------


def _failure(status: int, message: str, kind: str) -> JSONResponse:
    return JSONResponse({"error": " ".join(message.split()), "kind": kind}, status_code=status)


def answer_to(error: KvmpoolError) -> JSONResponse:
    """The answer that carries a typed error; api/client.py makes the same error of it again."""
    status = next((status for cls, status in _STATUS if isinstance(error, cls)), 500)
    return _failure(status, str(error), kind_of(error))


def _our_fault() -> JSONResponse:
    return _failure(500, "kvmpoold failed to answer. Next: journalctl -u kvmpoold", "failure")


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(KvmpoolError)
    async def _known(_: Request, error: KvmpoolError) -> JSONResponse:
        return answer_to(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _failure(400, f"the request is not valid: {where}: {first['msg']}", "refused")

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        kind = "not-found" if error.status_code == 404 else "refused"
        return _failure(error.status_code, f"{request.method} {request.url.path}: {error.detail}", kind)

    @app.exception_handler(Exception)
    async def _ours(_: Request, __: Exception) -> JSONResponse:
        return _our_fault()  # starlette raises it again behind the answer: _Guard logs it


class _TooLarge(Exception):
    pass


class _Guard:
    """Around the application: the peer's rights before anything is read, the body's limit, errors' last resort."""

    def __init__(self, app: ASGIApp, group: str) -> None:
        self._app = app
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            access.check(scope["state"]["peer"], scope["path"], self._group)
            limit = HOOK_BODY_MAX if scope["path"].startswith("/v1/hooks/") else BODY_MAX
            await self._app(scope, _limited(scope, receive, limit), sending)
            return
        except KvmpoolError as error:
            answer = answer_to(error)
        except _TooLarge as error:
            answer = _failure(413, f"{scope['method']} {scope['path']}: {error}", "refused")
        except Exception:  # noqa: BLE001  the edge: a fault of ours must not end the daemon nor show a traceback
            log.exception("%s %s failed", scope["method"], scope["path"])
            answer = _our_fault()
        if not begun:
            await answer(scope, receive, send)


def _limited(scope: Scope, receive: Receive, limit: int) -> Receive:
    headers = dict(scope["headers"])
    claimed = headers.get(b"content-length", b"0")
    if not claimed.isdigit() or int(claimed) > limit:
        raise _TooLarge(_TOO_LARGE)
    seen = 0

    async def receiving() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise HTTPException(413, _TOO_LARGE)  # FastAPI lets this one through from where it reads the body
        return message

    return receiving


# --- routes -----------------------------------------------------------------------------------------------------------


def _route_hooks(app: FastAPI, hooks: Hooks) -> None:
    @app.post("/v1/hooks/{op}")
    async def _hook(op: str, body: HookBody) -> dict[str, Any]:
        await hooks.call(op, HookCall(body.domain, body.subop, body.extra, body.xml))
        return {}


def _route_reads(app: FastAPI, resources: Resources) -> None:
    reads: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("/v1/status", resources.status),
        ("/v1/hosts", resources.hosts),
        ("/v1/cards", resources.cards),
        ("/v1/cards/{named:path}", resources.card),
        ("/v1/claims", resources.claims),
        ("/v1/claims/{domain}/{name}/explain", resources.explain),
        ("/v1/claims/{domain}/{name}", resources.claim),
        ("/v1/bindings", resources.bindings),
        ("/v1/bindings/{label:path}", resources.binding),
        ("/v1/domains", resources.domains),
        ("/v1/breaker", resources.breaker),
    )
    for path, read in reads:
        app.get(path, response_model=None)(read)

    @app.get("/v1/metrics")
    async def _metrics() -> PlainTextResponse:
        return PlainTextResponse(await resources.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/events", response_model=None)
    async def _events(follow: bool = False, last: Annotated[int, Query(ge=0)] = 0) -> Any:
        if not follow:
            return JSONResponse(await resources.events())
        return StreamingResponse(_lines(resources.follow(last)), media_type="application/x-ndjson")


async def _lines(bodies: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for body in bodies:
        yield json.dumps(body).encode() + b"\n"


def _route_wishes(app: FastAPI, resources: Resources) -> None:
    @app.post("/v1/cards/{card:path}/cordon")
    async def _cordon(request: Request, card: str, body: Annotated[ReasonBody, Body()]) -> Any:
        return await resources.cordon(card, Cordon.CORDON, body.reason, _by(request))

    @app.post("/v1/cards/{card:path}/drain")
    async def _drain(request: Request, card: str, body: Annotated[ReasonBody, Body()]) -> Any:
        return await resources.cordon(card, Cordon.DRAIN, body.reason, _by(request))

    @app.post("/v1/cards/{card:path}/uncordon")
    async def _uncordon(request: Request, card: str) -> Any:
        return await resources.cordon(card, Cordon.UNCORDON, "", _by(request))

    @app.post("/v1/cards/{card:path}/restore")
    async def _restore(request: Request, card: str, body: Annotated[ReasonBody, Body()]) -> Any:
        return await resources.restore(card, body.reason, _by(request))

    @app.post("/v1/breaker/close")
    async def _close(request: Request) -> Any:
        return await resources.close_breaker(_by(request))

    @app.post("/v1/domains/{domain:path}/claims")
    async def _add(domain: str, attributes: Annotated[dict[str, str], Body()]) -> Any:
        return await resources.add_claim(domain, attributes)

    @app.delete("/v1/domains/{domain:path}/claims/{name}")
    async def _remove(domain: str, name: str) -> Any:
        await resources.remove_claim(domain, name)
        return {}


def _route_runs(app: FastAPI, runs: Runs) -> None:
    @app.post("/v1/runs")
    async def _run(request: Request, attributes: Annotated[dict[str, str], Body()]) -> Any:
        return await runs.start(attributes, request.scope["state"]["peer"])


def _route_modes(app: FastAPI, modes: CardModes) -> None:
    @app.post("/v1/cards/{card:path}/mode")
    async def _mode(request: Request, card: str, body: Annotated[ModeBody, Body()]) -> Any:
        return await modes.ask(card, body.mode, dry_run=body.dry_run, by=_by(request))


def _by(request: Request) -> str:
    peer: access.Peer = request.scope["state"]["peer"]
    return access.user_of(peer)
