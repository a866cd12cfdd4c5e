"""The router as each baseline of the paper: prefill workers or KV per role, and warm-ups."""

import asyncio
from typing import Any

import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.errors import ConfigError
from prefillshare_server.router.app import create_app
from prefillshare_server.router.topology import WorkerEndpoint
from tests.mocks.mock_workers import BLOCK
from tests.router.conftest import Bench, Start, until

PER_MODEL = {"prefill": {"pool": "per_role"}}
SHARED_POOL = {"prefill": {"reuse": "per_role"}}
PREDICTIVE = {"prefill": {"pool": "per_role", "warm_ups": 1}}
IDS = [7 + i % 50 for i in range(4 * BLOCK + 3)]


async def send(
    bench: Bench, role: str, session: str = "s", *, ids: list[int] | None = None, **headers: str
) -> Any:
    named = {"X-Session-ID": session} | {
        "X-PrefillShare-" + name.title().replace("_", "-"): value for name, value in headers.items()
    }
    body = {"model": role, "prompt": ids or IDS}
    status, answer, _ = await bench.post("/v1/completions", body, named)
    return answer["prefillshare"] if status == 200 else (status, answer["error"])


async def test_with_pools_per_role_each_role_prefills_on_workers_of_its_own(start: Start) -> None:
    async with start(prefill=2, settings=PER_MODEL) as bench:
        for turn in range(2):
            for role in ("alpha", "beta"):
                report = await send(bench, role)
                assert report["prefill_worker"].startswith(f"prefill-{role}-")
                assert report["affinity"] == ("hit" if turn else "new")
                assert report["cached_tokens"] == (4 * BLOCK if turn else 0)
        homes = [worker.id for worker in bench.prefill if worker.requests]
        assert len(homes) == 2
        session = (await bench.get("/v1/sessions/s"))[1]
        assert session["prefill_worker"] == ",".join(homes)
        assert bench.router.sessions.pinned.total() == 2
        listed = (await bench.get("/v1/workers"))[1]["data"]
        assert [worker["roles"] for worker in listed if worker["phase"] == "prefill"] == [
            ["alpha"],
            ["alpha"],
            ["beta"],
            ["beta"],
        ]
        async with bench.http.delete(f"{bench.url}/v1/sessions/s") as response:
            assert response.status == 200
        assert bench.router.sessions.pinned.total() == 0


async def test_a_fork_starts_on_its_parents_workers_of_every_role(start: Start) -> None:
    async with start(prefill=2, settings=PER_MODEL) as bench:
        homes = [(await send(bench, role))["prefill_worker"] for role in ("alpha", "beta")]
        for role, home in zip(("beta", "alpha"), reversed(homes), strict=True):
            headers = {"X-Session-ID": "fork", "X-Parent-Session-ID": "s"}
            body = {"model": role, "prompt": IDS}
            _, answer, _ = await bench.post("/v1/completions", body, headers)
            assert answer["prefillshare"]["prefill_worker"] == home


async def test_a_role_whose_prefill_workers_are_away_takes_no_other_roles(start: Start) -> None:
    settings = {**PER_MODEL, "timeouts": {"queue_s": 0.05}}
    async with start(settings=settings) as bench:
        bench.router.health.drain("prefill-alpha-0")
        status, error = await send(bench, "alpha")
        assert (status, error["code"]) == (503, "no_worker")
        assert "prefill-alpha-0: " in error["message"]
        assert "prefill-beta-0" not in error["message"]
        assert (await send(bench, "beta"))["prefill_worker"] == "prefill-beta-0"


