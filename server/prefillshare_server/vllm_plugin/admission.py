"""What a worker that decodes refuses before vLLM sees it, as ASGI middleware.

The middleware answers before vLLM does anything, so a stream is refused with a status code too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefillshare_server.vllm_plugin.calls import Begun
from prefillshare_server.vllm_plugin.handoff import (
    ReadableParams,
    Refusal,
    Rules,
    answer_so_far,
    beyond_vocabulary,
)

GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class _Body(msgspec.Struct):
    """What decides admission, parsed without the rest; vLLM validates the whole body afterwards."""

    n: int | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


Judge = Callable[[msgspec.Raw], Refusal | None]
"""Decides by a request's `kv_transfer_params`, as JSON."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What one worker that decodes asks of a request."""

    judge: Judge
    begun: Begun

    def refusal(self, body: bytes, request_id: str | None = None) -> Refusal | None:
        """Judge a generating request by its JSON body and X-Request-Id; None admits it."""
        if request_id is not None and self.begun.was_given_up(request_id):
            return Refusal("call_given_up", "The router gave this call up before it came.")
        try:
            request = msgspec.json.decode(body, type=_Body)
        except msgspec.MsgspecError:
            # Not a body we can judge: vLLM answers with its own 400, and the scheduler refuses
            # whatever should reach the engine without base KV.
            return None
        if (request.n or 1) > 1 or request.use_beam_search:
            return Refusal(
                "one_answer_per_handoff",
                "A decode worker gives one answer per handoff: set n to 1 and use no beam search. "
                "The router makes one handoff for each of n answers.",
            )
        if request.prompt_logprobs is not None or request.echo:
            return Refusal(
                "prompt_logprobs_unsupported",
                "prompt_logprobs and echo make the decoder compute the whole prompt itself; "
                "a decode worker never does. Remove them.",
            )
        return self.judge(request.kv_transfer_params)


def judge_handoffs(rules: Rules) -> Judge:
    """For decode workers, which read base KV that a prefill worker computed."""
    return lambda params: rules.refusal(_readable(params), time.time())


def judge_answers_so_far(vocabulary: int) -> Judge:
    """For engines that compute base KV themselves."""

    def judge(params: msgspec.Raw) -> Refusal | None:
        return beyond_vocabulary(answer_so_far(msgspec.json.decode(params)), vocabulary)

    return judge


class AdmissionMiddleware:
    """Applies `app.state.prefillshare_admission`, which is None on a prefill worker."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING_PATHS:
            await self._app(scope, receive, send)
            return
        admission: Admission | None = scope["app"].state.prefillshare_admission
        if admission is None:
            await self._app(scope, receive, send)
            return
        messages = await _whole_body(receive)
        refused = admission.refusal(
            b"".join(message.get("body", b"") for message in messages),
            Headers(scope=scope).get("x-request-id"),
        )
        if refused is not None:
            await error_response(refused)(scope, receive, send)
        else:
            await self._app(scope, _replay(messages, receive), send)


def error_response(refused: Refusal) -> JSONResponse:
    """The refusal as OpenAI's error body."""
    return JSONResponse(
        {
            "error": {
                "message": refused.message,
                "type": "server_error" if refused.retryable else "invalid_request_error",
                "param": "kv_transfer_params",
                "code": refused.code,
            }
        },
        status_code=refused.status,
        headers={"x-should-retry": "true" if refused.retryable else "false"},
    )


def _readable(params: msgspec.Raw) -> ReadableParams | None:
    # Straight from JSON to the fields needed: the prompt's token ids are skipped unparsed.
    try:
        parsed = msgspec.json.decode(params, type=ReadableParams)
    except msgspec.ValidationError:
        return None
    return parsed if parsed.do_remote_prefill else None


async def _whole_body(receive: Receive) -> list[Message]:
    """Every message up to the end of the body, or up to a disconnect."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that gives `messages` again, then goes on with the connection's own."""
    remaining = iter(messages)

    async def replayed() -> Message:
        message = next(remaining, None)
        return message if message is not None else await receive()

    return replayed
