"""Who speaks for each role: decode workers of its own, or those that adapters share."""

from pathlib import Path

from prefillshare_server.config import LORA_POOL, Cluster, Role
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import adapter, pooled_adapter, store
from prefillshare_server.router.topology import Decoder

SPARE_LORAS = 1
LEAST_LORAS = 4


def decoders(cluster: Cluster, base_dir: Path) -> dict[str, Decoder]:
    """By role. Adapters that share workers are copied on first use. Raises ConfigError."""
    return {name: _decoder(cluster, name, role, base_dir) for name, role in cluster.roles.items()}


def _decoder(cluster: Cluster, name: str, role: Role, base_dir: Path) -> Decoder:
    if role.pooled:
        return Decoder(LORA_POOL, pooled_adapter.pooled(base_dir, store.resolve(role.decoder.ref)))
    if cluster.has_lora_pool and _is_base(role, base_dir):
        return Decoder(LORA_POOL, cluster.base.name)
    if cluster.colocated:
        if store.resolve(role.decoder.ref) == base_dir:
            raise ConfigError(
                Problem(
                    f"roles.{name}",
                    "has replicas or args, and mode colocated has no workers for one role",
                    "remove them, or set mode: disaggregated",
                )
            )
        raise ConfigError(
            Problem(
                f"roles.{name}.model",
                f"{role.decoder.ref} are weights of their own, and mode colocated serves adapters "
                "of the base, and the base itself",
                "give the role an adapter, or set mode: disaggregated",
            )
        )
    return Decoder(name, name)


def _is_base(role: Role, base_dir: Path) -> bool:
    """Whether the base itself speaks for the role, and no workers of its own were asked for."""
    plain = role.adapter is None and role.replicas == 1 and not role.args
    return plain and store.resolve(role.decoder.ref) == base_dir


def weights_directory(role: Role, base_dir: Path, progress: store.Progress | None = None) -> Path:
    """The full weights of a role with workers of its own; an adapter is merged on first use.

    May take minutes. Raises ConfigError.
    """
    directory = store.resolve(role.decoder.ref, progress=progress)
    return adapter.merged(base_dir, directory, progress) if role.merge else directory


def max_loras(cluster: Cluster) -> int:
    """Adapters in one batch of a worker that adapters share."""
    return cluster.lora_pool.max_loras or max(LEAST_LORAS, len(cluster.pooled) + SPARE_LORAS)


def max_lora_rank(cluster: Cluster) -> int:
    """Largest rank there. Raises ConfigError when an adapter's is larger than the file allows."""
    ranks = {
        name: pooled_adapter.rank(store.resolve(role.decoder.ref))
        for name, role in cluster.pooled.items()
    }
    allowed = cluster.lora_pool.max_lora_rank
    for name, rank in ranks.items():
        if allowed is not None and rank > allowed:
            raise ConfigError(
                Problem(
                    f"roles.{name}.adapter",
                    f"has rank {rank}, lora.max_lora_rank is {allowed}",
                    f"set lora.max_lora_rank: {pooled_adapter.max_rank([rank])}, or leave it out",
                )
            )
    return pooled_adapter.max_rank(ranks.values() if allowed is None else [allowed])
