"""MOCK decode worker: says what its script says, in vLLM's words (see mock_workers.py)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from aiohttp import web

from prefillshare_server.router.topology import WorkerEndpoint
from tests.mocks.mock_workers import (
    BLOCK,
    SILENCE_S,
    MockCluster,
    MockWorker,
    error_answer,
)

DecodeFault = Literal[
    "drop_midway",
    "error_midway",
    "hang",
    "hang_midway",
    "no_finish",
    "preempted",
    "preempted_after_call",
    "refuse_lease",
    "refuse_missing",
    "refuse_taken",
    "status_400",
    "status_500",
]

Script = Callable[[dict[str, Any]], list[str]]
"""From the request to the answer's pieces of text, one generated token or more each."""


class MockDecode(MockWorker):
    """A mock decode worker that says what its script says."""

    def __init__(self, cluster: MockCluster, worker_id: str, role: str) -> None:
        super().__init__(cluster, worker_id)
        self.role = role
        self.fault: DecodeFault | None = None
        self.script: Script = lambda body: [f"{role} says", " yes"]
        self.tool_calls: list[dict[str, Any]] = []
        """What its tool parser makes of the answer, if anything."""
        self.pace: asyncio.Semaphore | None = None
        """Where given, each streamed piece takes a permit first."""
        self.gate = asyncio.Event()
        """Requests wait for it before anything is made of them."""
        self.gate.set()
        self.keeps_accounts = True
        self.dropped_accounts = 0
        """So many of the next requests for an account meet a broken connection."""
        self._accounts: dict[str, dict[str, Any]] = {}
        self.begun: set[str] = set()
        """X-Request-Ids of calls whose handoff was taken."""

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

    async def _account(self, request: web.Request) -> web.Response:
        if self.dropped_accounts:
            self.dropped_accounts -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        account = self._accounts.get(request.match_info["id"])
        if account is None:
            return error_answer(404, "no such call", 404)
        return web.json_response(account)

    async def _abandon(self, request: web.Request) -> web.Response:
        call_id = (await request.json())["request_id"]
        return web.json_response({"reading": call_id in self.begun})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        params: dict[str, Any] = body.get("kv_transfer_params") or {}
        self.requests.append(body)
        await self.gate.wait()
        if self.fault == "status_400":
            return error_answer(400, "temperature must be non-negative", 400)
        if self.fault == "status_500":
            return error_answer(500, "Internal server error", 500)
        if self.fault == "refuse_lease":
            return error_answer(503, "the lease ended", "lease_expired")
        if self.fault == "refuse_taken":  # By the engine, in vLLM's words.
            return error_answer(400, "handoff_taken: it was read before", 400)
        if self.fault == "refuse_missing":
            return error_answer(400, "no base KV", "base_kv_missing")
        ids: list[int] = params["prompt_token_ids"] if chat else body["prompt"]
        self._check(body, params, ids)
        self.cluster.leases.pop(params.get("remote_request_id", ""), None)
        call_id = request.headers["X-Request-Id"]
        self.begun.add(call_id)
        account: dict[str, Any] = {
            "base_tokens_received": len(ids) - 1,
            "base_tokens_reused": 0,
            "prompt_tokens_computed": 1,
            "handoff_bytes": -(-len(ids) // BLOCK) * 1024,
            "event": None,
        }
        if self.fault == "hang":
            await asyncio.sleep(SILENCE_S)
        if self.fault == "no_finish":
            account["event"] = "kv_load_failed"
        if self.keeps_accounts:
            self._accounts[call_id] = account
        if body.get("stream"):
            return await self._stream(request, body, ids, chat=chat)
        return web.json_response(self._whole(body, ids, call_id, chat=chat))

    def _check(self, body: dict[str, Any], params: dict[str, Any], ids: Any) -> None:
        lease = self.cluster.leases.get(params.get("remote_request_id", ""))
        self.expect(lease is not None, "a decode call without a lease that nobody has read yet")
        self.expect(lease is None or lease.ids == ids, "not the ids that were prefilled")
        self.expect(body["model"] == self.role, f"model {body['model']!r}")
        self.expect(body["n"] == 1, "n is not 1")
        self.expect(body["return_token_ids"] is True, "return_token_ids not asked for")

    def _pieces(self, body: dict[str, Any]) -> list[tuple[str, list[int]]]:
        encode = self.cluster.tokenizer.encode
        return [
            (text, encode(text, add_special_tokens=False).ids)
            for text in self.script(body)[: body.get("max_tokens") or None]
        ]

    def _whole(
        self, body: dict[str, Any], ids: list[int], call_id: str, *, chat: bool
    ) -> dict[str, Any]:
        pieces = self._pieces(body)
        text = "".join(piece for piece, _ in pieces)
        end = self.cluster.tokenizer.token_to_id("<|im_end|>")
        token_ids = [*(i for _, piece in pieces for i in piece), end]
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": {"content": [{"token": "x", "logprob": -1.0}]}
            if body.get("logprobs")
            else None,
            "finish_reason": "tool_calls" if self.tool_calls else "stop",
            "stop_reason": None,
            "token_ids": token_ids,
        }
        if self.fault == "preempted_after_call":
            choice |= {"stop_reason": "prefillshare:preempted"}
        if self.fault == "preempted":
            choice |= {"finish_reason": "abort", "stop_reason": "prefillshare:preempted"}
        if not chat:
            choice |= {"text": text, "prompt_token_ids": ids}
        elif self.tool_calls:
            choice["message"] = {
                "role": "assistant",
                "content": None,
                "tool_calls": self.tool_calls,
            }
        else:
            choice["message"] = {"role": "assistant", "content": text, "reasoning": None}
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(token_ids),
            "total_tokens": len(ids) + len(token_ids),
        }
        answer: dict[str, Any] = {
            "id": ("chatcmpl-" if chat else "cmpl-") + call_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": self.role,
            "choices": [choice],
            "usage": usage,
            "kv_transfer_params": {"prefillshare": {}},
        }
        return answer | ({"prompt_token_ids": ids} if chat else {})

    async def _stream(
        self, request: web.Request, body: dict[str, Any], ids: list[int], *, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for event in self._events(body, ids, request.headers["X-Request-Id"], chat=chat):
            if event == "abort":
                assert request.transport is not None
                request.transport.abort()
                return response
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(b"data: " + data.encode() + b"\n\n")
        return response

    async def _events(
        self, body: dict[str, Any], ids: list[int], call_id: str, *, chat: bool
    ) -> AsyncIterator[Any]:
        whole = self._whole(body, ids, call_id, chat=chat)
        [last] = whole.pop("choices")
        shared = {key: whole[key] for key in ("id", "created", "model")}
        shared["object"] = "chat.completion.chunk" if chat else "text_completion"

        def chunk(text: str | None, token_ids: list[int], **more: Any) -> dict[str, Any]:
            said = {"delta": {} if text is None else {"content": text}} if chat else {"text": text}
            return {**shared, "choices": [{"index": 0, **said, "token_ids": token_ids, **more}]}

        if self.fault == "no_finish":
            yield "[DONE]"
            return
        first = chunk("", [])
        if chat:
            first["choices"][0]["delta"]["role"] = "assistant"
            first["prompt_token_ids"] = ids
            yield first
        for number, (text, token_ids) in enumerate(self._pieces(body)):
            if self.pace is not None:
                await self.pace.acquire()
            yield chunk(None if self.tool_calls else text, token_ids)
            if number == 0 and self.fault == "drop_midway":
                yield "abort"
                return
            if number == 0 and self.fault == "hang_midway":
                await asyncio.sleep(SILENCE_S)
            if number == 0 and self.fault == "error_midway":
                yield {
                    "error": {"message": "engine died", "type": "InternalServerError", "code": 500}
                }
                yield "[DONE]"
                return
        end = chunk("", last["token_ids"][-1:], finish_reason=last["finish_reason"])
        if self.tool_calls:
            calls = [{**call, "index": i} for i, call in enumerate(self.tool_calls)]
            end["choices"][0]["delta"] = {"tool_calls": calls}
        end["choices"][0]["stop_reason"] = last["stop_reason"]
        yield end
        if body["stream_options"]["include_usage"]:
            yield {**shared, "choices": [], "usage": whole["usage"]}
        yield "[DONE]"
