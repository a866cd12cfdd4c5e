"""Workers that are killed while they answer: the client gets the same answer, or a clear error.

Real engines under a supervisor that starts them again. After every scenario nothing is left in
hand: no call, reservation, lease, request or KV block, at the router and at every worker.
"""

import asyncio
import json
import re
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.launch import supervisor
from tests.engine_faults.at_rest import assert_at_rest, state, until
from tests.engine_faults.calls import Answer, CallFailedError, Kind, call, chunks
from tests.engine_faults.killing import Kill, kept_away, suspended
from tests.served import Served, serve_in_thread

pytestmark = [pytest.mark.engine, pytest.mark.engine_faults]

QUEUE_S = 180
"""Longer than a restart takes, also on a busy machine."""

GIVE_UP_S = 5
"""Instead of it, where no worker will come back."""

TRIES = 5
"""On a busy machine all of an answer may be on its way, or there, before its worker is killed."""

CLUSTER = Cluster.model_validate(
    {
        "base": {"model": "tiny-base"},
        "prefill": {"replicas": 2},
        "roles": {
            "writer": {"model": "tiny-a", "replicas": 2},
            # The only replica of its role.
            "solo": {"model": "tiny-b"},
        },
        "decode": {
            "args": {
                # Random weights like blanks, and JSON may hold any number of them.
                "structured-outputs-config": json.dumps(
                    {"backend": "xgrammar", "disable_any_whitespace": True}
                ),
            }
        },
        "dtype": "float32",
        "max_model_len": 2048,
        "kv": {"blocks": 256},
        "timeouts": {"start_s": 240, "queue_s": QUEUE_S},
    }
)

