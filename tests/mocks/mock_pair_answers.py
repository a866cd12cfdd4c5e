"""MOCK of a decode worker's answers in vLLM's words: chunks of a stream, or one JSON object."""

from typing import Any

from tests.mocks.mock_pair_ledger import PairCluster
from tests.mocks.mock_pair_sequence import DecodeRequest, Output
from tests.mocks.mock_pair_text import Deltas, parsed

PLACEHOLDER = -9999.0
"""Logprob of a replayed token."""


def logprob_of(token: int) -> float:
    """The logprob the mock model gives every token it generates itself."""
    return -1.0 - token / 1000


class Words:
    """Adds up the outputs of one request and words them."""

    def __init__(
        self,
        cluster: PairCluster,
        role: str,
        request: DecodeRequest,
        body: dict[str, Any],
        *,
        chat: bool,
    ) -> None:
        self._role = role
        self._request = request
        self._body = body
        self._chat = chat
        form = request.asked.form if chat else "text"
        self._form = form
        self._deltas = Deltas(cluster.words, form, cluster.random)
        self._opened = False
        self._ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self._wants_logprobs = bool(body.get("logprobs"))
        self._tells_usage = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first output's; none the second time."""
        if not self._chat or self._opened:
            return []
        self._opened = True
        chunk = self._chunk({"role": "assistant", "content": ""}, None)
        del chunk["choices"][0]["token_ids"]
        return [chunk | {"prompt_token_ids": self._request.ids}]

    def add(self, output: Output) -> dict[str, Any] | None:
        """Take in one output; the chunk for it, None where vLLM sends none."""
        first = not self._ids
        logprobs = [self._logprob(token, len(self._ids) + i) for i, token in enumerate(output.ids)]
        self._ids += output.ids
        self._logprobs += logprobs
        if first and not output.ids:
            return None  # vLLM drops it, although it has the finish reason.
        if not self._body.get("stream"):
            self._deltas.piece(output.ids)
            return None
        said: Any = self._deltas.delta(output.ids) if self._chat else self._deltas.piece(output.ids)
        chunk = self._chunk(said, output)
        if self._wants_logprobs:
            chunk["choices"][0]["logprobs"] = self._worded(logprobs)
        if not self._chat and first:
            chunk["choices"][0]["prompt_token_ids"] = self._request.ids
        return chunk

    def closing(self) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._named("chunk"), "choices": [], "usage": self._usage()}

    def whole(self, last: Output) -> dict[str, Any]:
        """The answer as one object."""
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": self._worded(self._logprobs) if self._wants_logprobs else None,
            "finish_reason": self._finish_reason(last),
            "stop_reason": last.stop_reason,
            "token_ids": self._ids,
        }
        answer = {**self._named("whole"), "choices": [choice], "usage": self._usage()}
        answer["kv_transfer_params"] = {"prefillshare": {}}
        if self._chat:
            choice["message"] = self._deltas.message()
            return answer | {"prompt_token_ids": self._request.ids}
        choice |= {"text": self._deltas.text, "prompt_token_ids": self._request.ids}
        return answer

    def _chunk(self, said: Any, output: Output | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "token_ids": output.ids if output else []}
        choice["delta" if self._chat else "text"] = said
        choice |= {"logprobs": None, "finish_reason": None}
        if output is not None and output.finish_reason is not None:
            choice["finish_reason"] = self._finish_reason(output)
            choice["stop_reason"] = output.stop_reason
        chunk = {**self._named("chunk"), "choices": [choice]}
        if self._tells_usage:
            chunk["usage"] = self._usage()
        return chunk

    def _finish_reason(self, output: Output) -> str | None:
        called = self._chat and parsed(self._deltas.text, self._form).calls
        # In an answer that is not streamed vLLM says so also where it gave the call up.
        ended = ("stop",) if self._body.get("stream") else ("stop", "abort")
        return "tool_calls" if called and output.finish_reason in ended else output.finish_reason

    def _named(self, kind: str) -> dict[str, Any]:
        words = {"chunk": "chat.completion.chunk", "whole": "chat.completion"}
        return {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + self._request.router_id,
            "object": words[kind] if self._chat else "text_completion",
            "created": 1,
            "model": self._role,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self._request.ids), len(self._ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _logprob(self, token: int, position: int) -> dict[str, Any]:
        replayed = position < len(self._request.generated)
        return {"token": str(token), "logprob": PLACEHOLDER if replayed else logprob_of(token)}

    def _worded(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._chat:
            return {"content": logprobs}
        return {
            "tokens": [each["token"] for each in logprobs],
            "token_logprobs": [each["logprob"] for each in logprobs],
        }
