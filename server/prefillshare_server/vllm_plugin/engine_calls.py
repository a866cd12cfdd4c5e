"""What the API process asks the engine: calls that run between two engine steps.

Reached through `engine_client.engine_core.call_utility_async(name, …)`, which finds methods of the
engine by name and wakes an engine that waits.
"""

from dataclasses import asdict
from typing import Any

from prefillshare_server.vllm_plugin.account import Totals

STATE = "prefillshare_state"
RELEASE = "prefillshare_release"


def install_engine_calls() -> None:
    """Give vLLM's engine the methods. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, STATE, _state)
    setattr(EngineCoreProc, RELEASE, _release)


def _state(engine: Any) -> dict[str, Any]:
    """Live numbers of this worker, see `/prefillshare/state`."""
    scheduler = engine.scheduler
    running, waiting = scheduler.get_request_counts()
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "num_blocks": pool.num_gpu_blocks,
        "free_blocks": pool.get_num_free_blocks(),
        # In the prefix cache, whether or not a request uses them. Unused ones count as free, too.
        "cached_blocks": sum(block.block_hash is not None for block in pool.blocks),
        # Requests that ended but keep their blocks: until they were read, or on a decode worker
        # until a pull that was given up is over.
        "open_leases": len(scheduler.requests) - running - waiting,
        "running": running,
        "waiting": waiting,
        **asdict(_totals(scheduler)),
    }


def _totals(scheduler: Any) -> Totals:
    # A prefill worker has vLLM's own scheduler.
    found: Totals | None = getattr(scheduler, "totals", None)
    return found or scheduler.connector.connector_scheduler.totals


def _release(engine: Any, request_id: str) -> None:
    """End everything of the call X-Request-Id `request_id`."""
    scheduler = engine.scheduler
    releases = scheduler.connector.connector_scheduler.releases
    engine._send_abort_outputs(releases.release(request_id, scheduler))
