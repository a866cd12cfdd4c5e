"""Scheduler of an engine that both prefills and decodes (`mode: colocated`).

Positions before the last prompt token run with the base's weights, from there on the request's
adapter is on (adapter_positions.py). So the engine may compute, drop and recompute any part of a
request: vLLM's own preemption stays as it is, and nothing is handed off.
"""

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from prefillshare_server.vllm_plugin.account import Account, Totals
from prefillshare_server.vllm_plugin.base_kv import BaseKV


class Colocated(BaseKV):
    """Mixed into vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._accounts: dict[str, Account] = {}
        self._totals = Totals()
        super().__init__(*args, **kwargs)

    @property
    def accounts(self) -> Mapping[str, Account]:
        return self._accounts

    @property
    def totals(self) -> Totals:
        return self._totals

    def base_tokens(self, request: Request) -> int:
        return request.num_prompt_tokens - 1

    def add_request(self, request: Request) -> None:
        self._begin(request)
        super().add_request(request)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id not in self._accounts:
                found = self.requests[request_id].num_computed_tokens
                self._accounts[request_id] = Account(base_tokens_reused=found)
        super()._update_after_schedule(scheduler_output)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if account := self._accounts.get(request.request_id):
            # It starts over: x_n is run again, and is no second prompt token of the decoder's.
            account.prompt_tokens_computed = 0

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._report_before_stop_strings(outputs)
        return outputs

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """The account, where a KV connector would say how to read the request's blocks."""
        account = self._accounts.pop(request.request_id, Account())
        self._totals.add(account)
        return False, account.to_params()


class ColocatedScheduler(Colocated, Scheduler):
    """For platforms that schedule synchronously (CPU)."""


class ColocatedAsyncScheduler(Colocated, AsyncScheduler):
    """For platforms that schedule one step ahead (GPU). Not run."""
