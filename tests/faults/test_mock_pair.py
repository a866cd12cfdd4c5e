"""The MOCK pair: its blocks and leases behave as the real workers' do."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.faults.pair import Pair, pair
from tests.faults.virtual_time import Stuck, run
from tests.mocks.mock_pair_faults import Fault
from tests.mocks.mock_pair_language import Asked, expected_tokens

pytestmark = pytest.mark.faults

Body = Callable[[Pair], Coroutine[Any, Any, None]]


@pytest.fixture
def play(base_dir: Path) -> Callable[[Body], None]:
    """Run a test's body over a fresh pair, on a loop whose time jumps."""

    async def over_a_pair(body: Body) -> None:
        async with pair(base_dir) as workers:
            await body(workers)

    return lambda body: run(over_a_pair(body))


def test_time_jumps_and_a_wait_without_end_is_found() -> None:
    async def sleeps() -> float:
        await asyncio.sleep(100_000)
        return asyncio.get_running_loop().time()

    assert run(sleeps()) == pytest.approx(100_000)
    with pytest.raises(Stuck):
        run(asyncio.Event().wait())


def test_a_prompt_is_decoded_to_the_truth_and_everything_is_free(play: Any) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        params = await pair.prefilled(ids)
        assert pair.prefill.engine.leases
        _, answer = await pair.decoded(params, ids)
        true, reason = expected_tokens(pair.cluster.words, "alpha", ids, Asked.of({}))
        [choice] = answer["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (true, reason)
        assert not [*pair.prefill.leaks(), *pair.decode.leaks(), *pair.cluster.violations]

    play(body)


def test_only_missing_blocks_are_pulled(play: Any) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        for request_id, received in (("a", len(ids) - 1), ("b", (len(ids) - 1) % 16)):
            params = await pair.prefilled(ids, request_id)
            await pair.decoded(params, ids, request_id=request_id)
            account = pair.decode.engine.accounts[request_id]
            assert account["base_tokens_received"] == received
            assert account["base_tokens_received"] + account["base_tokens_reused"] == len(ids) - 1
            assert account["prompt_tokens_computed"] == 1

    play(body)


def test_a_resumed_answer_replays_token_by_token_and_goes_on(play: Any) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        true, _ = expected_tokens(pair.cluster.words, "alpha", ids, Asked.of({}))
        params = await pair.prefilled(ids)
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        _, events = await pair.decoded(params, ids, true[:3], **options)
        chunks = [event["choices"][0]["token_ids"] for event in events if event["choices"]]
        assert chunks[:3] == [[token] for token in true[:3]]
        assert [token for chunk in chunks for token in chunk] == true
        assert events[-1]["usage"]["completion_tokens"] == len(true)
        assert pair.decode.engine.accounts["r"]["generated_tokens_recomputed"] == 3

    play(body)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"do_remote_prefill": False}, "base_kv_missing"),
        ({"prefillshare": None}, "base_kv_missing"),
        ({"remote_block_ids": [[1]]}, "prompt_mismatch"),
        ({"prefillshare": {"base_fingerprint": "0" * 16}}, "base_kv_mismatch"),
        ({"prefillshare": {"base_len": 7}}, "prompt_mismatch"),
        ({"prefillshare": {"expires_at": 0.0}}, "lease_expired"),
    ],
)
def test_what_is_not_the_bases_kv_is_refused(play: Any, change: dict[str, Any], code: str) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        params = await pair.prefilled(ids)
        ours = change.get("prefillshare", {})
        changed = params | change
        changed["prefillshare"] = ours and params["prefillshare"] | ours
        if ours == {}:
            changed["prefillshare"] = params["prefillshare"]
        status, answer = await pair.decoded(changed, ids)
        assert code in (answer["error"]["code"], answer["error"]["message"].partition(":")[0])
        assert status == (503 if code == "lease_expired" else 400)
        assert len(pair.prefill.engine.leases) == 1, "a refused handoff is the router's to release"

    play(body)


def test_a_handoff_is_read_once(play: Any) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        params = await pair.prefilled(ids)
        await pair.decoded(params, ids)
        _, answer = await pair.decoded(params, ids, request_id="second")
        assert answer["error"]["message"].startswith("handoff_taken: ")

    play(body)


