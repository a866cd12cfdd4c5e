"""How workers end: under their reader, when told to, and with a launcher that is killed."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.launch.plan import WorkerSpec, plan
from prefillshare_server.launch.warmup import warm_up_pair
from prefillshare_server.vllm_plugin.handoff import lease_margin_s
from tests.reference import base_cache_logprobs
from tests.worker.conftest import CLUSTER
from tests.worker.driver import (
    IDLE_S,
    Answer,
    Pair,
    changed,
    family,
    pair_of,
    resuming,
    running,
    stopped,
)
from tests.worker.test_waiting import CORE_SHARE, core_shares

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Tokens = Callable[[int], list[int]]

LEASE_S = 10
HANDOFF_S = 5
MARGIN_S = lease_margin_s(LEASE_S) + 2 * CLUSTER.kv.clock_skew_s
"""Less than this, and a decode worker refuses a handoff."""

LONG_S = 60
TRIES = 5
"""Of what a busy machine may be too slow for: leases and waits are short here."""

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from prefillshare_server.config import Cluster
from prefillshare_server.launch.plan import WorkerSpec, plan
from tests.worker.conftest import CLUSTER
from prefillshare_server.launch.local_cluster import LocalCluster

async def main():
    async with LocalCluster(CLUSTER, log_dir=Path(sys.argv[1])) as workers:
        print(*workers.pids.values(), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def crash(pid: int) -> None:
    """Kill a worker as the kernel does when memory runs out: without a chance to clean up."""
    # All found before the first is killed: the others then end by themselves.
    victims = [
        process
        for process in family(pid)
        # Not a part of the worker that can crash: it removes what the others leave.
        if "resource_tracker" not in " ".join(process.cmdline())
    ]
    for process in victims:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    # Until its last thread has ended, the memory of a killed process can be read.
    while any(map(has_threads, victims)):
        time.sleep(0.01)


def has_threads(process: psutil.Process) -> bool:
    """Whether any of its threads has not ended."""
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")
        return len(threads) > 1 or process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.NoSuchProcess):
        return False


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that the processes have mapped, also under another name by now."""
    mapped: set[int] = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        mapped |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps)}
    found = set()
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):  # Others' files come and go.
            if path.stat().st_ino in mapped:
                found.add(path)
    return found


def ports(processes: list[psutil.Process]) -> set[int]:
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def assert_gone(processes: list[psutil.Process], listened: set[int], segments: set[Path]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=IDLE_S)
    assert not alive
    assert not [path for path in segments if path.exists()]
    # Orphans are children of this process. Others may listen there by now: ports are used again.
    left = [process.pid for process in psutil.Process().children(recursive=True)]
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    assert not [c for c in listening if c.laddr and c.laddr.port in listened and c.pid in left]


@dataclass(frozen=True)
class Doomed:
    """A pair of workers that the tests break, in their order."""

    pair: Pair
    stop: Callable[[], None]
    taken: int
    """The port that both workers were to listen on, and that was not free."""


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doomed]:
    cluster = CLUSTER.model_copy(
        update={
            "kv": CLUSTER.kv.model_copy(update={"lease_s": LEASE_S}),
            "timeouts": CLUSTER.timeouts.model_copy(update={"handoff_s": HANDOFF_S}),
        }
    )
    log_dir = tmp_path_factory.mktemp("logs")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.MonkeyPatch.context() as patch,
    ):
        port = taken.getsockname()[1]

        def unlucky_plan(cluster: Cluster, *, log_dir: Path) -> list[WorkerSpec]:
            prefill, decode = plan(cluster, log_dir=log_dir)
            return [replace(prefill, port=port), replace(decode, side_channel_port=port)]

        patch.setattr("prefillshare_server.launch.local_cluster.plan", unlucky_plan)
        patch.setattr("prefillshare_server.launch.local_cluster.warm_up_pair", repeated_warm_up)
        with running(cluster, log_dir) as (workers, stop):
            pair = pair_of(workers, "tiny-base", "tiny-a", log_dir)
            with pair.http:
                yield Doomed(pair, stop, port)


async def repeated_warm_up(*pair: Any, **options: Any) -> None:
    """The short lease of its call may end before the decode worker sees it."""
    for _ in range(TRIES - 1):
        with suppress(aiohttp.ClientError):
            await warm_up_pair(*pair, **options)
            return
    await warm_up_pair(*pair, **options)


