"""What every engine that decodes has in common: base KV is all that is shared, and answers resume.

1. Only whole blocks of the base's KV enter the prefix cache. vLLM would also keep the KV of x_n and
   of generated tokens, which the decoder computed, and hand it to the next turn.
2. A request may bring tokens that another worker generated. They are output of the request like
   its own, and the decoder runs them again.
3. What an engine really runs of each request is counted, whatever was planned.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from prefillshare_server.vllm_plugin.account import Account, Totals
from prefillshare_server.vllm_plugin.handoff import generated_ids

if TYPE_CHECKING:
    # What the mixin below is mixed into, in two variants.
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object


class BaseKV(_Scheduler):
    """Mixed into vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache_base_blocks_only()

    @property
    @abstractmethod
    def accounts(self) -> Mapping[str, Account]:
        """Requests that were scheduled and have not ended, by request id."""

    @property
    @abstractmethod
    def totals(self) -> Totals:
        """Of all requests that ended."""

    @abstractmethod
    def base_tokens(self, request: Request) -> int:
        """Leading tokens of `request` whose KV is the base's by now, or will be once computed."""

    def _cache_base_blocks_only(self) -> None:
        # The coordinator, not the manager: `allocate_slots` calls it directly.
        coordinator = self.kv_cache_manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_base_blocks(request: Request, num_computed_tokens: int) -> None:
            whole_blocks = self.base_tokens(request) // self.block_size * self.block_size
            cache_blocks(request, min(num_computed_tokens, whole_blocks))

        coordinator.cache_blocks = cache_base_blocks

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        """Reuse at most the blocks that the request's base KV would fill.

        A resumed answer must not find the base's KV of its own tokens here, which the context of a
        later turn may have left: the decoder computed those tokens before, and does so again.
        """
        blocks, tokens, *rest = super()._get_local_prefix_cache_hit(request)
        readable = request.num_prompt_tokens - 1
        if tokens > readable:
            tokens = readable // self.block_size * self.block_size
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, tokens)
        return blocks, tokens, *rest

    def _begin(self, request: Request) -> None:
        """Give the request its answer so far. Before it is queued: it is scheduled for all."""
        request.append_output_token_ids(generated_ids(request.sampling_params))
        request.prefillshare_begun = request.num_tokens

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Also lead a grammar that has just been compiled through the answer so far."""
        compiled = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready: bool = super()._handle_blocked_waiting_request(request)
        # All at once: reasoning parsers look at the tokens up to the one they judge.
        if (
            ready
            and compiled
            and not self.structured_output_manager.accept_tokens(
                request, list(request.output_token_ids)
            )
        ):
            # Not an answer to this request. It ends like one whose grammar cannot be compiled.
            self.grammar_compile_error_reqs.add(request.request_id)
            return False
        return ready

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            account = self.accounts.get(request_id)
            request = self.requests[request_id]
            start, prompt = request.num_computed_tokens, request.num_prompt_tokens
            begun, base = request.prefillshare_begun, self.base_tokens(request)
            if account is not None and start < begun:
                end = start + scheduled
                account.base_tokens_computed += max(0, min(end, base) - start)
                account.prompt_tokens_computed += max(0, min(end, prompt) - max(start, base))
                account.generated_tokens_recomputed += max(0, min(end, begun) - max(start, prompt))
        super()._update_after_schedule(scheduler_output)

    def _report_before_stop_strings(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Attach the account to every output that may be the last.

        Stop strings are found in the API process, which then only tells the engine to end.
        """
        for of_client in outputs.values():
            for output in of_client.outputs:
                request = self.requests.get(output.request_id)
                account = self.accounts.get(output.request_id)
                if request is not None and account is not None and request.sampling_params.stop:
                    output.kv_transfer_params = account.to_params()
