"""The cluster file: the one place where a cluster is described.

Precedence: overrides (flags) > ``PREFILLSHARE_<SECTION>__<FIELD>`` > file > default.
Unknown keys are errors. All objects are frozen; nothing here imports torch or vLLM. The string
below a field is its description in the reference that the documentation prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from prefillshare_server import config_sources as sources
from prefillshare_server.config_errors import explain
from prefillshare_server.config_values import Args, ModelRef, RoleName, Seconds
from prefillshare_server.errors import ConfigError
from prefillshare_server.models import store
from prefillshare_server.vllm_plugin.handoff import lease_margin_s

if TYPE_CHECKING:
    from pathlib import Path

LORA_POOL = "lora"
"""Name of the decode workers that adapters share."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Base(_Section):
    """The model whose weights prefill every prompt."""

    model: ModelRef = Field(examples=["smollm2-135m-instruct"])
    """Store name, directory, or hub id."""
    name: str = Field(default="base", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """Its name in ``/v1/models``."""


class PrefillPool(_Section):
    """The prefill workers; all of them serve the base."""

    replicas: int = Field(default=1, ge=1)
    """How many; a session stays with one of them. With ``pool: per_role`` each role has so many."""
    pool: Literal["shared", "per_role"] = "shared"
    """``per_role``: each role has prefill workers of its own and shares no KV with other roles.
    For measuring what sharing saves."""
    reuse: Literal["all_roles", "per_role"] = "all_roles"
    """``per_role``: the workers are shared, and the KV of each role is separate. For measuring what
    sharing KV saves."""
    warm_ups: int = Field(default=0, ge=0)
    """While a call is answered, its prompt is prefilled for the role that the header
    ``X-PrefillShare-Next-Role`` names: at most so many at once on each prefill worker. With 0 the
    header is ignored."""
    args: Args = {}
    """Extra vLLM arguments: ``{max-num-seqs: 8}`` → ``--max-num-seqs 8``; true → a bare flag,
    false → ``--no-flag``."""

    @property
    def separate(self) -> bool:
        """Whether roles share no KV."""
        return "per_role" in (self.pool, self.reuse)

    @model_validator(mode="after")
    def _warm_ups_have_a_use(self) -> Self:
        if self.warm_ups and not self.separate:
            raise ValueError(
                f"warm_ups is {self.warm_ups}, but roles share their KV, so the next role finds "
                "the prompt without one; set pool or reuse to per_role, or warm_ups to 0"
            )
        return self


class DecodePool(_Section):
    """What all decode workers have in common."""

    args: Args = {}
    """Extra vLLM arguments of every decode worker, as in ``prefill.args``."""


class LoraPool(_Section):
    """The decode workers that all adapters share: one copy of the base's weights each."""

    replicas: int = Field(default=1, ge=1)
    """How many of them."""
    max_loras: int | None = Field(default=None, ge=1, examples=[8])
    """Adapters in one batch; None is one more than there are at the start, so that one can be
    replaced, and at least 4."""
    max_lora_rank: int | None = Field(default=None, ge=1, examples=[32])
    """Largest rank of an adapter, also of those added later; None is what the start needs."""
    args: Args = {}
    """Extra vLLM arguments of these workers; they win over ``decode.args``."""


class DecoderRef(NamedTuple):
    """Where a role's weights come from."""

    field: Literal["model", "adapter"]
    ref: str


class Role(_Section):
    """One role and the decoder (weights) that speaks for it: `model` or `adapter`."""

    model: ModelRef | None = Field(default=None, examples=["./critic"])
    """Full weights: store name, directory, or hub id."""
    adapter: ModelRef | None = Field(default=None, examples=["./critic-lora"])
    """A LoRA adapter of the base: directory or hub id. It shares the workers of ``lora``."""
    merge: bool = False
    """Merge the adapter into the base, once, and give the role workers of its own."""
    replicas: int = Field(default=1, ge=1)
    """How many workers of its own it has."""
    args: Args = {}
    """Extra vLLM arguments of workers of its own; they win over ``decode.args``."""

    @property
    def pooled(self) -> bool:
        """Whether it is an adapter on shared workers."""
        return self.adapter is not None and not self.merge

    @model_validator(mode="after")
    def _shares_or_has_workers(self) -> Self:
        if self.merge and self.adapter is None:
            raise ValueError("merge is true, but there is no adapter; remove merge")
        if not self.pooled:
            return self
        for field, instead in (("replicas", "lora.replicas"), ("args", "lora.args")):
            if field in self.model_fields_set and getattr(self, field) not in (1, {}):
                raise ValueError(
                    f"has {field} and an adapter, which shares its workers; set {instead} for all "
                    "adapters, or merge: true to give this role workers of its own"
                )
        return self

    @model_validator(mode="after")
    def _has_one_decoder(self) -> Self:
        if self.model is None and self.adapter is None:
            raise ValueError(
                "has neither model nor adapter; add `model: …` (full weights) or `adapter: …` "
                "(a LoRA adapter of the base)"
            )
        if self.model is not None and self.adapter is not None:
            raise ValueError(
                f"has both model {self.model!r} and adapter {self.adapter!r}; remove one of them, "
                "or set it to null"
            )
        return self

    @property
    def decoder(self) -> DecoderRef:
        """The one that is set."""
        if self.adapter is not None:
            return DecoderRef("adapter", self.adapter)
        assert self.model is not None, "a role has a model or an adapter"
        return DecoderRef("model", self.model)


class Router(_Section):
    """The HTTP front."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. The router asks nobody who they are: see the HTTP contract before you
    open it to others."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    session_ttl_s: Seconds = 1800
    """An idle session is forgotten after this time."""
    max_body_mb: int = Field(default=32, ge=1)
    """Largest request body, in MiB."""
    affinity: Literal["soft", "hard"] = "soft"
    """What happens when a session's prefill worker is gone: bind anew, or fail."""
    max_sessions: int | None = Field(default=None, ge=1, examples=[16])
    """Sessions at once; calls of further ones wait in line. A session counts from its first call
    until it ends, a call without a session while it runs. None is no limit."""
    session_queue: int = Field(default=256, ge=0)
    """Calls that may wait there, for ``timeouts.queue_s`` at most; more are refused (429)."""


class KV(_Section):
    """KV blocks and their handoff."""

    # A worker renews a lease every sixth of it, in whole seconds.
    lease_s: int = Field(default=120, ge=6)
    """How long a prefill worker keeps blocks for a decode worker that has not read them yet, in
    seconds."""
    block_size: int | None = Field(default=None, ge=16, multiple_of=16, examples=[32])
    """Tokens per KV block; None is 32 on CPU and 16 on GPU."""
    blocks: int | None = Field(default=None, ge=2, examples=[256])
    """KV blocks per worker, of which vLLM keeps one for itself; None is vLLM's choice on GPU and a
    memory-safe number on CPU."""
    clock_skew_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How far a worker's clock may be off the router's, in seconds; one further off gets no calls.
    Leases end by the clock, so twice as much is left unused of each."""
    reserve_tokens: int = Field(default=1024, ge=1)
    """Room to reserve on a decode worker for an answer whose length the client left open."""

    @model_validator(mode="after")
    def _a_lease_can_be_read(self) -> Self:
        kept = lease_margin_s(self.lease_s) + 2 * self.clock_skew_s
        if self.lease_s < kept + 1:
            raise ValueError(
                f"no handoff could be read in time: of lease_s {self.lease_s}, {kept:g} s are kept "
                f"for heartbeats and for clocks (clock_skew_s {self.clock_skew_s:g}); raise "
                "lease_s or lower clock_skew_s"
            )
        return self


class LayoutSettings(_Section):
    """How a conversation becomes a prompt."""

    kind: Literal["context-first", "model"] = "context-first"
    """``model`` is the base's own template untouched: roles then share next to nothing."""
    tail_role: Literal["system", "user"] = "system"
    """Role of the final message that carries a role's instructions and tools."""
    shared_head: str | None = Field(default=None, examples=["You work in a team."])
    """A system message that opens the prompt of every role."""


class Timeouts(_Section):
    """Every wait of the router and the launcher, in seconds."""

    start_s: Seconds = 300
    """For a worker to load its model and answer."""
    queue_s: Seconds = 60
    """For room on a decode worker of the role, for a worker to come back, and for a place among
    ``router.max_sessions``."""
    prefill_s: Seconds = 120
    """For the prefill worker's answer."""
    handoff_s: Seconds = 30
    """For a decode worker to get a prompt's KV, from the arrival of its request."""
    first_token_s: Seconds = 120
    """For the first token of an answer; one that is not streamed may take a second per token
    longer."""
    idle_stream_s: Seconds = 60
    """For the next token of a stream."""


class Cluster(_Section):
    """A whole cluster: one base, its prefill workers, and a decoder per role."""

    version: Literal[1] = 1
    """Of the format of this file."""
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """``colocated``: each engine prefills with the base's weights and decodes with adapters, and
    there are no other workers: as many as the larger of ``prefill.replicas`` and
    ``lora.replicas`` says."""
    base: Base
    prefill: PrefillPool = PrefillPool()
    roles: dict[RoleName, Role] = Field(min_length=1)
    """Clients name one as their ``model``."""
    decode: DecodePool = DecodePool()
    lora: LoraPool | None = None
    """None: there are such workers if a role has an adapter, with the defaults."""
    router: Router = Router()
    kv: KV = KV()
    layout: LayoutSettings = LayoutSettings()
    timeouts: Timeouts = Timeouts()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and KV of every worker."""
    max_model_len: int | None = Field(default=None, ge=1, examples=[4096])
    """Context length of every worker, in tokens; None is the model's own."""
    allow_untrained: bool = False
    """Serve decoders that were not trained on this base's KV with this layout: they answer, but
    not as well as they could."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if self.base.name in self.roles:
            raise ValueError(
                f"role name {self.base.name!r} is also the served name of the base; "
                "rename the role or set base.name"
            )
        return self

    @model_validator(mode="after")
    def _worker_names_differ(self) -> Self:
        others = {"prefill": "the prefill workers", LORA_POOL: "the workers that adapters share"}
        for name, whose in others.items():
            if name in self.roles and not self.roles[name].pooled:
                raise ValueError(
                    f"role {name!r} has the name of {whose}, which only a role with an adapter may "
                    "have; rename the role"
                )
        if self.prefill.pool == "per_role":
            for name in self.roles:
                if f"prefill-{name}" in self.roles:
                    raise ValueError(
                        f"with prefill.pool: per_role the workers prefill-{name}-0, … are those of "
                        f"role {name!r}; rename role 'prefill-{name}'"
                    )
        return self

    @model_validator(mode="after")
    def _colocated_can_be_served(self) -> Self:
        if self.mode == "disaggregated":
            return self
        for name, role in self.roles.items():
            if role.merge:
                raise ValueError(
                    f"role {name!r} has merge: true, which needs workers of its own; remove it, or "
                    "set mode: disaggregated"
                )
        if self.prefill.pool == "per_role" or self.prefill.warm_ups:
            field = "pool is per_role" if self.prefill.pool == "per_role" else "warm_ups is not 0"
            raise ValueError(
                f"prefill.{field}, but mode colocated has no prefill workers; remove it, or set "
                "mode: disaggregated"
            )
        if self.router.affinity == "hard":
            raise ValueError(
                "router.affinity is hard, but in mode colocated a session may move to the engine "
                "that has room; set it to soft, or mode: disaggregated"
            )
        return self

    @property
    def pooled(self) -> dict[str, Role]:
        """The roles whose adapters share workers."""
        return {name: role for name, role in self.roles.items() if role.pooled}

    @property
    def has_lora_pool(self) -> bool:
        """Whether there are workers that adapters share: for those here, or for later ones."""
        return self.colocated or bool(self.pooled) or self.lora is not None

    @property
    def lora_pool(self) -> LoraPool:
        """Those workers, if there are any."""
        return self.lora or LoraPool()

    @property
    def colocated(self) -> bool:
        """Whether engines prefill and decode."""
        return self.mode == "colocated"

    @property
    def engines(self) -> int:
        """How many, if so."""
        return max(self.prefill.replicas, self.lora_pool.replicas)

    @classmethod
    def load(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> Cluster:
        """Read `path`, apply environment and `overrides` (dotted paths), validate.

        Model references that are directories become absolute paths, relative ones being
        taken from the folder of `path`. Raises ConfigError with every problem found.
        """
        raw = sources.read_file(path)
        roles = raw.get("roles")
        settings = sources.from_environment() + sources.from_overrides(
            overrides or {}, roles if isinstance(roles, Mapping) else {}
        )
        merged = sources.merge(raw, settings, str(path))
        try:
            cluster = cls.model_validate(merged)
        except ValidationError as error:
            raise ConfigError(*explain(error, cls, str(path), settings)) from None
        return cluster._with_absolute_paths(path.resolve().parent)

    def _with_absolute_paths(self, folder: Path) -> Cluster:
        base = self.base.model_copy(
            update={"model": store.absolute(self.base.model, relative_to=folder)}
        )
        roles = {
            name: role.model_copy(
                update={role.decoder.field: store.absolute(role.decoder.ref, relative_to=folder)}
            )
            for name, role in self.roles.items()
        }
        return self.model_copy(update={"base": base, "roles": roles})

    def to_yaml(self) -> str:
        """The effective configuration, defaults included; loading it gives an equal Cluster."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
