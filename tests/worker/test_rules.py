"""The rules of a worker that need no engine: handoffs, waiting, request ids, failure reasons."""

import json
import threading
import time
from queue import Queue
from typing import Any

import pytest

from prefillshare_server.launch.process import reason_in
from prefillshare_server.vllm_plugin.admission import Admission, judge_handoffs
from prefillshare_server.vllm_plugin.calls import (
    BEGUN_CAPACITY,
    CAPACITY,
    Begun,
    CallLog,
    router_request_id,
)
from prefillshare_server.vllm_plugin.engine_loop import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    CalmWait,
    _wait_for_input,
)
from prefillshare_server.vllm_plugin.handoff import (
    Deadlines,
    ReadableParams,
    Rules,
    SingleUse,
    prompt_digest,
)

BASE = "0123456789abcdef"
RULES = Rules(base_fingerprint=BASE, lease_s=120, clock_skew_s=1, vocabulary=256)


def params(**changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[3, 4]],
        "remote_engine_id": "engine",
        "remote_request_id": "cmpl-x-0",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "prompt_token_ids": [1] * 40,
        "prefillshare": {
            "base_len": 40,
            "base_fingerprint": BASE,
            "expires_at": time.time() + 100,
            "prompt_digest": prompt_digest([1] * 40),
        },
        **changes,
    }


def judged(body: dict[str, Any]) -> str | None:
    """Code of the refusal, None when admitted."""
    refused = Admission(judge_handoffs(RULES), Begun()).refusal(json.dumps(body).encode())
    return refused.code if refused is not None else None


def test_a_complete_handoff_is_admitted() -> None:
    assert judged({"model": "m", "messages": [], "kv_transfer_params": params()}) is None
    assert judged({"n": 1, "echo": False, "kv_transfer_params": params()}) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"do_remote_prefill": False},
        {"remote_block_ids": []},
        {"remote_block_ids": [[1], [2]]},
        {"remote_block_ids": None},
        {"remote_port": "5600"},
        {"prefillshare": None},
        {"prefillshare": {"base_len": 0}},
    ],
)
def test_an_incomplete_handoff_is_no_handoff(broken: dict[str, Any]) -> None:
    assert judged({"kv_transfer_params": params(**broken)}) == "base_kv_missing"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"n": "two"}'])
def test_what_cannot_be_judged_is_left_to_vllm(body: bytes) -> None:
    assert Admission(judge_handoffs(RULES), Begun()).refusal(body) is None


def test_a_lease_must_outlast_the_first_heartbeat() -> None:
    readable = ReadableParams.of(params())
    assert readable is not None
    expires_at = readable.prefillshare.expires_at
    # A lease of 120 s is renewed every 20 s; the other clock may be two seconds ahead.
    assert RULES.refusal(readable, now=expires_at - 24) is None
    short = {**params()["prefillshare"], "expires_at": time.time() + 22}
    assert judged({"kv_transfer_params": params(prefillshare=short)}) == "lease_expired"


@pytest.mark.parametrize(
    ("clock_skew_s", "judged_as"), [(0.0, None), (0.9, None), (1.1, "lease_expired")]
)
def test_a_clock_that_is_behind_does_not_stretch_a_lease(
    clock_skew_s: float, judged_as: str | None
) -> None:
    # This clock is behind the router's by that much, and the prefill worker's is ahead of it.
    rules = Rules(base_fingerprint=BASE, lease_s=6, clock_skew_s=clock_skew_s, vocabulary=256)
    readable = ReadableParams.of(params())
    assert readable is not None
    # 4 s before the end of a lease that must last 2 s more.
    refused = rules.refusal(readable, now=readable.prefillshare.expires_at - 4)
    assert (refused and refused.code) == judged_as


@pytest.mark.parametrize(
    ("generated", "judged_as"),
    [
        ([], None),
        ([0, 255], None),
        ([256], "generated_ids_invalid"),
        ([-1], "base_kv_missing"),
        ("ab", "base_kv_missing"),
        ([1.5], "base_kv_missing"),
    ],
)
def test_an_answer_so_far_is_made_of_tokens(generated: Any, judged_as: str | None) -> None:
    ours = {**params()["prefillshare"], "generated_ids": generated}
    assert judged({"kv_transfer_params": params(prefillshare=ours)}) == judged_as


def test_base_kv_that_came_in_time_is_not_overdue() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 10)
    deadlines.came("a", now=10)
    assert deadlines.overdue(now=99) == []


def test_base_kv_that_came_too_late_is_overdue() -> None:
    # However long the engine's step took in which it came.
    deadlines = Deadlines()
    deadlines.set("a", 10)
    assert deadlines.overdue(now=10) == []
    deadlines.came("a", now=10.1)
    assert deadlines.overdue(now=10.1) == ["a"]
    deadlines.drop("a")
    assert deadlines.overdue(now=99) == []


def test_requests_end_each_at_its_own_deadline() -> None:
    deadlines = Deadlines()
    for request_id, deadline in {"a": 12, "b": 11, "c": 13}.items():
        deadlines.set(request_id, deadline)
    assert deadlines.overdue(now=11.5) == ["b"]
    deadlines.came("unknown", now=0)
    assert sorted(deadlines.overdue(now=12.5)) == ["a", "b"]


def test_a_handoff_is_taken_once() -> None:
    taken = SingleUse()
    assert taken.take("a", expires_at=10, now=0) is None
    assert taken.take("b", expires_at=11, now=1) is None
    refused = taken.take("a", expires_at=10, now=2)
    assert refused is not None
    assert refused.code == "handoff_taken"


