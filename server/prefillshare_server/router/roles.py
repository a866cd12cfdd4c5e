"""Roles and who speaks for them, also as they change while the cluster serves.

A call keeps the decoder it began with. What replaces an adapter has another name at the workers,
so a role never goes on with weights other than those its answer began with.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefillshare_server.config import LORA_POOL, ROLE_NAME, Cluster
from prefillshare_server.errors import ConfigError
from prefillshare_server.launch.decoders import max_lora_rank
from prefillshare_server.models import pooled_adapter, provenance, store
from prefillshare_server.models.layout import Layout
from prefillshare_server.router.errors import (
    RouterError,
    WorkerRefused,
    bad_request,
    conflict,
    unknown_role,
)
from prefillshare_server.router.health import Health
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.topology import Decoder, WorkerEndpoint
from prefillshare_server.router.workers import Workers

_LOAD_S = 60.0


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
        """Roles whose calls may go to decode worker `worker`."""
        return [name for name, decoder in self._decoders.items() if decoder.pool == worker.pool]

    def report(self) -> list[dict[str, Any]]:
        """What `GET /v1/roles` answers."""
        return [self._card(name) for name in self._decoders]

    async def set(self, name: str, raw: bytes) -> dict[str, Any]:
        """Serve `name` from the adapter that the JSON body `raw` names, from the next call on.

        Every available worker has loaded it before. Raises RouterError: 400 for an adapter that
        cannot be served, 409 for a role with workers of its own. The role then is as it was.
        """
        wanted = self._parsed(name, raw)
        try:
            model = await asyncio.to_thread(self._pooled, wanted)
        except ConfigError as error:
            raise bad_request("; ".join(map(str, error.problems)), "adapter") from None
        await self._load(model)
        self._decoders[name] = Decoder(LORA_POOL, model)
        self._adapters[name] = wanted.adapter
        return self._card(name)

    def remove(self, name: str) -> None:
        """Refuse further calls of a role; those that run go on. Raises RouterError 404 and 409."""
        if name not in self._decoders:
            raise unknown_role(name, self._decoders)
        self._require_shared(name)
        del self._decoders[name]

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
        rank, most = pooled_adapter.rank(directory), max_lora_rank(self._cluster)
        if rank > most:
            raise bad_request(
                f"the adapter has rank {rank}, these workers take ranks up to {most}; set "
                f"lora.max_lora_rank: {pooled_adapter.max_rank([rank])} in the cluster file",
                "adapter",
            )
        if not (wanted.allow_untrained or self._cluster.allow_untrained):
            layout = Layout.for_model(self._base_dir, self._cluster.layout)
            if problems := provenance.untrained(directory, self._base_dir, layout):
                raise ConfigError(*problems)
        return model

    async def _load(self, model: str) -> None:
        """Load it on every worker that is up; one that is not does it when it is asked.

        Raises RouterError 400 if a worker refuses it.
        """
        workers = [w for w in self._placement.decode[LORA_POOL] if self._health.available(w.id)]
        for worker in workers:
            try:
                await self._workers.json(
                    "POST",
                    worker,
                    "/prefillshare/adapters",
                    phase="decode",
                    timeout_s=_LOAD_S,
                    body={"name": model},
                )
            except WorkerRefused as error:
                raise bad_request(
                    f"{worker.id} cannot serve it: {error.message}", "adapter"
                ) from error
            except RouterError as error:
                self._health.failed(worker, error)

    def _card(self, name: str) -> dict[str, Any]:
        decoder = self._decoders[name]
        return {
            "id": name,
            "object": "prefillshare.role",
            "pool": decoder.pool,
            "adapter": self._adapters.get(name),
            "decoder": decoder.model,
        }
