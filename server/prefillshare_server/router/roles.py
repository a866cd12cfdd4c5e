"""Roles and who speaks for them, also as they change while the cluster serves.

A call keeps the decoder it began with. What replaces an adapter has another name at the workers,
so a role never goes on with weights other than those its answer began with.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefillshare_server.config import LORA_POOL, Cluster
from prefillshare_server.config_values import ROLE_NAME
from prefillshare_server.errors import ConfigError
from prefillshare_server.launch.decoders import max_lora_rank
from prefillshare_server.models import pooled_adapter, provenance, store
from prefillshare_server.models.layout import Layout
from prefillshare_server.router.errors import (
    NoWorker,
    RouterError,
    WorkerRefused,
    WorkerSilent,
    bad_request,
    conflict,
    unknown_role,
    worker_failed,
)
from prefillshare_server.router.fanout import together
from prefillshare_server.router.health import Health
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.topology import Decoder, WorkerEndpoint
from prefillshare_server.router.workers import Workers

_LOAD_S = 60.0
_CHANGE_S = 300.0
"""For changes before it, which may have to download."""


class _Wanted(BaseModel):
    """Body of `PUT /v1/roles/{name}`."""

    model_config = ConfigDict(extra="forbid")

    adapter: str = Field(min_length=1)
    """Directory on this machine, or hub id."""
    allow_untrained: bool = False


class Roles:
    """Of one router."""

    def __init__(
        self,
        cluster: Cluster,
        base_dir: Path,
        decoders: Mapping[str, Decoder],
        placement: Placement,
        health: Health,
        workers: Workers,
    ) -> None:
        """Raises ConfigError if an adapter of the cluster file is not there."""
        self._max_rank = max_lora_rank(cluster) if cluster.has_lora_pool else 0
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Changes of a role happen in the order in which they came."""
        self._cluster = cluster
        self._base_dir = base_dir
        self._decoders = dict(decoders)
        self._adapters = {name: role.adapter for name, role in cluster.roles.items()}
        self._placement = placement
        self._health = health
        self._workers = workers

    @property
    def decoders(self) -> Mapping[str, Decoder]:
        """By role: those that calls can name now."""
        return self._decoders

    def served_by(self, worker: WorkerEndpoint) -> list[str]:
        """Roles whose calls are decoded on `worker`, or prefilled if it does nothing else.

        None for prefill workers of all roles.
        """
        if worker.phase == "prefill":
            return [name for name in self._decoders if name == worker.pool]
        return [name for name, decoder in self._decoders.items() if decoder.pool == worker.pool]

    def report(self) -> list[dict[str, Any]]:
        """What `GET /v1/roles` answers."""
        return [self._card(name) for name in self._decoders]

    async def set(self, name: str, raw: bytes) -> dict[str, Any]:
        """Serve `name` from the adapter that the JSON body `raw` names, from the next call on.

        Every worker that takes calls has loaded it before. Raises RouterError: 400 for an adapter
        that cannot be served, 409 for a role with workers of its own, 503 and 504 where a worker
        does not load it. The role then is as it was.
        """
        wanted = self._parsed(name, raw)
        async with self._alone(name):
            try:
                model = await asyncio.to_thread(self._pooled, wanted)
            except ConfigError as error:
                raise bad_request("; ".join(map(str, error.problems)), "adapter") from None
            except OSError as error:
                raise bad_request(f"the adapter cannot be read: {error}", "adapter") from None
            await self._load(model)
            self._decoders[name] = Decoder(LORA_POOL, model)
            self._adapters[name] = wanted.adapter
            return self._card(name)

    async def remove(self, name: str) -> None:
        """Refuse further calls of a role; those that run go on. Raises RouterError 404 and 409."""
        async with self._alone(name):
            if name not in self._decoders:
                raise unknown_role(name, self._decoders)
            self._require_shared(name)
            del self._decoders[name]

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        lock = self._changing[name]
        try:
            async with asyncio.timeout(_CHANGE_S):
                await lock.acquire()
        except TimeoutError:
            raise conflict(f"a change of role {name!r} is still under way; try again") from None
        try:
            yield
        finally:
            lock.release()

    def _parsed(self, name: str, raw: bytes) -> _Wanted:
        if not ROLE_NAME.fullmatch(name) or name == self._cluster.base.name:
            raise bad_request(
                f"{name!r} cannot be a role's name: lower-case letters, digits, '.', '_' and '-', "
                "and not the name of the base",
                "name",
            )
        if LORA_POOL not in self._placement.decode:
            raise conflict(
                "this cluster has no workers that adapters share; start it with a role that has "
                "an adapter, or with a section `lora: {}`"
            )
        if name in self._decoders:
            self._require_shared(name)
        pool = self._placement.prefill_pool(name)
        if pool is not None and not self._placement.prefill_workers(pool):
            raise conflict(
                f"prefill.pool is per_role and role {name!r} has no prefill workers; name it in "
                "the cluster file and start again, or set prefill.pool: shared"
            )
        try:
            return _Wanted.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or None
            raise bad_request(
                f"{field or 'the body'}: {first['msg']}; send for example "
                '{"adapter": "./planner"}',
                field,
            ) from None

    def _require_shared(self, name: str) -> None:
        if self._decoders[name].pool != LORA_POOL:
            raise conflict(
                f"role {name!r} has workers of its own; change the cluster file and start again"
            )

    def _pooled(self, wanted: _Wanted) -> str:
        """The adapter's name at the workers. May download. Raises ConfigError."""
        directory = store.resolve(wanted.adapter)
        model = pooled_adapter.pooled(self._base_dir, directory)
        rank = pooled_adapter.rank(directory)
        if rank > self._max_rank:
            raise bad_request(
                f"the adapter has rank {rank}, these workers take ranks up to {self._max_rank}; "
                f"set lora.max_lora_rank: {pooled_adapter.max_rank([rank])} in the cluster file",
                "adapter",
            )
        if not (wanted.allow_untrained or self._cluster.allow_untrained):
            layout = Layout.for_model(self._base_dir, self._cluster.layout)
            if problems := provenance.untrained(directory, self._base_dir, layout):
                raise ConfigError(*problems)
        return model

    async def _load(self, model: str) -> None:
        """Load it on every worker that takes calls; one that does not will when it is asked.

        Raises RouterError: 400 if a worker refuses it, 503 or 504 if one fails, or all are away.
        """
        pool = self._placement.decode[LORA_POOL]
        workers = [worker for worker in pool if self._health.available(worker.id)]
        if not workers:
            why = {worker.id: self._health.why_not(worker.id) or "" for worker in pool}
            raise NoWorker("no worker that could load the adapter is", 0, why)
        await together(self._load_on(worker, model) for worker in workers)

    async def _load_on(self, worker: WorkerEndpoint, model: str) -> None:
        try:
            await self._workers.json(
                "POST",
                worker,
                "/prefillshare/adapters",
                phase=worker.phase,
                timeout_s=_LOAD_S,
                body={"name": model},
            )
        except WorkerRefused as error:
            if error.status >= 500:
                raise worker_failed(error, worker.id, worker.phase) from error
            raise bad_request(f"{worker.id} cannot serve it: {error.message}", "adapter") from error
        except WorkerSilent as error:
            self._health.failed(worker, error)
            raise RouterError(
                504,
                f"worker {worker.id} did not load the adapter within {_LOAD_S:g} s; the role is as "
                "it was, try again",
                type="server_error",
                code="role_timeout",
            ) from error
        except RouterError as error:
            self._health.failed(worker, error)
            raise

    def _card(self, name: str) -> dict[str, Any]:
        decoder = self._decoders[name]
        return {
            "id": name,
            "object": "prefillshare.role",
            "pool": decoder.pool,
            "adapter": self._adapters.get(name),
            "decoder": decoder.model,
        }
