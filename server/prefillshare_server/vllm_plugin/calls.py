"""Accounts of finished calls, kept in the API process until the router fetches them."""

import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any

from prefillshare_server.vllm_plugin.account import PARAMS_KEY, REFUSED_KEY

CAPACITY = 4096
"""Accounts kept; the oldest goes first. Only a router that does not fetch them fills this."""

_ENGINE_ID = re.compile(r"(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<completion>.+)-\d+)")


def router_request_id(engine_request_id: str) -> str:
    """The X-Request-Id behind the id vLLM gives a request.

    vLLM makes `chatcmpl-<id>` of it for chat and `cmpl-<id>-<prompt index>` for completions.
    """
    match = _ENGINE_ID.fullmatch(engine_request_id)
    if match is None:
        return engine_request_id
    return match["chat"] or match["completion"]


class CallLog:
    """Account by X-Request-Id; reading removes it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._accounts: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def record(self, engine_request_id: str, account: dict[str, Any]) -> None:
        self._accounts[router_request_id(engine_request_id)] = account
        while len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)

    def pop(self, request_id: str) -> dict[str, Any] | None:
        return self._accounts.pop(request_id, None)


Generate = Callable[..., AsyncGenerator[Any, None]]


def recording(generate: Generate, log: CallLog) -> Generate:
    """`AsyncLLM.generate` of a decode worker that records the account in each last output.

    A request the engine refused raises vLLM's validation error, which its server answers with 400.
    """
    from vllm.exceptions import VLLMValidationError

    async def generate_and_record(
        prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        async for output in generate(prompt, sampling_params, request_id, **kwargs):
            ours = (output.kv_transfer_params or {}).get(PARAMS_KEY) if output.finished else None
            if ours is not None:
                if REFUSED_KEY in ours:
                    raise VLLMValidationError(ours[REFUSED_KEY], parameter="kv_transfer_params")
                # Before the output goes on: the router may ask once it has the last chunk.
                log.record(request_id, ours)
            yield output

    return generate_and_record
