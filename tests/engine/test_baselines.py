"""Routers that are baselines, on the engines of this folder's cluster: same answers, no sharing."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.models import store
from prefillshare_server.router.app import create_app
from tests.router.conftest import serving
from tests.served import Served

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

BLOCK = 32
ROLES = ("planner", "solver")


def baseline(served: Served, **prefill: Any) -> Any:
    """Another router over the same workers, of which each of two roles gets one to prefill."""
    cluster = Cluster.model_validate(
        {
            "base": {"model": "tiny-base"},
            "roles": {role: {"model": "unused"} for role in ROLES},
            "prefill": prefill,
        }
    )
    workers = [worker for worker in served.workers if worker.phase == "prefill"]
    if cluster.prefill.pool == "per_role":
        workers = [replace(w, pool=role) for w, role in zip(workers, ROLES, strict=True)]
    workers += [
        worker for worker in served.workers if worker.pool in ROLES and worker.phase == "decode"
    ]
    return create_app(cluster, workers, store.resolve("tiny-base"))


async def ask(
    http: httpx.AsyncClient, url: str, role: str, ids: list[int], session: str, **headers: str
) -> tuple[str, dict[str, Any]]:
    body = {"model": role, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = await http.post(
        f"{url}/v1/completions", json=body, headers={"X-Session-ID": session, **headers}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["prefillshare"]


@pytest.mark.parametrize("switch", [{"reuse": "per_role"}, {"pool": "per_role"}])
async def test_each_role_computes_the_prompt_itself_and_answers_the_same(
    served: Served, switch: dict[str, str]
) -> None:
    [name] = switch
    ids = random.Random(name).choices(range(256), k=4 * BLOCK + 5)
    async with serving(baseline(served, **switch)) as url, httpx.AsyncClient(timeout=60) as http:
        found = [await ask(http, url, role, ids, name) for role in (*ROLES, *ROLES)]
        assert [report["cached_tokens"] for _, report in found] == [0, 0, 4 * BLOCK, 4 * BLOCK]
        homes = {report["prefill_worker"] for _, report in found}
        assert len(homes) == (2 if name == "pool" else 1)
        shared = [(await ask(http, served.url, role, ids, name))[0] for role in ROLES]
        assert [text for text, _ in found] == shared * 2


async def test_a_warm_up_leaves_the_next_role_nothing_but_what_is_new(served: Served) -> None:
    ids = random.Random("warm-up").choices(range(256), k=4 * BLOCK + 5)
    app = baseline(served, pool="per_role", warm_ups=1)
    async with serving(app) as url, httpx.AsyncClient(timeout=60) as http:
        await ask(http, url, "planner", ids, "w", **{"X-PrefillShare-Next-Role": "solver"})
        async with asyncio.timeout(60):
            while app.state.router.warm_ups.running:
                await asyncio.sleep(0.01)
        _, report = await ask(http, url, "solver", [*ids, *ids[:20]], "w")
        assert (report["cached_tokens"], report["computed_tokens"]) == (4 * BLOCK, 25)
