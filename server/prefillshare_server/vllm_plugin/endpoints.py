"""HTTP surface of a worker beside vLLM's own: what it is, and what each call cost.

vLLM loads this class through the entry point `vllm.endpoint_plugins` when VLLM_PLUGINS names it.
"""

import os
from argparse import Namespace
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel
from starlette.datastructures import State

from prefillshare_server.vllm_plugin import SUPPORTED_VLLM
from prefillshare_server.vllm_plugin.admission import Admission, AdmissionMiddleware
from prefillshare_server.vllm_plugin.calls import CallLog, recording
from prefillshare_server.vllm_plugin.contract import BaseContract
from prefillshare_server.vllm_plugin.release import once_per_handoff


class Release(BaseModel):
    """Body of `POST /prefillshare/release`."""

    kv_transfer_params: dict[str, Any]


class PrefillShareEndpoints:
    """Implements vLLM's `EndpointPlugin` protocol."""

    name = "prefillshare"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._calls = CallLog()
        self._info: dict[str, Any] = {}

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/prefillshare/info", self._get_info, methods=["GET"])
        app.add_api_route("/prefillshare/calls/{request_id}", self._get_call, methods=["GET"])
        app.add_api_route("/prefillshare/release", self._release, methods=["POST"], status_code=204)
        app.add_middleware(AdmissionMiddleware)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        self._engine = engine_client
        config = engine_client.vllm_config
        fingerprint = BaseContract.of_worker(config).fingerprint
        decode = config.kv_transfer_config.kv_role == "kv_consumer"
        block_bytes = await engine_client.collective_rpc("prefillshare_block_bytes")
        self._info = {
            "phase": "decode" if decode else "prefill",
            "model": args.served_model_name[0],
            "base_fingerprint": fingerprint,
            "block_size": config.cache_config.block_size,
            "block_bytes": sum(block_bytes),
            "num_blocks": config.cache_config.num_gpu_blocks,
            "max_model_len": config.model_config.max_model_len,
            "vllm": SUPPORTED_VLLM,
            "pid": os.getpid(),
        }
        lease_s = config.kv_transfer_config.get_from_extra_config("kv_lease_duration", 30)
        state.prefillshare_admission = Admission(fingerprint, lease_s) if decode else None
        if decode:
            engine_client.generate = recording(engine_client.generate, self._calls)
            engine_client.notify_kv_transfer_request_rejected = once_per_handoff(
                engine_client.notify_kv_transfer_request_rejected
            )

    async def _get_info(self) -> dict[str, Any]:
        return self._info

    async def _get_call(self, request_id: str) -> dict[str, Any]:
        account = self._calls.pop(request_id)
        if account is None:
            raise HTTPException(
                404,
                f"No account of call {request_id!r}: it is not finished, did not reach the engine "
                "or was read before.",
            )
        return account

    async def _release(self, body: Release) -> Response:
        """Give up a handoff that no request will read: the prefill worker frees its blocks now.

        Only a reader can tell the prefill worker so, hence a decode worker does it.
        """
        await self._engine.notify_kv_transfer_request_rejected(
            f"release-{uuid4().hex}", body.kv_transfer_params
        )
        return Response(status_code=204)