def is_late(answer: Answer) -> bool:
    """Whether the lease was about to end when the call came, or its base KV came too late."""
    if answer.status != 200:
        return bool(answer.error["code"] == "lease_expired")
    reason = answer.choice["stop_reason"]
    return reason in ("prefillshare:lease_expired", "prefillshare:handoff_timeout")


def call_in_time(pair: Pair, prompt: list[int]) -> Answer:
    """Prefill and decode, again where the machine was too slow for it."""
    for _ in range(TRIES):
        started = time.monotonic()
        answer = pair.decode(prompt, pair.prefill(prompt))
        if not is_late(answer):
            assert answer.status == 200, answer.body
            assert answer.choice["finish_reason"] == "length"
            return answer
        assert time.monotonic() - started >= HANDOFF_S, answer.body
    raise AssertionError(f"{TRIES} calls were late")


def until_it_waits(pair: Pair, call: "Future[Answer]") -> bool:
    """Whether a call came to wait for its base KV; not if it ended before."""
    while not call.done():
        if pair.state(pair.decode_worker)["waiting"]:
            return True
        time.sleep(0.01)
    return False


def unhurried(handoff: dict[str, Any]) -> dict[str, Any]:
    """The handoff, read by a decode worker as one with a long lease."""
    return changed(handoff, expires_at=time.time() + LONG_S)


def test_workers_whose_ports_were_taken_start_on_others(doomed: Doomed, tokens: Tokens) -> None:
    workers = (doomed.pair.prefill_worker, doomed.pair.decode_worker)
    assert [worker.id for worker in workers] == ["prefill-0", "solver-0"]
    assert not [worker for worker in workers if worker.url.endswith(f":{doomed.taken}")]
    assert len(call_in_time(doomed.pair, tokens(100)).token_ids) == 8


def test_an_unread_handoff_is_freed_when_its_lease_ends(doomed: Doomed, tokens: Tokens) -> None:
    pair, prompt = doomed.pair, tokens(100)
    pair.wait_until_idle(pair.prefill_worker)
    handoff = pair.prefill(prompt)
    expires_at = handoff["prefillshare"]["expires_at"]
    state = pair.state(pair.prefill_worker)
    held = (state["open_leases"], state["num_blocks"] - 1 - state["free_blocks"])
    assert held == (1, 4) or time.time() > expires_at
    pair.wait_until_idle(pair.prefill_worker)
    assert time.time() > expires_at
    # vLLM itself would read whatever the blocks hold by now and answer 200.
    answer = pair.decode(prompt, handoff)
    assert (answer.status, answer.error["code"]) == (503, "lease_expired")


def test_a_pull_outlasts_a_prefill_worker_that_is_stuck_for_a_while(
    doomed: Doomed, tokens: Tokens
) -> None:
    pair = doomed.pair
    for _ in range(TRIES):
        prompt, started = tokens(600), time.monotonic()
        handoff = pair.prefill(prompt)
        with ThreadPoolExecutor(1) as pool:
            with stopped(pair.pids["prefill-0"]):
                call = pool.submit(pair.decode, prompt, handoff)
                until_it_waits(pair, call)
                time.sleep(1)
                pending = not call.done()
            answer = call.result()
        if not is_late(answer):
            break
        assert time.monotonic() - started >= HANDOFF_S, answer.body
    assert pending
    assert answer.status == 200, answer.body
    assert answer.choice["finish_reason"] == "length"