async def test_an_answer_that_breaks_off_is_prefilled_again_by_its_roles_worker(
    start: Start,
) -> None:
    decode = ("alpha-0", "alpha-1", "beta-0")
    async with start(prefill=2, decode=decode, settings=PER_MODEL) as bench:
        bench.decode["alpha-0"].fault = "preempted"
        bench.decode["alpha-1"].fault = "preempted"
        home = (await send(bench, "beta"))["prefill_worker"]
        asking = asyncio.create_task(send(bench, "alpha"))
        await until(lambda: sum(len(bench.decode[name].requests) for name in decode[:2]) >= 2)
        bench.decode["alpha-0"].fault = bench.decode["alpha-1"].fault = None
        report = await asking
        assert report["resumed"] >= 1
        assert report["prefill_worker"].startswith("prefill-alpha-")
        [beta] = [worker for worker in bench.prefill if worker.id == home]
        assert len(beta.requests) == 1


async def test_prefill_workers_that_a_role_lacks_are_a_clear_error_at_the_start(
    base_dir: Any,
) -> None:
    cluster = Cluster.model_validate(
        {
            "base": {"model": "unused"},
            "roles": {"alpha": {"model": "unused"}, "beta": {"model": "unused"}},
            **PER_MODEL,
        }
    )
    workers = [
        WorkerEndpoint("prefill-alpha-0", "prefill", "alpha", "http://w", "base"),
        WorkerEndpoint("alpha-0", "decode", "alpha", "http://w", "alpha"),
        WorkerEndpoint("beta-0", "decode", "beta", "http://w", "beta"),
    ]
    with pytest.raises(ConfigError, match=r"prefill\.pool: per_role, .* for beta"):
        create_app(cluster, workers, base_dir)


async def test_with_reuse_per_role_sessions_stay_on_one_worker_and_roles_share_no_kv(
    start: Start,
) -> None:
    async with start(prefill=2, settings=SHARED_POOL) as bench:
        first, other, again = [await send(bench, role) for role in ("alpha", "beta", "alpha")]
        assert len({r["prefill_worker"] for r in (first, other, again)}) == 1
        assert [r["cached_tokens"] for r in (first, other, again)] == [0, 0, 4 * BLOCK]
        salts = {
            worker.id: worker.requests[0]["cache_salt"]
            for worker in (*bench.prefill, *bench.decode.values())
            if worker.requests
        }
        assert salts[first["prefill_worker"]] == salts["alpha-0"] != salts["beta-0"]


async def test_with_reuse_per_role_a_role_shares_with_itself_in_other_sessions(
    start: Start,
) -> None:
    async with start(settings=SHARED_POOL) as bench:
        await send(bench, "alpha", "s")
        assert (await send(bench, "alpha", "t"))["cached_tokens"] == 4 * BLOCK
        assert (await send(bench, "beta", "t"))["cached_tokens"] == 0


@pytest.mark.parametrize("settings", [PER_MODEL, SHARED_POOL])
async def test_where_roles_share_no_kv_nothing_is_prefilled_ahead_for_all(
    start: Start, settings: dict[str, Any]
) -> None:
    async with start(settings=settings) as bench:
        messages = [{"role": "user", "content": "a question"}]
        status, body, _ = await bench.post("/v1/sessions/s/prefill", {"messages": messages})
        assert (status, body["error"]["param"]) == (400, "messages")
        assert "per_role" in body["error"]["message"]


async def test_a_salt_that_is_no_text_is_refused_where_the_router_adds_its_own(
    start: Start,
) -> None:
    async with start(settings=SHARED_POOL) as bench:
        status, body, _ = await bench.chat(cache_salt=7)
        assert (status, body["error"]["param"]) == (400, "cache_salt")


