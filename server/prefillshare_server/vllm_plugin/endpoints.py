"""HTTP surface of a worker beside vLLM's own: what it is and does, and what each call cost.

vLLM loads this class through the entry point `vllm.endpoint_plugins` when VLLM_PLUGINS names it.
"""

import os
import time
from argparse import Namespace
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel
from starlette.datastructures import State

from prefillshare_server.vllm_plugin import SUPPORTED_VLLM
from prefillshare_server.vllm_plugin.admission import (
    Admission,
    AdmissionMiddleware,
    judge_answers_so_far,
    judge_handoffs,
)
from prefillshare_server.vllm_plugin.calls import Begun, CallLog, recording
from prefillshare_server.vllm_plugin.contract import BaseContract
from prefillshare_server.vllm_plugin.engine_calls import RELEASE, STATE
from prefillshare_server.vllm_plugin.handoff import Rules
from prefillshare_server.vllm_plugin.replay import Replays


class Call(BaseModel):
    """Body of `POST /prefillshare/release` and `/prefillshare/abandon`."""

    request_id: str
    """X-Request-Id of the call at this worker."""


class Adapter(BaseModel):
    """Body of `POST /prefillshare/adapters`."""

    name: str
    """See adapters.py."""


class PrefillShareEndpoints:
    """Implements vLLM's `EndpointPlugin` protocol."""

    name = "prefillshare"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._state: Any = None
        self._calls = CallLog()
        self._begun = Begun()
        self._info: dict[str, Any] = {}

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/prefillshare/info", self._get_info, methods=["GET"])
        app.add_api_route("/prefillshare/state", self._get_state, methods=["GET"])
        app.add_api_route("/prefillshare/calls/{request_id}", self._get_call, methods=["GET"])
        app.add_api_route("/prefillshare/release", self._release, methods=["POST"], status_code=204)
        app.add_api_route("/prefillshare/abandon", self._abandon, methods=["POST"])
        app.add_api_route("/prefillshare/adapters", self._load_adapter, methods=["POST"])
        app.add_middleware(AdmissionMiddleware)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        self._engine = engine_client
        self._state = state
        config = engine_client.vllm_config
        phase = _phase(config)
        block_bytes = await engine_client.collective_rpc("prefillshare_block_bytes")
        self._info = {
            "phase": phase,
            "model": args.served_model_name[0],
            "base_fingerprint": BaseContract.of_worker(config).fingerprint,
            "block_size": config.cache_config.block_size,
            "block_bytes": sum(block_bytes),
            "num_blocks": config.cache_config.num_gpu_blocks,
            "max_model_len": config.model_config.max_model_len,
            "vllm": SUPPORTED_VLLM,
            "pid": os.getpid(),
            "engine_id": uuid4().hex,
        }
        state.prefillshare_admission = None
        if phase != "prefill":
            vocabulary = config.model_config.get_vocab_size()
            judge = (
                judge_handoffs(Rules.of_worker(config))
                if phase == "decode"
                else judge_answers_so_far(vocabulary)
            )
            state.prefillshare_admission = Admission(judge, self._begun)
            self._wrap(engine_client, vocabulary)

    def _wrap(self, engine_client: Any, vocabulary: int) -> None:
        replays = Replays(engine_client.output_processor, vocabulary, self._begun)
        engine_client.generate = recording(engine_client.generate, self._calls, replays)
        engine_client.notify_kv_transfer_request_rejected = _leave_the_handoff

    async def _get_info(self) -> dict[str, Any]:
        return {**self._info, "now": time.time()}

    async def _get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self._engine.engine_core.call_utility_async(STATE)
        return {**state, "bytes_per_block": self._info["block_bytes"], "now": time.time()}

    async def _get_call(self, request_id: str) -> dict[str, Any]:
        account = self._calls.get(request_id)
        if account is None:
            raise HTTPException(
                404,
                f"No account of call {request_id!r}: it is not finished, did not reach the engine "
                "or was finished long ago.",
            )
        return account

    async def _load_adapter(self, body: Adapter) -> dict[str, str]:
        """Load an adapter before the first request that names it; nothing if it is loaded."""
        found = await self._state.openai_serving_models.resolve_lora(body.name)
        if (error := getattr(found, "error", None)) is not None:
            raise HTTPException(error.code, error.message)
        return {"name": body.name}

    async def _release(self, body: Call) -> Response:
        """Give up a prefill, in whatever state it is: nobody will read it, or not any more."""
        if self._info["phase"] != "prefill":
            raise HTTPException(404, "Only prefill workers hold leases that can be released.")
        await self._engine.engine_core.call_utility_async(RELEASE, body.request_id)
        return Response(status_code=204)

    async def _abandon(self, body: Call) -> dict[str, bool]:
        """Tell whether a call whose connection is gone may read its handoff; if not, it never will.

        It may lie unread in a socket, and the engine ends no lease of a request that it never saw.
        What a dead engine read is lost with it, and it gets no requests any more.
        """
        if self._info["phase"] == "prefill":
            raise HTTPException(404, "Only decode workers read handoffs.")
        begun = self._begun.give_up(body.request_id)
        return {"reading": begun and not self._engine.errored}


def _phase(config: Any) -> str:
    if config.kv_transfer_config is None:
        return "colocated"
    return "decode" if config.kv_transfer_config.kv_role == "kv_consumer" else "prefill"


async def _leave_the_handoff(*_: Any, **__: Any) -> None:
    """In place of vLLM's notice to the prefill worker that a request was rejected.

    It says that the handoff is over, though the request that took it first may still read. The
    router releases a handoff that nobody took.
    """