LONG: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 300, "maxLength": 350}},
    "required": ["text"],
    "additionalProperties": False,
}
USER: dict[str, Any] = {"role": "user", "content": "Describe the harbour at night. " * 6}
WRITING: dict[str, Any] = {"model": "writer", "messages": [USER], "max_tokens": 480}


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Restarted workers outlive the test that killed them, so this looks at the whole module."""
    yield
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=60)
    assert not alive


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, nothing_left_behind: None) -> Iterator[Served]:
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        # The tests kill faster than a supervisor should forgive.
        patch.setattr(supervisor, "STABLE_S", 0.0)
        with serve_in_thread(CLUSTER, log_dir=logs, supervised=True) as running:
            yield running


@pytest.fixture(autouse=True)
def kill(served: Served) -> Iterator[Kill]:
    """Kills a worker. After the test all are back, and nothing is in hand."""
    killing = Kill(served)
    yield killing
    killing.settle()


def ask(
    served: Served, body: Mapping[str, Any], session: str | None = None, kind: Kind = "chat"
) -> Coroutine[Any, Any, Answer]:
    """The whole answer, over a connection of its own."""

    async def asking() -> Answer:
        async with aiohttp.ClientSession() as http:
            return await call(http, served.url, kind, body, session)

    return asking()


async def ask_and_kill(
    served: Served, kill: Kill, body: Mapping[str, Any], after: int, answer: Answer
) -> None:
    """Fill `answer`, and kill the decode worker once `after` tokens of it have come."""
    killed = False
    async with aiohttp.ClientSession() as http:
        async for _ in chunks(http, served.url, "chat", {**body, "stream": True}, None, answer):
            if not killed and len(answer.token_ids) >= after:
                killed = True
                kill(answer.decode_worker)


async def interrupted(
    served: Served, kill: Kill, body: Mapping[str, Any], after: int, undisturbed: Answer
) -> Answer:
    """An answer like `undisturbed`, whose worker was killed while it had more to write."""
    for _ in range(TRIES):
        answer = Answer()
        await ask_and_kill(served, kill, body, after, answer)
        assert_same(answer, undisturbed)
        if answer.report["resumed"]:
            return answer
        await asyncio.to_thread(kill.settle)
    raise AssertionError(f"{TRIES} answers were complete before their worker could be killed")


def assert_same(answer: Answer, undisturbed: Answer) -> None:
    assert answer.prompt_ids == undisturbed.prompt_ids
    assert answer.token_ids == undisturbed.token_ids
    assert answer.text == undisturbed.text
    functions = [[made["function"] for made in each.tool_calls] for each in (answer, undisturbed)]
    assert functions[0] == functions[1]
    assert answer.finish_reason == undisturbed.finish_reason
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.usage[key] == undisturbed.usage[key]


def unique_prompt(first: int, length: int) -> list[int]:
    """Token ids that no other test sends."""
    return [first, *(40 + index % 89 for index in range(length - 1))]


PAINT = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": LONG}}
STREAMS: dict[str, dict[str, Any]] = {
    "text": {},
    # Two to four tokens for each character, so that most tokens end inside of one.
    "multi-byte text": {"structured_outputs": {"regex": "[éüß€あ😀]{120}"}},
    "tool call": {
        "tools": [PAINT],
        "tool_choice": {"type": "function", "function": {"name": "paint"}},
    },
    "JSON schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "long", "schema": LONG, "strict": True},
        }
    },
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_stream_goes_on_when_its_decode_worker_is_killed(
    served: Served, kill: Kill, kind: str
) -> None:
    body = {**WRITING, **STREAMS[kind]}
    undisturbed = await ask(served, {**body, "stream": True})
    answer = await interrupted(served, kill, body, 37, undisturbed)
    assert (answer.report["resumed"], undisturbed.report["resumed"]) == (1, 0)
    assert answer.report["decode_worker"] != answer.decode_worker
    if kind == "text":
        assert len(answer.token_ids) == 480
    elif kind == "multi-byte text":
        assert len(answer.text) == 120
    elif kind == "tool call":
        [made] = answer.tool_calls
        assert len(json.loads(made["function"]["arguments"])["text"]) >= 300
    else:
        assert len(json.loads(answer.text)["text"]) >= 300


async def test_a_whole_answer_survives_its_decode_worker(served: Served, kill: Kill) -> None:
    undisturbed = await ask(served, WRITING)
    for _ in range(TRIES):
        answering = asyncio.create_task(ask(served, WRITING))
        if busy := await asyncio.to_thread(_generating, served, answering):
            kill(busy)
        answer = await answering
        assert_same(answer, undisturbed)
        if answer.report["resumed"]:
            break
        await asyncio.to_thread(kill.settle)
    assert answer.report["resumed"] == 1


async def test_a_prefill_worker_killed_between_calls_costs_one_full_prefill(
    served: Served, kill: Kill
) -> None:
    rebinds = _metric(served, "prefillshare_session_rebinds_total")
    prompt = unique_prompt(1, 400)
    body = {"model": "writer", "prompt": prompt, "max_tokens": 8}
    first = await ask(served, body, "moved", "completions")
    with kept_away():
        kill(first.report["prefill_worker"])
        second = await ask(served, body, "moved", "completions")
        third = await ask(served, body, "moved", "completions")
    assert second.token_ids == third.token_ids == first.token_ids
    assert second.report["affinity"] == "rebound"
    assert second.report["prefill_worker"] != first.report["prefill_worker"]
    assert second.report["computed_tokens"] == len(prompt)
    assert third.report["affinity"] == "hit"
    assert third.report["cached_tokens"] == len(prompt) // 32 * 32
    assert _metric(served, "prefillshare_session_rebinds_total") == rebinds + 1


async def test_a_prefill_worker_killed_during_prefill_is_replaced(
    served: Served, kill: Kill
) -> None:
    body = {"model": "writer", "prompt": unique_prompt(2, 300), "max_tokens": 8}
    undisturbed = await ask(served, body, "replaced", "completions")
    pinned = undisturbed.report["prefill_worker"]
    with kept_away(), suspended(served, pinned):
        answering = asyncio.create_task(ask(served, body, "replaced", "completions"))
        await asyncio.to_thread(until, lambda: _listed(served, pinned)["in_flight"])
        kill(pinned)
        answer = await answering
    assert answer.token_ids == undisturbed.token_ids
    assert answer.report["affinity"] == "rebound"
    assert answer.report["prefill_worker"] != pinned


@pytest.mark.parametrize("back", [False, True], ids=["gone", "restarted with a new engine id"])
async def test_a_prefill_worker_killed_between_prefill_and_pull(
    served: Served, kill: Kill, back: bool
) -> None:
    body: dict[str, Any] = {
        "model": "solo",
        "prompt": unique_prompt(3 + back, 300),
        "max_tokens": 8,
    }
    session = f"between-{back}"
    undisturbed = await ask(served, {**body, "max_tokens": 7}, session, "completions")
    pinned = undisturbed.report["prefill_worker"]
    # A prompt whose blocks the decode worker does not hold.
    body["prompt"] = [*body["prompt"], *undisturbed.token_ids, *unique_prompt(5, 200)]
    with ExitStack() as away:
        if not back:
            away.enter_context(kept_away())
        with suspended(served, "solo-0"):
            answering = asyncio.create_task(ask(served, body, session, "completions"))
            await asyncio.to_thread(until, lambda: state(served, pinned)["open_leases"])
            engine_id = _engine_id(served, pinned)
            kill(pinned)
            if back:
                await asyncio.to_thread(
                    until, lambda: _engine_id(served, pinned) not in (None, engine_id)
                )
        answer = await answering
    assert answer.report["resumed"] >= 1
    assert answer.token_ids == (await ask(served, body, None, "completions")).token_ids


async def test_a_stream_waits_for_its_only_replica(served: Served, kill: Kill) -> None:
    body = {**WRITING, "model": "solo"}
    undisturbed = await ask(served, {**body, "stream": True})
    answer = await interrupted(served, kill, body, 50, undisturbed)
    assert answer.report["decode_worker"] == "solo-0"


async def test_a_stream_without_a_replica_ends_in_an_error(
    served: Served, kill: Kill, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**WRITING, "model": "solo"}
    undisturbed = await ask(served, {**body, "stream": True})
    monkeypatch.setattr(served.router.admission, "_queue_s", GIVE_UP_S)
    failed: CallFailedError | None = None
    for _ in range(TRIES):
        answer, began = Answer(), time.monotonic()
        with kept_away():
            try:
                await ask_and_kill(served, kill, body, 50, answer)
            except CallFailedError as error:
                failed = error
                break
        assert_same(answer, undisturbed)
        await asyncio.to_thread(kill.settle)
    assert failed is not None
    assert (failed.status, failed.code) == (None, "no_worker")
    assert GIVE_UP_S <= time.monotonic() - began < QUEUE_S
    assert 50 <= len(answer.token_ids) < 480


async def test_an_idle_decode_worker_that_was_killed_serves_again(
    served: Served, kill: Kill
) -> None:
    body = {"model": "solo", "messages": [USER], "max_tokens": 20}
    undisturbed = await ask(served, body, "idle")
    kill("solo-0")
    assert_same(await ask(served, body, "idle"), undisturbed)


async def test_a_client_that_leaves_during_prefill_leaves_nothing(served: Served) -> None:
    body = {"model": "writer", "prompt": unique_prompt(6, 700), "max_tokens": 400}
    pinned = (await ask(served, body, "leaves", "completions")).report["prefill_worker"]
    with suspended(served, pinned):
        asking = asyncio.create_task(ask(served, body, "leaves", "completions"))
        await asyncio.to_thread(until, lambda: _listed(served, pinned)["in_flight"])
        await _leave(asking)
    await asyncio.to_thread(assert_at_rest, served)


async def test_a_client_that_leaves_at_any_moment_leaves_nothing(served: Served) -> None:
    """Wherever the request is by then: unread, in prefill, handed off, pulled, in decode."""
    for moment in range(15):
        body = {"model": "writer", "prompt": unique_prompt(20 + moment, 1500), "max_tokens": 400}
        asking = asyncio.create_task(ask(served, {**body, "stream": True}, None, "completions"))
        await asyncio.sleep(moment * 0.015)
        await _leave(asking)
    await asyncio.to_thread(assert_at_rest, served)


async def test_a_client_that_leaves_during_decode_leaves_nothing(served: Served) -> None:
    body = {**WRITING, "stream": True, "max_tokens": 1000}
    answer = Answer()
    async with aiohttp.ClientSession() as http:
        async for _ in chunks(http, served.url, "chat", body, None, answer):
            if len(answer.token_ids) >= 20:
                break
    await asyncio.to_thread(assert_at_rest, served)


async def test_a_client_that_leaves_between_prefill_and_pull_leaves_nothing(served: Served) -> None:
    body = {"model": "solo", "prompt": unique_prompt(7, 700), "max_tokens": 400}
    with suspended(served, "solo-0"):
        asking = asyncio.create_task(ask(served, body, None, "completions"))
        await asyncio.to_thread(until, lambda: _leased(served))
        await _leave(asking)
    await asyncio.to_thread(assert_at_rest, served)


async def _leave(asking: asyncio.Task[Answer]) -> None:
    """Close the client's connection."""
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


def _leased(served: Served) -> bool:
    names = [worker.id for worker in served.workers if worker.phase == "prefill"]
    return any(state(served, name)["open_leases"] for name in names)


def _listed(served: Served, worker_id: str) -> dict[str, Any]:
    data = httpx.get(f"{served.url}/v1/workers", timeout=60).json()["data"]
    [found] = [worker for worker in data if worker["id"] == worker_id]
    return dict(found)


def _generating(served: Served, answering: asyncio.Task[Answer]) -> str | None:
    """The replica that writes the answer of the role "writer"; None if it was there before."""
    names = [worker.id for worker in served.workers if worker.pool == "writer"]

    def look() -> str | bool:
        running = (name for name in names if state(served, name)["running"])
        return next(running, None) or answering.done()

    found = until(look)
    return found if isinstance(found, str) else None


def _engine_id(served: Served, worker_id: str) -> str | None:
    with suppress(httpx.HTTPError):
        info = httpx.get(f"{served.worker(worker_id).url}/prefillshare/info", timeout=30)
        if info.status_code == 200:
            return str(info.json()["engine_id"])
    return None


def _metric(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)$", text, re.MULTILINE))
