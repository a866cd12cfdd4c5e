"""The router put together, of what the cluster file says and the workers that run."""

from collections.abc import Sequence
from pathlib import Path

from prefillshare_server.config import Cluster
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.launch.decoders import max_loras
from prefillshare_server.models.layout import Layout
from prefillshare_server.router.admission import Admission
from prefillshare_server.router.ahead import Ahead
from prefillshare_server.router.colocated import Colocated
from prefillshare_server.router.decode import Decode
from prefillshare_server.router.health import Health
from prefillshare_server.router.leases import Leases
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.parts import Router
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.prefill import Prefill
from prefillshare_server.router.prefill_calls import PrefillCalls
from prefillshare_server.router.prompt import Prompts
from prefillshare_server.router.recovery import Recovery
from prefillshare_server.router.session_limit import SessionLimit
from prefillshare_server.router.sessions import Sessions
from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.warm_ups import WarmUps
from prefillshare_server.router.workers import Workers


def assembled(
    cluster: Cluster, workers: Sequence[WorkerEndpoint], base_dir: Path, max_model_len: int
) -> Router:
    """All parts over these workers. `base_dir` has the base's tokenizer and template.

    Raises ConfigError if the base cannot be rendered or tokenised, or a kind of worker is missing.
    """
    metrics = Metrics()
    by_model = cluster.layout.kind == "model"
    sessions = Sessions(
        cluster.router.session_ttl_s, layout="model" if by_model else "context_first"
    )
    client = Workers()
    health = Health(client, workers, metrics, clock_skew_s=cluster.kv.clock_skew_s)
    placement = Placement(
        workers, sessions.pinned, available=health.available, affinity=cluster.router.affinity
    )
    if not placement.prefill or not placement.decode:
        raise ConfigError(
            Problem(
                "router",
                f"{len(placement.prefill)} prefill workers and decode workers for "
                f"{len(placement.decode)} pools",
                "start at least one of each",
            )
        )
    bare = [name for name in cluster.roles if not _prefill_workers(cluster, placement, name)]
    if bare:
        raise ConfigError(
            Problem(
                "prefill.pool",
                f"per_role, and no prefill workers for {', '.join(bare)}",
                "start at least one for each role",
            )
        )
    metrics.watch_pins(sessions.pinned.total)
    limit = SessionLimit(
        sessions,
        metrics,
        most=cluster.router.max_sessions,
        queue=cluster.router.session_queue,
        queue_s=cluster.timeouts.queue_s,
    )
    tokens = Tokens(base_dir)
    layout = Layout.for_model(base_dir, cluster.layout)
    admission = Admission(
        placement,
        health,
        metrics,
        queue_s=cluster.timeouts.queue_s,
        reserve_tokens=cluster.kv.reserve_tokens,
        max_model_len=max_model_len,
        max_loras=max_loras(cluster) if cluster.has_lora_pool else None,
    )
    prefill: Prefill | Colocated
    if cluster.colocated:
        prefill = Colocated(
            client,
            health,
            placement,
            admission,
            sessions,
            metrics,
            timeout_s=cluster.timeouts.prefill_s,
        )
    else:
        calls = PrefillCalls(
            client,
            health,
            placement,
            sessions,
            metrics,
            timeout_s=cluster.timeouts.prefill_s,
            queue_s=cluster.timeouts.queue_s,
        )
        prefill = Prefill(
            calls,
            Leases(client),
            health,
            placement,
            metrics,
            timeout_s=cluster.timeouts.prefill_s,
        )
    prompts = Prompts(layout, tokens, max_model_len=max_model_len)
    patience_s = cluster.timeouts.prefill_s
    decode = Decode(client, health, metrics, cluster.timeouts, max_model_len=max_model_len)
    return Router(
        workers=client,
        sessions=sessions,
        limit=limit,
        tokens=tokens,
        prompts=prompts,
        health=health,
        placement=placement,
        admission=admission,
        prefill=prefill,
        ahead=Ahead(
            sessions,
            limit,
            prompts,
            prefill,
            metrics,
            patience_s=patience_s,
            separate=cluster.prefill.separate,
        ),
        warm_ups=WarmUps(prefill, metrics, most=cluster.prefill.warm_ups),
        decode=decode,
        recovery=Recovery(admission, prefill, decode, metrics),
        metrics=metrics,
    )


def _prefill_workers(cluster: Cluster, placement: Placement, role: str) -> Sequence[WorkerEndpoint]:
    return placement.prefill_workers(role if cluster.prefill.pool == "per_role" else None)
