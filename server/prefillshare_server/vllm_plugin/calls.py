"""Accounts of finished calls, kept in the API process until the router fetches them."""

import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from prefillshare_server.vllm_plugin.account import PARAMS_KEY, REFUSED_KEY

if TYPE_CHECKING:
    from prefillshare_server.vllm_plugin.replay import Replays

CAPACITY = 4096
"""Accounts kept; the oldest goes first. Only a router that does not fetch them fills this."""

_ENGINE_ID = re.compile(r"(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<completion>.+)-\d+)")
_RANDOM_END = re.compile(r"-[0-9a-f]{8}$")


def router_request_id(engine_request_id: str, *, in_engine: bool = False) -> str:
    """The X-Request-Id behind the id vLLM gives a request.

    vLLM makes `chatcmpl-<id>` of it for chat and `cmpl-<id>-<prompt index>` for completions. In
    the engine's process each has 8 random hex digits at the end.
    """
    if in_engine:
        engine_request_id = _RANDOM_END.sub("", engine_request_id)
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


def recording(generate: Generate, log: CallLog, replays: "Replays") -> Generate:
    """`AsyncLLM.generate` of a decode worker that records the account in each last output.

    A request the engine refused raises vLLM's validation error, which its server answers with 400.
    A resumed answer begins with its replay, which therefore waits for the engine's first output.
    """
    from vllm.exceptions import VLLMValidationError

    async def generate_and_record(
        prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    params = output.kv_transfer_params if output.finished else None
                    ours = (params or {}).get(PARAMS_KEY)
                    if ours is not None:
                        if REFUSED_KEY in ours:
                            raise VLLMValidationError(
                                ours[REFUSED_KEY], parameter="kv_transfer_params"
                            )
                        # Before the output goes on: the router may ask once it has the last chunk.
                        log.record(request_id, ours)
                    for replayed in replays.take(request_id):
                        yield replayed
                    yield output
        finally:
            replays.take(request_id)

    return generate_and_record