@pytest.mark.parametrize("when", ["before", "during", "after", "read"])
def test_a_release_frees_the_blocks_whenever_it_comes(play: Any, when: str) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        pair.prefill.compute_s = 1.0
        if when == "before":
            await pair.release("r")
        prefilling = asyncio.create_task(pair.prefilled(ids))
        await asyncio.sleep(0.5)
        if when == "during":
            await pair.release("r")
        params = await prefilling
        assert (params is None) == (when in ("before", "during"))
        if when == "read":
            await pair.decoded(params, ids)
        await pair.release("r")
        assert not pair.prefill.leaks()

    play(body)


def test_a_lease_ends_by_the_clock_unless_a_reader_waits(play: Any) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        params = await pair.prefilled(ids)
        pair.decode.queue_s = 1.0
        decoding = asyncio.create_task(pair.decoded(params, ids))
        await asyncio.sleep(0.5)
        await pair.prefilled(ids, "nobody reads it")
        pair.cluster.clock.advance(pair.cluster.lease_s + 1)
        pair.prefill.sweep()
        assert len(pair.prefill.engine.leases) == 1
        status, _ = await decoding
        assert status == 200
        assert not [*pair.prefill.leaks(), *pair.cluster.violations]

    play(body)


def test_a_full_worker_makes_prefills_wait_for_leases_to_end(play: Any) -> None:
    async def body(pair: Pair) -> None:
        prompts = [[token] * 17 * 16 for token in (40, 41)]
        await pair.prefilled(prompts[0], "first")
        second = asyncio.create_task(pair.prefilled(prompts[1], "second"))
        await asyncio.sleep(3)
        assert not second.done()
        await pair.release("first")
        assert (await second)["remote_block_ids"]
        await pair.release("second")
        assert not pair.prefill.leaks()

    play(body)


def test_a_killed_worker_comes_back_at_its_place_with_nothing(play: Any) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        params = await pair.prefilled(ids)
        port = pair.prefill.port
        pair.prefill.kill(down_s=1.0)
        with pytest.raises(aiohttp.ClientConnectionError):
            await pair.prefilled(ids)
        await asyncio.sleep(1.5)
        assert pair.prefill.port == port
        again = await pair.prefilled(ids)
        assert again["remote_engine_id"] != params["remote_engine_id"]
        assert again["remote_prefill_cached_tokens"] == 0
        _, answer = await pair.decoded(params, ids)
        assert answer["choices"][0]["stop_reason"] == "prefillshare:kv_load_failed"

    play(body)


@pytest.mark.parametrize(
    "kind", ["preempted", "kv_load_failed", "handoff_timeout", "lease_expired"]
)
def test_a_mark_ends_an_answer_with_what_it_had(play: Any, kind: Any) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        true, _ = expected_tokens(pair.cluster.words, "alpha", ids, Asked.of({}))
        params = await pair.prefilled(ids)
        pair.decode.plan.add(Fault(kind, after=3))
        _, answer = await pair.decoded(params, ids, true[:2])
        [choice] = answer["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", f"prefillshare:{kind}")
        assert choice["token_ids"] == true[: 3 if kind == "preempted" else 2]
        assert pair.decode.engine.accounts["r"]["event"] == kind
        assert not pair.decode.leaks()

    play(body)


def test_without_room_the_youngest_answer_is_preempted(play: Any) -> None:
    async def body(pair: Pair) -> None:
        prompts = [[token] * 79 for token in (40, 41)]
        params = [await pair.prefilled(ids, str(ids[0])) for ids in prompts]
        # Five blocks for each prompt and its first token, none for a third.
        pair.decode.engine.pool.take([], 32 - 10)
        answers = []
        for handoff, ids in zip(params, prompts, strict=True):
            answers.append(asyncio.create_task(pair.decoded(handoff, ids, request_id=str(ids[0]))))
            await asyncio.sleep(0.001)
        ends = [(await answer)[1]["choices"][0]["stop_reason"] for answer in answers]
        assert ends == [None, "prefillshare:preempted"]

    play(body)