def test_waiting_for_a_stuck_prefill_worker_ends_with_a_mark(
    doomed: Doomed, tokens: Tokens
) -> None:
    pair, begun, pulling = doomed.pair, tokens(5), False
    for _ in range(TRIES):
        pair.wait_until_idle(pair.decode_worker)
        # Of 39 blocks each pull takes 19, so the third does not even begin.
        prompts = [tokens(600) for _ in range(3)]
        handoffs = [unhurried(resuming(pair.prefill(prompt), begun)) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool, stopped(pair.pids["prefill-0"]):
            started = time.monotonic()
            calls = [
                pool.submit(pair.decode, *each) for each in zip(prompts, handoffs, strict=True)
            ]
            while not pulling and not any(call.done() for call in calls):
                state = pair.state(pair.decode_worker)
                pulling = (state["waiting"], state["free_blocks"]) == (3, 1)
                time.sleep(0.01)
            time.sleep(1)
            shares = core_shares(pair.pids, window_s=HANDOFF_S - 2)
            answers = [call.result() for call in calls]
            waited = time.monotonic() - started
            # What a pull may still write to belongs to nobody else.
            state = pair.state(pair.decode_worker)
            reserved = state["num_blocks"] - 1 - state["free_blocks"]
        if pulling:
            break
        assert all(map(is_late, answers))
    assert pulling
    assert shares["solver-0"] < CORE_SHARE
    # Not until the lease ends.
    assert HANDOFF_S <= waited < LONG_S / 2
    assert (state["open_leases"], state["waiting"], reserved) == (2, 0, 38)
    for answer in answers:
        assert answer.choice["stop_reason"] == "prefillshare:handoff_timeout"
        assert answer.token_ids == begun
        account = pair.account(answer)
        assert (account["event"], account["base_tokens_received"]) == ("handoff_timeout", 0)
    # The prefill worker moves again: the late pulls end, and the next one is served.
    call_in_time(pair, tokens(100))
    pair.wait_until_idle(pair.decode_worker)
    pair.release_all()
    pair.wait_until_idle(pair.prefill_worker)


@pytest.mark.parametrize("late", ["prefill-0", "solver-0"])
def test_a_pull_that_ends_after_the_lease_is_not_used(
    doomed: Doomed, tokens: Tokens, late: str
) -> None:
    pair, prompt = doomed.pair, tokens(300)
    for _ in range(TRIES):
        answer = late_pull(pair, prompt, tokens(100), late)
        if answer is not None:
            break
    assert answer is not None, f"{TRIES} calls were late themselves"
    assert answer.choice["stop_reason"] == "prefillshare:handoff_timeout"
    assert answer.token_ids == []
    assert pair.account(answer)["base_tokens_received"] == 0
    pair.wait_until_idle(pair.decode_worker)
    again = call_in_time(pair, prompt)
    account = pair.account(again)
    assert (account["base_tokens_reused"], account["base_tokens_received"]) == (0, 299)
    expected = base_cache_logprobs(pair.base_dir, pair.decoder_dir, prompt, again.token_ids)
    assert again.logprobs == pytest.approx(expected, abs=1e-3)
    pair.release_all()
    pair.wait_until_idle(pair.prefill_worker)


def late_pull(pair: Pair, prompt: list[int], other: list[int], late: str) -> Answer | None:
    """The answer to a call whose pull ends after its lease; None if it never came to a pull."""
    # The decode worker is busy, so that it stops within a step rather than between two.
    busy = pair.streaming(other, unhurried(pair.prefill(other)), max_tokens=700)
    handoff = pair.prefill(prompt)
    with busy as lines, ThreadPoolExecutor(1) as pool, ExitStack() as until_late:
        next(lines)
        with stopped(pair.pids["prefill-0"]):
            # Little more than a decode worker asks for. The blocks stay what they are all the same.
            expires_at = time.time() + MARGIN_S + 2
            call = pool.submit(pair.decode, prompt, changed(handoff, expires_at=expires_at))
            if not until_it_waits(pair, call):
                assert is_late(call.result())
                assert time.time() > expires_at - MARGIN_S
                return None
            if late == "solver-0":
                until_late.enter_context(stopped(pair.pids[late]))
            else:
                time.sleep(max(0, expires_at - time.time()))
        time.sleep(max(0, expires_at - time.time()))
        until_late.close()
        return call.result()


def test_a_prefill_worker_that_died_ends_the_pull_with_a_mark(
    doomed: Doomed, tokens: Tokens
) -> None:
    prompt = tokens(100)
    handoffs = [doomed.pair.prefill(prompt) for _ in range(TRIES)]
    crash(doomed.pair.pids["prefill-0"])
    for handoff in handoffs:
        started = time.monotonic()
        answer = doomed.pair.decode(prompt, unhurried(handoff))
        if not is_late(answer):
            break
        assert time.monotonic() - started >= HANDOFF_S, answer.body
    assert answer.choice["finish_reason"] == "abort"
    assert answer.choice["stop_reason"] == "prefillshare:kv_load_failed"
    assert answer.token_ids == []
    assert doomed.pair.account(answer)["event"] == "kv_load_failed"


def test_a_stopped_cluster_leaves_nothing(doomed: Doomed) -> None:
    # Its prefill worker died in the test before; the decode worker runs.
    processes = family(doomed.pair.pids["solver-0"])
    listened, segments = ports(processes), shared_memory(processes)
    assert len(processes) >= 2
    assert listened
    doomed.stop()
    assert_gone(processes, listened, segments)


def test_workers_die_with_a_killed_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    try:
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        processes = [process for pid in pids for process in family(pid)]
        listened, segments = ports(processes), shared_memory(processes)
        assert len(processes) >= 4
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    assert_gone(processes, listened, segments)
