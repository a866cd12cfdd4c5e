"""MOCK decode worker of the pair: what it accepts, refuses and answers (see mock_pair_sequence.py).

Its defences against KV that is not the base's are the real plug-in's, and each can be switched off
to see whether a test notices.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.vllm_plugin.handoff import (
    ReadableParams,
    lease_margin_s,
    prompt_digest,
)
from tests.mocks.mock_pair_answers import Words
from tests.mocks.mock_pair_faults import Fault
from tests.mocks.mock_pair_language import Asked
from tests.mocks.mock_pair_ledger import BLOCK, PairCluster
from tests.mocks.mock_pair_sequence import DecodeEngine, DecodeRequest, Output, Source
from tests.mocks.mock_pair_server import FINGERPRINT, SILENCE_S, PairWorker, error_answer

CLOCK_SKEW_S = 1.0


@dataclass(slots=True)
class Guards:
    """The defences of a decode worker. All on, it serves base KV or nothing."""

    lease: bool = True
    """Refuses a handoff whose lease has ended, or is about to."""
    heartbeats: bool = True
    """Keeps a lease alive from accepting a request to having pulled its KV."""
    engine_id: bool = True
    """Pulls only from the very engine that made the handoff."""
    single_use: bool = True
    prompt: bool = True
    """Refuses a prompt other than the one the base processed."""
    cache_base_only: bool = True
    """Keeps its own KV out of its prefix cache."""


class PairDecode(PairWorker):
    """A mock decode worker that speaks for one role."""

    phase = "decode"

    def __init__(self, cluster: PairCluster, worker_id: str, num_blocks: int, *, role: str) -> None:
        super().__init__(cluster, worker_id, num_blocks)
        self.role = role
        self.guards = Guards()
        self.computes_prompts = False
        """Fills the prompt's KV with its own weights, which no decode worker may."""
        self.queue_s = 0.0
        """Every request waits so long before it gets blocks."""
        self.wire_s = 0.003
        self.pace_s = 0.002
        """Between tokens."""
        self.merging = 0.1
        """How often a token waits for the next one and leaves with it."""

    @property
    def engine(self) -> DecodeEngine:
        return self._engine

    def boot(self) -> None:
        self._engine = DecodeEngine(self.num_blocks)

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(
            self.id, "decode", self.role, self.url, self.role, BLOCK, 1024, self.num_blocks
        )

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completions),
            web.get("/prefillshare/calls/{id}", self._account),
            web.post("/prefillshare/abandon", self._abandon),
        ]

    def state(self) -> dict[str, Any]:
        return super().state() | asdict(self.engine.totals)

    async def _account(self, request: web.Request) -> web.Response:
        account = self.engine.accounts.get(request.match_info["id"])
        if account is None:
            return error_answer(404, "no such call", 404)
        return web.json_response(account)

    async def _abandon(self, request: web.Request) -> web.Response:
        call_id = (await request.json())["request_id"]
        self.engine.given_up.add(call_id)
        return web.json_response({"reading": call_id in self.engine.begun})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        params: Any = body.get("kv_transfer_params") or {}
        ids: list[int] = (params.get("prompt_token_ids") if chat else body.get("prompt")) or []
        with self.serves(call := self.cluster.call_of(ids)):
            return await self._served(request, body, ids, call, chat=chat)

    async def _served(
        self, request: web.Request, body: dict[str, Any], ids: list[int], call: str, *, chat: bool
    ) -> web.StreamResponse:
        params: Any = body.get("kv_transfer_params") or {}
        self.cluster.counted(self.id)
        self._check(body)
        fault = self.plan.next()
        if fault is not None and not body.get("stream"):
            fault = _for_whole_answers(fault)
        if fault is not None and (refused := await self._refused_by(fault, request, call)):
            return refused
        readable = ReadableParams.of(params)
        refusal = self._refusal(readable, ids)
        if refusal is not None or readable is None:
            code = refusal or "base_kv_missing"
            self.cluster.note(f"{self.id} refuses call {call}: {code}")
            if code in ("prompt_mismatch", "handoff_taken"):  # The engine's, in vLLM's words.
                return error_answer(400, f"{code}: refused", 400)
            return error_answer(503 if code == "lease_expired" else 400, code, code)
        router_id = request.headers.get("X-Request-Id", "")
        if router_id in self.engine.given_up:
            return error_answer(400, "The router gave this call up.", 400)
        self.engine.begun.add(router_id)
        self.engine.taken.add(readable.remote_request_id)
        made = DecodeRequest(
            worker=self,
            engine=self.engine,
            router_id=router_id,
            call=call,
            ids=ids,
            asked=Asked.of(body),
            source=Source(self, readable),
            generated=list(params["prefillshare"].get("generated_ids") or ()),
            fault=fault,
        )
        self.cluster.note(
            f"{self.id} decodes {made.router_id[:8]} of call {call}, "
            f"{len(made.generated)} tokens in"
        )
        words = Words(self.cluster, self.role, made, body, chat=chat)
        if body.get("stream"):
            return await self._stream(request, made, words)
        return await self._whole(request, made, words)

    def _check(self, body: dict[str, Any]) -> None:
        for what, bad in (
            ("the model is not the role", body.get("model") != self.role),
            ("n is not 1", body.get("n") != 1),
            ("token ids are not asked for", body.get("return_token_ids") is not True),
        ):
            if bad:
                self.cluster.violated(f"{self.id}: decode request: {what}")

    def _refusal(self, params: ReadableParams | None, ids: list[int]) -> str | None:
        """As the real plug-in judges; the error's code."""
        if params is None:
            return "base_kv_missing"
        handoff, guards = params.prefillshare, self.guards
        margin_s = lease_margin_s(self.cluster.lease_s) + 2 * CLOCK_SKEW_S
        if handoff.base_fingerprint != FINGERPRINT:
            return "base_kv_mismatch"
        if guards.lease and self.cluster.clock.now() > handoff.expires_at - margin_s:
            return "lease_expired"
        blocks = len(params.remote_block_ids[0])
        if guards.prompt and (
            handoff.base_len != len(ids)
            or handoff.prompt_digest != prompt_digest(ids)
            or blocks != -(-len(ids) // BLOCK)
        ):
            return "prompt_mismatch"
        if guards.single_use and params.remote_request_id in self.engine.taken:
            return "handoff_taken"
        return None

    async def _refused_by(
        self, fault: Fault, request: web.Request, call: str
    ) -> web.StreamResponse | None:
        """What `fault` does before the request is judged."""
        if fault.kind in ("drop", "hang", "kill") and fault.after < 0:
            return await self._strike(fault, request, call)
        if fault.kind in ("status_500", "refuse_lease", "lease_expired", "slow", "no_usage"):
            self.struck(fault, call)
        if fault.kind == "no_done":
            self.struck(fault, call)
        if fault.kind == "status_500":
            return error_answer(500, "Internal server error", 500)
        if fault.kind == "refuse_lease":
            return error_answer(503, "lease_expired", "lease_expired")
        return None

    async def _strike(self, fault: Fault, request: web.Request, call: str) -> web.StreamResponse:
        """Break off or fall silent."""
        self.struck(fault, call)
        if fault.kind == "kill":
            self.kill(fault.down_s)
        elif fault.kind == "drop":
            return await self.drop(request)
        await asyncio.sleep(SILENCE_S)
        raise AssertionError("a silent request lives on")

    async def _outputs(
        self, request: web.Request, made: DecodeRequest
    ) -> AsyncGenerator[Output, None]:
        """The request's outputs, with the faults that do not depend on the answer's form."""
        fault = made.fault
        if fault is not None and fault.kind == "lease_expired":
            # It never gets into the engine, and nobody tells the prefill worker.
            self.engine.accounts[made.router_id] = asdict(made.account) | {"event": fault.kind}
            for token in made.generated:
                yield Output([token])
            yield Output([], "abort", f"prefillshare:{fault.kind}")
            return
        breaks = fault is not None and fault.kind in ("drop", "hang", "kill")
        async with aclosing(made.outputs()) as outputs:
            async for output in outputs:
                if fault is not None and breaks and made.sent >= fault.after:
                    await self._strike(fault, request, made.call)
                if fault is not None and fault.kind == "slow":
                    await asyncio.sleep(0.05)
                yield output

    async def _whole(
        self, request: web.Request, made: DecodeRequest, words: Words
    ) -> web.StreamResponse:
        last = Output([])
        async with aclosing(self._outputs(request, made)) as outputs:
            async for last in outputs:
                words.add(last)
        return web.json_response(words.whole(last))

    async def _stream(
        self, request: web.Request, made: DecodeRequest, words: Words
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: Any) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        fault = made.fault
        async with aclosing(self._outputs(request, made)) as outputs:
            async for output in outputs:
                for event in words.opening():
                    await send(event)
                chunk = words.add(output)
                if fault is not None and made.sent >= fault.after:
                    ended = await self._broken(fault, made, response, chunk)
                    if ended:
                        return response
                if chunk is not None:
                    await send(chunk)
        if fault is None or fault.kind != "no_usage":
            await send(words.closing())
        if fault is None or fault.kind != "no_done":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _broken(
        self, fault: Fault, made: DecodeRequest, response: web.StreamResponse, chunk: Any
    ) -> bool:
        """End the stream in the way of `fault`, if it is one of those that do."""
        if fault.kind not in ("bad_event", "cut_event", "ends_early", "error_event", "no_finish"):
            return False
        self.struck(fault, made.call)
        event = b"data: " + json.dumps(chunk).encode()
        if fault.kind == "cut_event":
            await response.write(event[: len(event) // 2])
        elif fault.kind == "bad_event":
            await response.write(event[:-7] + b"\n\n")
        elif fault.kind == "error_event":
            error = {"message": "engine died", "type": "InternalServerError", "code": 500}
            await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        elif fault.kind == "no_finish":
            await response.write(b"data: [DONE]\n\n")
        return True


def _for_whole_answers(fault: Fault) -> Fault:
    """The same, or a broken connection where the fault is one of streams."""
    if fault.kind in ("bad_event", "cut_event", "ends_early", "error_event", "no_finish"):
        fault.kind = "drop"
    return fault
