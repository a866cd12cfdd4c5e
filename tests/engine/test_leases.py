"""No lease outlives its call, and no calls wait for each other's KV blocks for ever."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.served import Served

pytestmark = pytest.mark.engine

SETTLE_S = 60
"""Half of a lease: what is left to end by itself takes longer."""


def used(served: Served) -> list[float]:
    """Share of KV blocks in use on each prefill worker, blocks that are only cached not counted."""
    urls = [worker.url for worker in served.workers if worker.phase == "prefill"]
    pattern = re.compile(r"^vllm:kv_cache_usage_perc\S* (\S+)$", re.MULTILINE)
    texts = [httpx.get(f"{url}/metrics", timeout=60).text for url in urls]
    return [float(pattern.findall(text)[0]) for text in texts]


def assert_all_given_back(served: Served) -> None:
    deadline = time.monotonic() + SETTLE_S
    while any(used(served)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert used(served) == [0.0, 0.0]


def complete(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{served.url}/v1/completions", json={"model": "planner", **body}, timeout=240
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": 25},
        {"temperature": -1},
        {"seed": "x"},
        {"n": 4, "seed": "x"},
        {"n": 3, "logprobs": 25},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}},
    ],
    ids=str,
)
def test_a_refused_request_gives_its_leases_back(
    served: Served, wrong: dict[str, Any], stream: bool
) -> None:
    answer = complete(served, prompt=[40] * 900, max_tokens=4, stream=stream, **wrong)
    assert "error" in answer.text
    assert_all_given_back(served)


def test_a_prefill_ahead_takes_no_lease(served: Served) -> None:
    assert_all_given_back(served)
    body = {"messages": [{"role": "user", "content": "A long log. " * 200}], "wait": True}
    url = f"{served.url}/v1/sessions/test-leases-ahead/prefill"
    assert httpx.post(url, json=body, timeout=100).json()["computed_tokens"] > 500
    assert used(served) == [0.0, 0.0]


def test_calls_of_many_prompts_do_not_starve_each_other(served: Served) -> None:
    """Each of the two takes more than half of a prefill worker's blocks before it decodes."""

    def many(first: int) -> httpx.Response:
        return complete(served, prompt=[[first + i] * 700 for i in range(14)], max_tokens=2)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(many, (20, 40, 60, 80)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(len(answer.json()["choices"]) == 14 for answer in answers)
    assert_all_given_back(served)


def test_more_prompts_than_the_prefill_worker_holds_are_a_400(served: Served) -> None:
    answer = complete(served, prompt=[[30 + i] * 700 for i in range(30)], max_tokens=2)
    assert answer.status_code == 400
    # 30 prompts of 22 blocks; of 512 vLLM keeps one.
    assert "take 660 KV blocks" in answer.json()["error"]["message"]
    assert "has 511" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream_options", "abc"),
        ("stream", "false"),
        ("max_tokens", -1000),
        ("max_tokens", 0),
    ],
)
def test_a_field_of_the_wrong_kind_is_a_400_that_names_it(
    served: Served, field: str, value: Any
) -> None:
    body = {"stream": True} | {field: value}
    answer = complete(served, prompt=[40] * 90, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert_all_given_back(served)