async def test_a_warm_up_prefills_the_prompt_for_the_next_role_while_the_first_answers(
    start: Start,
) -> None:
    async with start(prefill=2, settings=PREDICTIVE) as bench:
        bench.decode["alpha-0"].fault = "hang"
        answering = asyncio.create_task(send(bench, "alpha", next_role="beta"))
        await until(lambda: [w for w in bench.prefill if w.role == "beta" and w.requests])
        [home] = [w for w in bench.prefill if w.role == "beta" and w.requests]
        assert home.requests[0]["prompt"] == IDS[: 4 * BLOCK]
        assert not answering.done()
        answering.cancel()
        await until(lambda: not bench.router.warm_ups.running)
        report = await send(bench, "beta", ids=[*IDS, *IDS])
        assert (report["prefill_worker"], report["cached_tokens"]) == (home.id, 4 * BLOCK)
        assert await bench.metric('prefillshare_warm_ups_total{result="ok"}') == 1
        assert (await bench.get("/v1/sessions/s"))[1]["computed_tokens"] == 12 * BLOCK + 9


async def test_a_call_does_not_wait_for_its_own_warm_up(start: Start) -> None:
    async with start(settings=PREDICTIVE) as bench:
        [_, beta] = bench.prefill
        beta.fault, beta.faulty_calls = "slow", 1
        await send(bench, "alpha", next_role="beta")
        await until(lambda: beta.requests)
        assert (await send(bench, "beta"))["prefill_worker"] == beta.id
        assert bench.router.warm_ups.running == 1
        beta.gate.set()


async def test_more_warm_ups_at_once_than_a_worker_may_have_are_dropped(start: Start) -> None:
    async with start(settings=PREDICTIVE) as bench:
        beta = bench.prefill[1]
        beta.fault = "slow"
        for session in ("s", "t"):
            await send(bench, "alpha", session, next_role="beta")
        await until(lambda: beta.requests)
        assert len(beta.requests) == 1
        assert await bench.metric('prefillshare_warm_ups_total{result="dropped"}') == 1
        beta.gate.set()
        assert not await bench.settled()
        await send(bench, "alpha", "u", next_role="beta")
        await until(lambda: len(beta.requests) == 2)


async def test_with_reuse_per_role_a_warm_up_fills_the_next_roles_cache(start: Start) -> None:
    settings = {"prefill": {"reuse": "per_role", "warm_ups": 2}}
    async with start(settings=settings) as bench:
        await send(bench, "alpha", next_role="beta")
        await until(lambda: len(bench.prefill[0].requests) == 2)
        assert not await bench.settled()
        assert (await send(bench, "beta"))["cached_tokens"] == 4 * BLOCK


async def test_a_warm_up_that_fails_is_counted_and_disturbs_nobody(start: Start) -> None:
    async with start(settings=PREDICTIVE) as bench:
        bench.prefill[1].fault = "status_400"
        await send(bench, "alpha", next_role="beta")
        await until(lambda: bench.prefill[1].requests)
        assert not await bench.settled()
        bench.prefill[1].fault = None
        assert (await send(bench, "beta"))["affinity"] == "new"
        assert await bench.metric("prefillshare_warm_ups_total") == 1
        assert await bench.metric('prefillshare_warm_ups_total{result="ok"}') == 0


@pytest.mark.parametrize("headers", [{}, {"next_role": "alpha"}])
async def test_without_another_role_to_come_nothing_is_warmed_up(
    start: Start, headers: dict[str, Any]
) -> None:
    async with start(settings=PREDICTIVE) as bench:
        await send(bench, "alpha", **headers)
        assert not bench.prefill[1].requests
        assert await bench.metric("prefillshare_warm_ups_total") == 0


async def test_a_next_role_that_does_not_exist_is_a_400_that_names_it(start: Start) -> None:
    async with start(settings=PREDICTIVE) as bench:
        status, error = await send(bench, "alpha", next_role="gamma")
        assert (status, error["param"]) == (400, "x-prefillshare-next-role")
        assert "'gamma'" in error["message"]
        assert not bench.prefill[0].requests


async def test_without_warm_ups_the_next_role_is_ignored(bench: Bench) -> None:
    assert (await send(bench, "alpha", next_role="gamma"))["role"] == "alpha"
    await send(bench, "alpha", next_role="beta")
    assert len(bench.prefill[0].requests) == 2