def test_expired_handoffs_are_forgotten() -> None:
    taken = SingleUse()
    for second in range(1000):
        taken.take(f"request-{second}", expires_at=second + 10, now=second)
    assert len(taken._expiry) <= 11


@pytest.mark.parametrize(
    ("engine_id", "router_id"),
    [
        ("chatcmpl-abc", "abc"),
        ("chatcmpl-abc-0", "abc-0"),
        ("cmpl-abc-0", "abc"),
        ("cmpl-a-b-c-12", "a-b-c"),
        ("resp_xyz", "resp_xyz"),
    ],
)
def test_request_ids_map_back_to_the_routers(engine_id: str, router_id: str) -> None:
    assert router_request_id(engine_id) == router_id


@pytest.mark.parametrize("engine_id", ["cmpl-abc-0-0123abcd", "chatcmpl-abc-0123abcd"])
def test_ids_in_the_engine_map_back_too(engine_id: str) -> None:
    assert router_request_id(engine_id, in_engine=True) == "abc"


def test_the_call_log_is_bounded_and_can_be_read_again() -> None:
    log = CallLog(capacity=2)
    for name in "abc":
        log.record(f"chatcmpl-{name}", {"name": name})
    assert log.get("a") is None
    assert log.get("c") == log.get("c") == {"name": "c"}


def test_a_call_that_is_given_up_first_does_not_begin() -> None:
    begun = Begun()
    assert not begun.give_up("a")
    assert not begun.begin("cmpl-a-0")
    assert not begun.give_up("a")
    assert begun.begin("cmpl-b-0")


def test_a_call_that_began_cannot_be_kept_from_the_engine() -> None:
    begun = Begun()
    assert begun.begin("chatcmpl-a")
    assert begun.give_up("a")
    assert begun.give_up("a")
    assert not begun.give_up("aa")


def test_given_up_calls_are_refused_before_vllm_sees_them() -> None:
    begun, body = Begun(), json.dumps({"kv_transfer_params": params()}).encode()
    begun.give_up("a")
    refused = Admission(judge_handoffs(RULES), begun).refusal(body, "a")
    assert refused is not None
    assert (refused.code, refused.retryable) == ("call_given_up", False)
    assert Admission(judge_handoffs(RULES), begun).refusal(body, "b") is None
    assert Admission(judge_handoffs(RULES), begun).refusal(body) is None


def test_what_is_known_of_calls_is_bounded() -> None:
    begun = Begun()
    for call in range(100_000):
        begun.begin(f"cmpl-{call}-0")
        begun.give_up(f"never-{call}")
    assert begun.give_up("99999")
    assert not begun.begin("cmpl-never-99999-0")
    assert len(begun._begun) <= BEGUN_CAPACITY
    assert len(begun._given_up) <= CAPACITY


def test_waits_grow_with_idle_time_and_start_again_after_work() -> None:
    wait = CalmWait()
    assert wait.next_wait(now=100.0) == FIRST_WAIT_S
    assert wait.next_wait(now=100.04) == pytest.approx(0.01)
    assert wait.next_wait(now=105.0) == LONGEST_WAIT_S
    wait.ran()
    assert wait.next_wait(now=200.0) == FIRST_WAIT_S


def test_what_comes_ends_a_wait_at_once() -> None:
    queue: Queue[str] = Queue()
    comes = threading.Timer(0.2, queue.put, ["a release"])
    comes.start()
    begun = time.monotonic()
    _wait_for_input(queue, timeout=120)
    assert queue.get_nowait() == "a release"
    assert time.monotonic() - begun < 60
    comes.join()


def test_our_own_line_is_the_reason() -> None:
    log = "\n".join(
        [
            "(EngineCore pid=7) ERROR core.py:1 ValueError: something before",
            "(EngineCore pid=7) ERROR core.py:1 prefillshare_server.vllm_plugin.contract."
            "ContractError: prefillshare: worker a-0: /m does not fit the base: x: base 1",
            "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause.",
        ]
    )
    expected = "worker a-0: /m does not fit the base: x: base 1"
    assert reason_in(log) == expected


def test_the_first_exception_that_is_no_wrapper_is_the_reason() -> None:
    log = "\n".join(
        [
            "INFO 11-29 12:00:00 all well",
            "(EngineCore pid=7) ERROR core.py:1 vllm.errors.CacheError: No memory for the cache",
            "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause.",
        ]
    )
    assert reason_in(log) == "CacheError: No memory for the cache"


def test_an_engine_that_was_killed_is_the_reason() -> None:
    log = "\n".join(
        [
            "(APIServer pid=6) WARNING [shutdown] MPClient: engine core exited unexpectedly",
            "(APIServer pid=6) ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
            "encountered an issue. See stack trace (above) for the root cause.",
        ]
    )
    assert reason_in(log) == "its engine process was killed; is there enough memory?"


def test_a_log_without_a_reason_gives_none() -> None:
    assert reason_in("INFO all well\n") is None


def test_a_vllm_argument_that_is_wrong_is_the_reason() -> None:
    log = (
        "usage: worker.py [-h] [--foo {a,b}]\n"
        "worker.py: error: argument --structured-outputs-config: 1 validation error\n"
        "  Value error, only supported for xgrammar [type=value_error]\n"
    )
    assert reason_in(log) == (
        "vLLM refuses its arguments: argument --structured-outputs-config: 1 validation error "
        "Value error, only supported for xgrammar [type=value_error]"
    )
