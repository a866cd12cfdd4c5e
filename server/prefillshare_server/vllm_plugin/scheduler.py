"""Scheduler of the decode workers (`--scheduler-cls`): nothing of a prompt is computed but x_n.

Beside what base_kv.py says:

1. A request without readable base KV is refused. The API process refuses it earlier and with a
   better error (admission.py); this is the check that cannot be passed by.
2. Preemption, a failed or late pull and an expired lease end the request with a mark. vLLM
   would compute the prompt again with the decoder's weights, or wait for ever; here the caller
   learns that a new prefill is due.
"""

import time
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from prefillshare_server.vllm_plugin.account import (
    EVENT_MARK,
    PARAMS_KEY,
    REFUSED_KEY,
    Account,
    Event,
    Totals,
)
from prefillshare_server.vllm_plugin.base_kv import BaseKV
from prefillshare_server.vllm_plugin.connector import HandoffScheduler, PrefillShareConnector
from prefillshare_server.vllm_plugin.handoff import (
    ReadableParams,
    Refusal,
    SingleUse,
    prompt_refusal,
)

logger = init_logger(f"vllm.{__name__}")


class ReadsHandoffs(BaseKV):
    """Mixed into vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = self.connector
        if not isinstance(connector, PrefillShareConnector):
            raise TypeError("prefillshare: the decode scheduler needs PrefillShareConnector")
        self._handoffs: HandoffScheduler = connector.connector_scheduler
        self._taken = SingleUse()
        self._failed_pulls: dict[str, Account] = {}
        self._endings: list[tuple[int, EngineCoreOutput]] = []
        """Last outputs of requests that were ended here, by client index; sent with the step's."""

    @property
    def accounts(self) -> Mapping[str, Account]:
        return self._handoffs.accounts

    @property
    def totals(self) -> Totals:
        return self._handoffs.totals

    def base_tokens(self, request: Request) -> int:
        """What was pulled or found here: less than the prompt has when a pull failed."""
        account = self._handoffs.accounts.get(request.request_id)
        return account.base_tokens if account is not None else 0

    def add_request(self, request: Request) -> None:
        """Queue the request, or end it at once without having queued it.

        A refused request must leave the prefill worker alone: vLLM would tell it that the handoff
        is over, or stop renewing its lease, while the request that took it first still reads. The
        router releases what was refused.
        """
        refused = self._refusal(request)
        if refused is None:
            self._begin(request)
            super().add_request(request)
            return
        logger.warning("Refused request %s: %s", request.request_id, refused.message)
        if refused.code == "lease_expired":
            self._end(request, Account(), "lease_expired")
        else:
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                kv_transfer_params={
                    PARAMS_KEY: {REFUSED_KEY: f"{refused.code}: {refused.message}"}
                },
            )
            self._endings.append((request.client_index, output))

    def _refusal(self, request: Request) -> Refusal | None:
        params, now = ReadableParams.of(request.kv_transfer_params), time.time()
        refused = self._handoffs.rules.refusal(params, now)
        if refused is not None:
            return refused
        assert params is not None, "a request without readable KV is refused above"
        if request.prompt_token_ids is None or request.skip_reading_prefix_cache:
            return Refusal(
                "base_kv_unusable",
                "A prompt of embeddings, and prompt_logprobs or echo with logprobs, make the "
                "decoder compute the whole prompt itself.",
            )
        return prompt_refusal(
            params, request.prompt_token_ids, self.block_size
        ) or self._taken.take(params.remote_request_id, params.prefillshare.expires_at, now)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request_id in self._handoffs.overdue():
            self._give_up_waiting(request_id)
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        return output

    def _give_up_waiting(self, request_id: str) -> None:
        """End a request whose base KV has not come, or too late to be trusted.

        Nothing of it has entered the prefix cache: that happens when vLLM schedules a request whose
        pull is over. Its blocks stay reserved while the pull may still write to them: until vLLM
        says that it is over, which a prefill worker that hangs can put off for ever.
        """
        request = self.requests[request_id]
        account = self._handoffs.accounts.get(request_id, Account())
        account.base_tokens_received = account.handoff_bytes = 0
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._end(request, account, "handoff_timeout")

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """End the victim, which the caller has taken off the running list, instead of queuing it.

        What it generated so far was delivered; a new handoff can continue from there exactly.
        """
        account = self._handoffs.accounts.get(request.request_id, Account())
        request.status = RequestStatus.FINISHED_ABORTED
        self._free_request(request)
        self._end(request, account, "preempted")

    def _handle_invalid_blocks(self, *args: Any) -> set[str]:
        failed: set[str] = super()._handle_invalid_blocks(*args)
        return self._remember_failed_pulls(failed)

    def _handle_failed_recving(self, *args: Any) -> set[str]:
        failed: set[str] = super()._handle_failed_recving(*args)
        return self._remember_failed_pulls(failed)

    def _remember_failed_pulls(self, request_ids: set[str]) -> set[str]:
        for request_id in request_ids:
            account = self._handoffs.accounts.get(request_id, Account())
            account.base_tokens_received = account.handoff_bytes = 0
            self._failed_pulls[request_id] = account
        return request_ids

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._report_before_stop_strings(outputs)
        if self._failed_pulls:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    if output.request_id in self._failed_pulls and output.finished:
                        self._mark(output, self._failed_pulls[output.request_id], "kv_load_failed")
            self._failed_pulls.clear()
        for client_index, ending in self._endings:
            of_client = outputs.setdefault(client_index, EngineCoreOutputs())
            of_client.outputs = [*of_client.outputs, ending]
        self._endings.clear()
        return outputs

    def has_requests(self) -> bool:
        return bool(self._endings) or super().has_requests()

    def _end(self, request: Request, account: Account, event: Event) -> None:
        output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[])
        self._endings.append((request.client_index, self._mark(output, account, event)))

    def _mark(self, output: EngineCoreOutput, account: Account, event: Event) -> EngineCoreOutput:
        """Make `output` the last one of a request that did not run to its end."""
        self._handoffs.totals.events[event] += 1
        account.event = event
        output.finish_reason = FinishReason.ABORT
        output.stop_reason = EVENT_MARK + event
        output.kv_transfer_params = account.to_params()
        return output


class PrefillShareScheduler(ReadsHandoffs, Scheduler):
    """For platforms that schedule synchronously (CPU)."""


class PrefillShareAsyncScheduler(ReadsHandoffs, AsyncScheduler):
    """For platforms that schedule one step ahead (GPU)."""
