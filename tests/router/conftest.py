"""A router in this event loop over mock workers, and the small base it renders for."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from prefillshare_server.config import Cluster
from prefillshare_server.router.app import create_app
from prefillshare_server.router.parts import Router
from tests.mocks.mock_decode import MockDecode
from tests.mocks.mock_workers import BLOCKS, MAX_MODEL_LEN, MockCluster, MockPrefill, running
from tests.patience import INTERVALS, patient

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "user assistant system tool says yes no the weather in Paris is sunny and the answer is 42",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "a question an answer another question about numbers 1 2 3 4 5 6 7 8 9 and then some words",
] * 20
WAIT_S = 60.0
"""For what must come. A test that waits for less than it takes on a slow machine can fail."""

PATIENCE_S = 600.0
"""No limit of the router is over while a slow machine does nothing."""


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """For every test here."""
    with patient(PATIENCE_S, *INTERVALS):
        yield


async def until(condition: Callable[[], object]) -> None:
    """Wait for what must come to be."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, template and configuration of a base: all that the router reads of one.

    The tokenizer merges characters into words, so that a wrong cut changes its ids.
    """
    directory = tmp_path_factory.mktemp("base")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"})
    )
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": MAX_MODEL_LEN})
    )
    return directory


@pytest.fixture(scope="session")
def tokenizer(base_dir: Path) -> Tokenizer:
    """The base's tokenizer, as its own library reads it."""
    return Tokenizer.from_file(str(base_dir / "tokenizer.json"))


@dataclass
class Bench:
    """A served router and the mock workers behind it."""

    url: str
    router: Router
    cluster: MockCluster
    prefill: list[MockPrefill]
    decode: dict[str, MockDecode]
    http: aiohttp.ClientSession
    app: Starlette

    async def chat(
        self, content: str = "a question", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, Any, Any]:
        """One chat call; returns status, JSON body and headers."""
        messages = [{"role": "user", "content": content}]
        body = {"model": "alpha", "messages": messages, **fields}
        return await self.post("/v1/chat/completions", body, headers)

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """POST a JSON body; returns status, JSON body and headers."""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def stream(
        self, content: str = "a question", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> list[Any]:
        """One streamed chat call; returns its events, `[DONE]` as a string."""
        messages = [{"role": "user", "content": content}]
        body = {"model": "alpha", "messages": messages, **fields}
        return await self.events("/v1/chat/completions", body, headers)

    async def events(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> list[Any]:
        """POST a JSON body and ask for a stream; returns its events."""
        body = {**body, "stream": True}
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
            assert response.content_type == "text/event-stream"
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    async def get(self, path: str) -> tuple[int, Any]:
        """GET; returns status and JSON body."""
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        async with self.http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        start = (name,) if "{" in name else (name + "{", name + " ")
        found = [line for line in lines if line.startswith(start)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def counted(self, name: str, least: float) -> float:
        """A metric that is written when the answer is out already, once it has come so far."""
        async with asyncio.timeout(WAIT_S):
            while (value := await self.metric(name)) < least:
                await asyncio.sleep(0.005)
        return value

    def busy(self) -> dict[str, Any]:
        """What is not zero although no call should be running."""
        counts = {
            "sessions": self.router.sessions.in_flight,
            "waiting sessions": self.router.limit.waiting,
            "warm-ups": self.router.warm_ups.running,
            "prefilling": self.router.placement.prefilling.total(),
            "decoding": self.router.admission.decoding.total(),
            "reserved": self.router.admission.reserved.total(),
            "queued": self.router.admission.queued,
            "handoffs": sum(self.router.prefill.in_hand(worker.id) for worker in self.prefill),
            "leases": len(self.cluster.leases),
            "worker requests": sum(w.open_requests for w in [*self.prefill, *self.decode.values()]),
        }
        return {name: count for name, count in counts.items() if count}

    async def settled(self, *, leases_left: int = 0) -> dict[str, Any]:
        """Wait until nothing is busy but so many leases; returns what still is after a while."""
        expected = {"leases": leases_left} if leases_left else {}
        try:
            async with asyncio.timeout(WAIT_S):
                while self.busy() != expected:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return self.busy()
        return {}


Start = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def start(base_dir: Path, tokenizer: Tokenizer) -> Iterator[Start]:
    """Start a router over mock workers; on leaving, everything must have drained to zero."""

    @asynccontextmanager
    async def started(
        *,
        prefill: int = 1,
        decode: tuple[str, ...] = ("alpha-0", "beta-0"),
        decode_blocks: int = BLOCKS,
        settings: dict[str, Any] | None = None,
        leases_left: int = 0,
    ) -> AsyncIterator[Bench]:
        mocks = MockCluster(tokenizer)
        decodes = {name: MockDecode(mocks, name, name.partition("-")[0]) for name in decode}
        for worker in decodes.values():
            worker.num_blocks = decode_blocks
        roles = {worker.role: {"model": "unused"} for worker in decodes.values()}
        cluster = Cluster.model_validate(
            {"base": {"model": "unused"}, "roles": roles, **(settings or {})}
        )
        owners = roles if cluster.prefill.pool == "per_role" else (None,)
        prefills = [
            MockPrefill(mocks, f"prefill-{role}-{i}" if role else f"prefill-{i}", role)
            for role in owners
            for i in range(prefill)
        ]
        async with running(*prefills, *decodes.values()):
            endpoints = [worker.endpoint for worker in [*prefills, *decodes.values()]]
            app = create_app(cluster, endpoints, base_dir)
            async with serving(app) as url, aiohttp.ClientSession() as http:
                bench = Bench(url, app.state.router, mocks, prefills, decodes, http, app)
                yield bench
                assert not await bench.settled(leases_left=leases_left)
                assert await bench.metric("prefillshare_kv_pending_handoffs") == 0
                assert not mocks.violations

    # Tests of other folders start one too.
    with patient(PATIENCE_S, *INTERVALS):
        yield started


@pytest.fixture
async def bench(start: Start) -> AsyncIterator[Bench]:
    """A router over one mock prefill worker and one mock decode worker for each of two roles."""
    async with start() as started:
        yield started


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """`app` under uvicorn on a free port."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        lifespan="on",
        timeout_keep_alive=600,  # A client's next request must not meet the end of a short one.
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done(), "the router did not start"
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
