"""KV connector of both phases: NIXL pull, plus what makes a handoff safe to read.

Loaded by vLLM through `kv_connector_module_path`. One instance per process role: the scheduler
part decides what to pull and keeps the accounts, the worker part (leases.py) moves the bytes.
"""

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, is_full_attention_spec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from prefillshare_server.vllm_plugin.account import PARAMS_KEY, Account, Totals
from prefillshare_server.vllm_plugin.contract import (
    BaseContract,
    ContractError,
    ServedModel,
    require_fit,
)
from prefillshare_server.vllm_plugin.handoff import (
    Deadlines,
    Handoff,
    ReadableParams,
    Rules,
    prompt_digest,
)
from prefillshare_server.vllm_plugin.leases import HandoffWorker, Releases
from prefillshare_server.vllm_plugin.progress import calm_nixl_agent
from prefillshare_server.vllm_plugin.resumed_state import install_resumed_state


class PrefillShareConnector(NixlPullConnector):
    """`kv_connector` of every worker; refuses to start on a worker that does not fit its base."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        require_fit(_served_model(vllm_config), BaseContract.of_worker(vllm_config))
        _require_full_attention(kv_cache_config)
        # Past the parent, which would build vLLM's two parts: one of them here replaces each.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HandoffScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            # The one place that runs in the process of the model runner and in no other.
            install_resumed_state()
            with calm_nixl_agent():
                self.connector_worker = HandoffWorker(vllm_config, self.engine_id, kv_cache_config)


class HandoffScheduler(NixlPullConnectorScheduler):
    """Scheduler part. Prefill: describes each handoff. Decode: pulls base KV, keeps accounts."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.rules = Rules.of_worker(vllm_config)
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        self.handoff_s = float(extra("handoff_s", 30.0))
        self.accounts: dict[str, Account] = {}
        """Requests that were scheduled and have not ended, by request id."""
        self.totals = Totals()
        self.releases = Releases()
        self._prefills = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._deadlines = Deadlines()
        """By the monotonic clock."""
        self._block_bytes = block_bytes(kv_cache_config) * self.transfer_tp_size

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if not self._prefills:
            self._deadlines.set(request.request_id, time.monotonic() + self._patience_s(request))

    def _patience_s(self, request: Request) -> float:
        """Seconds within which the request's base KV must come, from now on."""
        params = ReadableParams.of(request.kv_transfer_params)
        if params is None:
            return self.handoff_s
        readable_s = params.prefillshare.readable_s(time.time(), self.rules.clock_skew_s)
        return min(self.handoff_s, readable_s)

    def overdue(self) -> list[str]:
        """Requests whose base KV has not come in time: within handoff_s, and within the lease.

        The lease as the handoff says it. Heartbeats may have prolonged it; but they may also have
        been lost, and nobody here would know.
        """
        return self._deadlines.overdue(time.monotonic())

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Pull base KV of x_1..x_{base_len-1}, less the `num_computed_tokens` found locally.

        The decoder processes x_{base_len} and what follows itself. vLLM may ask several times
        until the blocks fit; the last answer counts.
        """
        readable_params = ReadableParams.of(request.kv_transfer_params)
        if readable_params is None:
            self.accounts[request.request_id] = Account(base_tokens_reused=num_computed_tokens)
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        readable = readable_params.prefillshare.base_len - 1
        # Local and remote block lists are matched from their ends, so both must end alike.
        params = request.kv_transfer_params
        params["remote_block_ids"] = [
            group[: self._blocks(readable)] for group in params["remote_block_ids"]
        ]
        received = max(0, readable - num_computed_tokens)
        self.accounts[request.request_id] = Account(
            base_tokens_received=received,
            base_tokens_reused=num_computed_tokens,
        )
        return received, received > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        account = self.accounts.get(request.request_id)
        if num_external_tokens == 0:
            self._deadlines.drop(request.request_id)
        elif account is not None:
            pulled = self._blocks(account.base_tokens) - account.base_tokens_reused // (
                self.block_size
            )
            account.handoff_bytes = pulled * self._block_bytes

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            self._deadlines.came(request_id, time.monotonic())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        self.releases.pass_on(metadata)
        return metadata

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Prefill: vLLM's fields plus the handoff. Decode: the account of the request."""
        self._deadlines.drop(request.request_id)
        account = self.accounts.pop(request.request_id, Account())
        if self._prefills:
            computed = request.num_computed_tokens - account.base_tokens_reused
            account.prompt_tokens_computed = max(0, computed)
        self.totals.add(account)
        # Before vLLM starts the lease, so that it does not end before this.
        expires_at = time.time() + self.rules.lease_s
        delay_free, params = super().request_finished(request, block_ids)
        if not self._prefills:
            return delay_free, account.to_params()
        if delay_free and self.releases.released(request.request_id):
            # Take the lease back, as vLLM does when a request is aborted.
            del self._reqs_need_send[request.request_id]
            self._reqs_not_processed.add(request.request_id)
            return False, None
        if delay_free and params is not None and params["do_remote_prefill"]:
            params[PARAMS_KEY] = Handoff(
                base_len=request.num_prompt_tokens,
                base_fingerprint=self.rules.base_fingerprint,
                expires_at=expires_at,
                prompt_digest=prompt_digest(request.prompt_token_ids),
            ).to_params()
        return delay_free, params

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one KV block over all layers on one tensor-parallel rank."""
    return sum(
        group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    )


def _served_model(vllm_config: VllmConfig) -> ServedModel:
    return ServedModel(
        directory=vllm_config.model_config.model,
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        block_size=vllm_config.cache_config.block_size,
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
    )


def _require_full_attention(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not is_full_attention_spec(groups[0].kv_cache_spec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ContractError(
            f"only models with full attention in every layer can share prefill, found: {kinds}."
        )
