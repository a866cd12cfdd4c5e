"""The API process's part in a resumed answer: it comes out whole, from its first token.

vLLM's server turns tokens into text, tool calls, logprobs and usage with state that begins at the
first token. So the tokens generated elsewhere pass through it again, one at a time, as if this
worker's engine had just sampled them.
"""

from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from prefillshare_server.vllm_plugin.calls import Begun
from prefillshare_server.vllm_plugin.handoff import generated_ids


class GivenUp(VLLMValidationError):
    """The router gave the call up before it came here."""


class Replays:
    """Outputs of the answers so far, until their requests' first outputs of the engine come."""

    def __init__(self, output_processor: Any, vocabulary: int, begun: Begun) -> None:
        """Wrap `output_processor.add_request`, after which a request goes to the engine.

        Token ids are below `vocabulary`. A call that was given up is refused there.
        """
        self._processor = output_processor
        self._outputs: dict[str, list[Any]] = {}
        add_request = output_processor.add_request

        def add_and_replay(
            request: Any,
            prompt: str | None,
            parent_req: Any = None,
            request_index: int = 0,
            queue: Any = None,
        ) -> None:
            if not begun.begin(request.external_req_id):
                raise GivenUp("The router gave this call up.")
            add_request(request, prompt, parent_req, request_index, queue)
            begun_ids = generated_ids(request.sampling_params)
            # The engine refuses what is no token; vLLM's detokenizer fails on it.
            if begun_ids and max(begun_ids) < vocabulary:
                self._outputs[request.external_req_id] = self._replay(request, begun_ids, queue)

        output_processor.add_request = add_and_replay

    def take(self, request_id: str) -> list[Any]:
        """Outputs to send before the engine's, one a token; none unless a stream was asked for."""
        return self._outputs.pop(request_id, [])

    def _replay(self, request: Any, begun: list[int], queue: Any) -> list[Any]:
        outputs: list[Any] = []
        params = request.sampling_params
        state = self._processor.request_states[request.request_id]
        for count, token in enumerate(begun, 1):
            finish_reason, stop_reason = _finish(params, token, count)
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[token],
                new_logprobs=_placeholder(token) if params.num_logprobs is not None else None,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
            )
            self._processor.process_outputs([output])
            if request.request_id not in self._processor.request_states:
                # The answer was complete. Its last output waits in the queue; the engine is only
                # to give the handoff back.
                request.abort_immediately = True
                return outputs
            if (replayed := queue.get_nowait()) is not None:
                outputs.append(replayed)
        # vLLM's statistics count the engine's first output, not these.
        state.is_prefilling = True
        return outputs


def _finish(
    params: SamplingParams, token: int, count: int
) -> tuple[FinishReason | None, int | None]:
    """As vLLM's scheduler decides after each token (`check_stop`)."""
    if token == params.eos_token_id:
        return FinishReason.STOP, None
    if token in (params.stop_token_ids or ()):
        return FinishReason.STOP, token
    if params.max_tokens is not None and count >= params.max_tokens:
        return FinishReason.LENGTH, None
    return None, None


def _placeholder(token: int) -> LogprobsLists:
    """A logprob for a token whose logprob only the worker that sampled it knew."""
    return LogprobsLists(np.array([[token]]), np.array([[0.0]]), np.array([1]))
