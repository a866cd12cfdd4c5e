"""An answer as the router sends it: one JSON object, or the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._asking import Ask
from ._breaks import HEADER
from ._ledger import Account
from ._rendering import answer_text, content_text, tokens

Message = Mapping[str, Any]
_REASONING = ("reasoning", "reasoning_content")


def generated_tokens(message: Message) -> int:
    """Tokens a model would have generated: the answer's, and the one that ends the turn."""
    return len(tokens(answer_text(message))) + 1


def headers(account: Account, request_id: str) -> dict[str, str]:
    """What is known before the first token."""
    report = account.report()
    known = {
        "X-Request-Id": request_id,
        "X-PrefillShare-Prefill-Worker": report["prefill_worker"],
        "X-PrefillShare-Decode-Worker": report["decode_worker"],
        "X-PrefillShare-Affinity": report["affinity"],
        "X-PrefillShare-Cached-Tokens": str(account.cached),
        "X-PrefillShare-Computed-Tokens": str(account.computed),
    }
    if account.session is not None:
        known["X-PrefillShare-Session"] = account.session
    if account.broken is not None:
        known[HEADER] = account.broken.header()
    return known


def whole(ask: Ask, messages: Sequence[Message], account: Account) -> dict[str, Any]:
    """The answer to a call that is not streamed."""
    choices = [
        {
            "index": index,
            "message": _shown(message, ask),
            "logprobs": None,
            "finish_reason": _finish(message),
            "stop_reason": None,
        }
        for index, message in enumerate(messages)
    ]
    return {
        **_envelope(ask, "chat.completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": account.usage(),
        "prompt_logprobs": None,
        "prefillshare": account.report(),
    }


def events(ask: Ask, messages: Sequence[Message], account: Account) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer. The last one carries the `prefillshare` object."""
    shared = _envelope(ask, "chat.completion.chunk")
    last = len(messages) - 1
    for index, message in enumerate(messages):
        for delta in _deltas(_shown(message, ask)):
            yield {**shared, "choices": [_choice(index, delta)]}
        end = {**_choice(index, {"content": ""}, _finish(message)), "stop_reason": None}
        if index == last and not ask.include_usage:
            yield {**shared, "choices": [end], "prefillshare": account.report()}
        else:
            yield {**shared, "choices": [end]}
    if ask.include_usage:
        report = account.report()
        yield {**shared, "choices": [], "usage": account.usage(), "prefillshare": report}


def _envelope(ask: Ask, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {
        "id": f"chatcmpl-{ask.request_id}",
        "object": kind,
        "created": created,
        "model": ask.role,
    }


def _choice(index: int, delta: Message, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _finish(message: Message) -> str:
    return message.get("finish_reason") or ("tool_calls" if message.get("tool_calls") else "stop")


def _shown(message: Message, ask: Ask) -> dict[str, Any]:
    """The message with every field a server sends."""
    hidden = {"finish_reason", *(_REASONING if ask.body.get("include_reasoning") is False else ())}
    empty = dict.fromkeys(
        ("content", "refusal", "annotations", "audio", "function_call", "reasoning")
    )
    shown = {"role": "assistant", **empty, **message}
    return {name: value for name, value in shown.items() if name not in hidden}


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    """An answer in pieces, as vLLM streams it: text token by token, arguments by parts."""
    yield {"role": "assistant", "content": ""}
    for name in _REASONING:
        yield from ({name: piece} for piece in tokens(message.get(name) or ""))
    yield from ({"content": piece} for piece in tokens(content_text(message)))
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        head = {"index": index, "type": "function", "id": call["id"]}
        yield {"tool_calls": [{**head, "function": {"name": function["name"]}}]}
        for piece in tokens(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
