"""What a decode worker's API process knows of calls, by their X-Request-Id.

Which the engine has or had, which the router gave up before, and what those that ended cost.
"""

import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from prefillshare_server.vllm_plugin.account import PARAMS_KEY, REFUSED_KEY, Account

if TYPE_CHECKING:
    from prefillshare_server.vllm_plugin.replay import Replays

CAPACITY = 4096
"""Accounts kept; the oldest goes first. Only a router that does not fetch them fills this."""

BEGUN_CAPACITY = 65536
"""More calls than come while one reads: one that is forgotten before would lose its blocks."""

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


class Remembered(OrderedDict[str, None]):
    """A bounded set; the oldest goes first."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def put(self, name: str) -> str | None:
        """Add `name`; returns what had to go for it, if anything."""
        self[name] = None
        self.move_to_end(name)
        return self.popitem(last=False)[0] if len(self) > self._capacity else None


class Begun:
    """Calls that the engine has or had, and calls that it must not get any more."""

    def __init__(self) -> None:
        self._begun = Remembered(BEGUN_CAPACITY)
        self._given_up = Remembered(CAPACITY)

    def begin(self, engine_request_id: str) -> bool:
        """Note that the call goes to the engine now; False if it was given up."""
        call = router_request_id(engine_request_id)
        if self.was_given_up(call):
            return False
        self._begun.put(call)
        return True

    def give_up(self, request_id: str) -> bool:
        """Keep the call from the engine. True if that has or had it, and so ends its lease."""
        self._given_up.put(request_id)
        return request_id in self._begun

    def was_given_up(self, request_id: str) -> bool:
        return request_id in self._given_up


class CallLog:
    """Account by X-Request-Id. It can be read again: the first answer may not have come over."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._accounts: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def record(self, engine_request_id: str, account: dict[str, Any]) -> None:
        self._accounts[router_request_id(engine_request_id)] = account
        while len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)

    def get(self, request_id: str) -> dict[str, Any] | None:
        return self._accounts.get(request_id)


Generate = Callable[..., AsyncGenerator[Any, None]]


def recording(generate: Generate, log: CallLog, replays: "Replays") -> Generate:
    """`AsyncLLM.generate` of a decode worker that records the account in each last output.

    A request the engine refused raises vLLM's validation error, which its server answers with 400.
    A resumed answer begins with its replay, which therefore waits for the engine's first output.
    """
    from vllm.exceptions import GenerationError, VLLMValidationError

    from prefillshare_server.vllm_plugin.replay import GivenUp

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
                    elif output.finished and output.outputs[0].finish_reason != "abort":
                        # The answer so far was the whole answer: nothing ran here.
                        log.record(request_id, Account().to_params()[PARAMS_KEY])
                    for replayed in replays.take(request_id):
                        yield replayed
                    yield output
        except GivenUp as error:
            # The one kind that vLLM's server does not report in the log where it ends a stream.
            raise GenerationError(str(error)) from None
        finally:
            replays.take(request_id)

    return generate_and_record
