"""The router as an ASGI application."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from prefillshare_server.config import Cluster
from prefillshare_server.models import checkpoint
from prefillshare_server.router.ask import Kind, parse
from prefillshare_server.router.assemble import assembled
from prefillshare_server.router.errors import RouterError, unknown_role
from prefillshare_server.router.openapi import document
from prefillshare_server.router.parts import Router
from prefillshare_server.router.respond import JSON, CallResponse, error_response, read_body
from prefillshare_server.router.roles import Roles
from prefillshare_server.router.sessions import Sessions
from prefillshare_server.router.sessions_api import SessionsApi
from prefillshare_server.router.tokenize import tokenize
from prefillshare_server.router.topology import Decoder, WorkerEndpoint

_SWEEP_S = 10.0
_PROBE_S = 5.0


def create_app(
    cluster: Cluster,
    workers: Sequence[WorkerEndpoint],
    base_dir: Path,
    decoders: Mapping[str, Decoder] | None = None,
) -> Starlette:
    """The application over running `workers`. `base_dir` has the base's tokenizer and template.

    `decoders` speak for the roles; without them each role has the workers of the pool of its name.
    Raises ConfigError if the base cannot be rendered or tokenised, or a kind of worker is missing.
    """
    max_model_len = cluster.max_model_len or checkpoint.context_length(base_dir)
    router = assembled(cluster, workers, base_dir, max_model_len)
    if decoders is None:
        decoders = {
            name: Decoder(name, pool[0].model) for name, pool in router.placement.decode.items()
        }
    roles = Roles(cluster, base_dir, decoders, router.placement, router.health, router.workers)
    api = _Api(cluster, workers, router, roles, max_model_len)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with router.workers, router.health:
            sweeping = asyncio.create_task(_sweep(router.sessions))
            try:
                yield
            finally:
                sweeping.cancel()
                await router.ahead.close()
                await router.warm_ups.close()
                await router.prefill.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{id:path}", api.model),
            *SessionsApi(router, cluster.router.max_body_mb).routes(),
            Route("/v1/roles", api.roles),
            Route("/v1/roles/{name}", api.set_role, methods=["PUT"]),
            Route("/v1/roles/{name}", api.remove_role, methods=["DELETE"]),
            Route("/v1/workers", api.workers),
            Route("/v1/workers/{id}/drain", api.drain, methods=["POST"]),
            Route("/v1/workers/{id}/drain", api.undrain, methods=["DELETE"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/openapi.json", api.openapi),
            Route("/health", api.health),
            Route("/live", api.live),
            Route("/metrics", api.metrics),
        ],
        exception_handlers={
            RouterError: _on_router_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
        lifespan=lifespan,
    )
    app.state.router = router
    return app


class _Api:
    """The endpoints."""

    def __init__(
        self,
        cluster: Cluster,
        workers: Sequence[WorkerEndpoint],
        router: Router,
        roles: Roles,
        max_model_len: int,
    ) -> None:
        self._base_name = cluster.base.name
        self._prefill = cluster.prefill
        self._max_body_mb = cluster.router.max_body_mb
        self._workers = workers
        self._router = router
        self._roles = roles
        self._max_model_len = max_model_len
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._call("chat", request)

    async def completions(self, request: Request) -> Response:
        return await self._call("completions", request)

    async def _call(self, kind: Kind, request: Request) -> Response:
        ask = parse(
            kind,
            await read_body(request, self._max_body_mb),
            request.headers,
            roles=self._roles.decoders,
            base_name=self._base_name,
            separate=self._prefill.separate,
            warms_up=self._prefill.warm_ups > 0,
        )
        return CallResponse(self._router, ask)

    async def models(self, _: Request) -> Response:
        cards = [self._card(role, "role") for role in self._roles.decoders]
        return JSON({"object": "list", "data": [*cards, self._card(self._base_name, "base")]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name == self._base_name:
            return JSON(self._card(name, "base"))
        if name not in self._roles.decoders:
            raise unknown_role(name, self._roles.decoders)
        return JSON(self._card(name, "role"))

    def _card(self, name: str, kind: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "prefillshare",
            "parent": self._base_name if kind == "role" else None,
            "max_model_len": self._max_model_len,
            "prefillshare": {"kind": kind, "callable": kind == "role"},
        }

    async def tokenize(self, request: Request) -> Response:
        answer = await tokenize(
            self._router,
            await read_body(request, self._max_body_mb),
            request.headers,
            roles=self._roles.decoders,
            base_name=self._base_name,
            max_model_len=self._max_model_len,
        )
        return JSON(answer)

    async def roles(self, _: Request) -> Response:
        return JSON({"object": "list", "data": self._roles.report()})

    async def set_role(self, request: Request) -> Response:
        """Add a role, or give it another adapter. Calls that run keep the one they began with."""
        body = await read_body(request, self._max_body_mb)
        return JSON(await self._roles.set(request.path_params["name"], body))

    async def remove_role(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._roles.remove(name)
        return JSON({"id": name, "object": "prefillshare.role.deleted", "deleted": True})

    async def workers(self, _: Request) -> Response:
        data = [self._worker(worker) for worker in self._workers]
        return JSON({"object": "list", "data": data})

    async def drain(self, request: Request) -> Response:
        """Give a worker nothing new; it may be stopped once its `in_flight` is 0."""
        self._router.health.drain(request.path_params["id"])
        return self._one_worker(request)

    async def undrain(self, request: Request) -> Response:
        self._router.health.undrain(request.path_params["id"])
        return self._one_worker(request)

    def _one_worker(self, request: Request) -> Response:
        [worker] = [each for each in self._workers if each.id == request.path_params["id"]]
        return JSON(self._worker(worker))

    def _worker(self, worker: WorkerEndpoint) -> dict[str, Any]:
        router = self._router
        return {
            "id": worker.id,
            "object": "prefillshare.worker",
            "phase": worker.phase,
            "pool": worker.pool,
            "roles": self._roles.served_by(worker),
            "state": router.health.state(worker.id),
            "reason": router.health.why_not(worker.id),
            "in_flight": router.prefill.in_hand(worker.id) + router.admission.decoding[worker.id],
            "reserved_blocks": router.admission.reserved[worker.id],
            "blocks": router.health.facts[worker.id].num_blocks,
        }

    async def openapi(self, _: Request) -> Response:
        """This API, described for programs."""
        return JSON(document())

    async def health(self, _: Request) -> Response:
        """200 while every worker answers."""
        states = await asyncio.gather(*map(self._state, self._workers))
        healthy = all(state == "ok" for state in states)
        ids = [worker.id for worker in self._workers]
        return JSON(
            {
                "status": "ok" if healthy else "unhealthy",
                "workers": dict(zip(ids, states, strict=True)),
            },
            status_code=200 if healthy else 503,
        )

    async def _state(self, worker: WorkerEndpoint) -> str:
        try:
            async with (
                asyncio.timeout(_PROBE_S),
                self._router.workers.request("GET", worker, "/health", phase=worker.phase),
            ):
                return "ok"
        except (RouterError, TimeoutError):
            return "unreachable"

    async def live(self, _: Request) -> Response:
        """200 while the router itself runs."""
        return JSON({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(
            self._router.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


async def _sweep(sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        sessions.sweep()


async def _on_router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return error_response(error)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # Nobody reads it.


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(
        RouterError(
            error.status_code,
            f"{request.method} {request.url.path}: {error.detail}",
            type="invalid_request_error",
            code="not_found" if error.status_code == 404 else "method_not_allowed",
            headers=error.headers,
        )
    )
