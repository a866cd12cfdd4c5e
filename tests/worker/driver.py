"""Plays the router towards one prefill and one decode worker: two HTTP calls per answer."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from prefillshare_server.config import Cluster
from prefillshare_server.launch.local_cluster import LocalCluster
from prefillshare_server.models import store
from prefillshare_server.router.topology import WorkerEndpoint

T = TypeVar("T")
BLOCK = 32
START_TIMEOUT_S = 300
TIMEOUT_S = 60
IDLE_S = 60
"""Time enough for a busy machine, and far below the length of the shared pair's leases."""


def client() -> httpx.Client:
    """Each of its requests has a connection of its own.

    A worker closes one that was idle for 5 s; a worker that stood still for as long does so even if
    a request has come meanwhile.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=TIMEOUT_S, limits=limits)


class LoopThread:
    """An event loop in a thread of its own, which lives until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = START_TIMEOUT_S) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=60)
        self._loop.close()


@contextmanager
def running(cluster: Cluster, log_dir: Path) -> Iterator[tuple[LocalCluster, Callable[[], None]]]:
    """The cluster's workers, started and warmed up, and how to stop them before the end."""
    loop = LoopThread()
    workers = LocalCluster(cluster, log_dir=log_dir)
    try:
        loop.run(workers.__aenter__())
        try:
            yield workers, lambda: loop.run(workers.stop())
        finally:
            loop.run(workers.stop())
    finally:
        loop.close()


@dataclass(frozen=True)
class Answer:
    """What a decode worker answered."""

    status: int
    body: dict[str, Any]
    request_id: str

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.body["choices"][0]
        return choice

    @property
    def token_ids(self) -> list[int]:
        return list(self.choice["token_ids"])

    @property
    def logprobs(self) -> list[float]:
        return list(self.choice["logprobs"]["token_logprobs"])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        return error


@dataclass
class Pair:
    """One prefill worker and one decode worker of a running cluster."""

    prefill_worker: WorkerEndpoint
    decode_worker: WorkerEndpoint
    pids: dict[str, int]
    base_dir: Path
    decoder_dir: Path
    log_dir: Path
    http: httpx.Client = field(default_factory=client)
    _ids: Iterator[int] = field(default_factory=count)
    _prefilled: list[str] = field(default_factory=list)

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Prefill on the base; returns the handoff: the answer's kv_transfer_params."""
        params: dict[str, Any] = self.prefill_answer(prompt)["kv_transfer_params"]
        return params

    def prefill_answer(
        self, prompt: Sequence[int], request_id: str | None = None
    ) -> dict[str, Any]:
        body = {
            "model": self.prefill_worker.model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        request_id = request_id or f"prefill-{next(self._ids)}"
        self._prefilled.append(request_id)
        response = self._post(self.prefill_worker, "/v1/completions", body, request_id)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def fill(self, prompt: Sequence[int]) -> None:
        """Have the base compute a prompt that nobody reads: only its prefix cache keeps it."""
        body = {"model": self.prefill_worker.model, "prompt": list(prompt), "max_tokens": 1}
        request_id = f"fill-{next(self._ids)}"
        response = self._post(self.prefill_worker, "/v1/completions", body, request_id)
        assert response.status_code == 200, response.text

    def decode(
        self,
        prompt: Sequence[int],
        handoff: dict[str, Any] | None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Answer:
        """Greedy completion of token ids with logprobs, on the given handoff."""
        request_id = request_id or f"call-{next(self._ids)}"
        body = {
            "model": self.decode_worker.model,
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": 8,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": handoff,
            **sampling,
        }
        response = self._post(self.decode_worker, "/v1/completions", body, request_id)
        return Answer(response.status_code, response.json(), request_id)

    def resume(self, prompt: Sequence[int], begun: Sequence[int], **sampling: Any) -> Answer:
        """Prefill, and decode the rest of an answer that begins with the tokens `begun`."""
        answer = self.decode(prompt, resuming(self.prefill(prompt), begun), **sampling)
        assert answer.status == 200, answer.body
        return answer

    def stream(
        self, prompt: Sequence[int], begun: Sequence[int] = (), **sampling: Any
    ) -> list[dict[str, Any]]:
        """Chunks of a streamed completion, from the start or resumed."""
        body = {
            "model": self.decode_worker.model,
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": 8,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": resuming(self.prefill(prompt), begun),
            **sampling,
        }
        status, chunks = self._stream("/v1/completions", body)
        assert status == 200, chunks
        return chunks

    @contextmanager
    def streaming(
        self,
        prompt: Sequence[int],
        handoff: dict[str, Any],
        request_id: str | None = None,
        timeout: float | httpx.Timeout = TIMEOUT_S,
        **sampling: Any,
    ) -> Iterator[Iterator[str]]:
        """Lines of a streamed completion that is aborted at the end of the block."""
        body = {
            "model": self.decode_worker.model,
            "prompt": list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "kv_transfer_params": handoff,
            **sampling,
        }
        url = f"{self.decode_worker.url}/v1/completions"
        headers = {"X-Request-Id": request_id or f"call-{next(self._ids)}"}
        with self.http.stream("POST", url, json=body, headers=headers, timeout=timeout) as response:
            yield response.iter_lines()

    def call(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Prefill and decode."""
        answer = self.decode(prompt, self.prefill(prompt), **sampling)
        assert answer.status == 200, answer.body
        return answer

    def chat(self, prompt: Sequence[int], handoff: dict[str, Any] | None, **body: Any) -> Answer:
        """Chat request whose prompt is given as token ids."""
        request_id = f"call-{next(self._ids)}"
        response = self._post(
            self.decode_worker,
            "/v1/chat/completions",
            self._chat_body(prompt, handoff) | body,
            request_id,
        )
        return Answer(response.status_code, response.json(), request_id)

    def stream_chat(
        self, prompt: Sequence[int], handoff: dict[str, Any] | None, **body: Any
    ) -> tuple[int, list[dict[str, Any]]]:
        """Status and chunks of a streamed chat request (a refusal is the only "chunk")."""
        return self._stream("/v1/chat/completions", self._chat_body(prompt, handoff) | body)

    def _stream(self, path: str, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        request = self.http.stream(
            "POST",
            f"{self.decode_worker.url}{path}",
            json={**body, "stream": True},
            headers={"X-Request-Id": f"call-{next(self._ids)}"},
        )
        with request as response:
            if response.status_code != 200:
                return response.status_code, [json.loads(response.read())]
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        return 200, [json.loads(event) for event in events[:-1]]

    def account(self, answer: Answer) -> dict[str, Any]:
        """The decode worker's account of a call."""
        response = self.http.get(f"{self.decode_worker.url}/prefillshare/calls/{answer.request_id}")
        assert response.status_code == 200, response.text
        account: dict[str, Any] = response.json()
        return account

    def info(self, worker: WorkerEndpoint) -> dict[str, Any]:
        info: dict[str, Any] = self.http.get(f"{worker.url}/prefillshare/info").json()
        return info

    def state(self, worker: WorkerEndpoint) -> dict[str, Any]:
        state: dict[str, Any] = self.http.get(f"{worker.url}/prefillshare/state").json()
        return state

    def release(self, request_id: str) -> None:
        """Tell the prefill worker that nobody reads what the call left there."""
        response = self.http.post(
            f"{self.prefill_worker.url}/prefillshare/release", json={"request_id": request_id}
        )
        assert response.status_code == 204, response.text

    def abandon(self, request_id: str) -> bool:
        """Tell the decode worker that nobody waits for the call; whether it may read its KV."""
        response = self.http.post(
            f"{self.decode_worker.url}/prefillshare/abandon", json={"request_id": request_id}
        )
        assert response.status_code == 200, response.text
        reading: bool = response.json()["reading"]
        return reading

    def release_all(self) -> None:
        """Release every prefill since the last time."""
        while self._prefilled:
            self.release(self._prefilled.pop())

    def wait_until_idle(self, worker: WorkerEndpoint) -> None:
        """Wait until the worker has nothing in hand and all its blocks back."""
        deadline = time.monotonic() + IDLE_S
        while not _is_idle(state := self.state(worker)):
            assert time.monotonic() < deadline, state
            time.sleep(0.02)

    def errors_logged(self, worker: WorkerEndpoint) -> list[str]:
        """Lines of the worker's log that report an error, so far."""
        lines = (self.log_dir / f"{worker.id}.log").read_text().splitlines()
        return [line for line in lines if " ERROR " in line]

    def metric(self, worker: WorkerEndpoint, name: str) -> float:
        """Sum of a metric over its labels; 0 when it was never set."""
        lines = self.http.get(f"{worker.url}/metrics").text.splitlines()
        found = (line.rsplit(" ", 1) for line in lines if line.startswith(name + "{"))
        return sum(float(value) for _, value in found)

    def _chat_body(self, prompt: Sequence[int], handoff: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "model": self.decode_worker.model,
            "messages": [{"role": "user", "content": "rendered by the router"}],
            "temperature": 0,
            "max_tokens": 8,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": handoff and {**handoff, "prompt_token_ids": list(prompt)},
        }

    def _post(
        self, worker: WorkerEndpoint, path: str, body: dict[str, Any], request_id: str
    ) -> httpx.Response:
        return self.http.post(
            f"{worker.url}{path}", json=body, headers={"X-Request-Id": request_id}
        )


def _is_idle(state: dict[str, Any]) -> bool:
    in_hand = (state["open_leases"], state["running"], state["waiting"])
    return in_hand == (0, 0, 0) and state["free_blocks"] == state["num_blocks"] - 1


def family(pid: int) -> list[psutil.Process]:
    """The process and all that it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process and all that it started do nothing inside, but are there."""
    processes = family(pid)
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # It was killed inside.
                process.resume()


def changed(handoff: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The handoff with other values in our part of it."""
    return {**handoff, "prefillshare": {**handoff["prefillshare"], **fields}}


def resuming(handoff: dict[str, Any], begun: Sequence[int]) -> dict[str, Any]:
    """The handoff for an answer that goes on after the tokens `begun`."""
    return changed(handoff, generated_ids=list(begun))


def pair_of(workers: LocalCluster, base: str, decoder: str, log_dir: Path) -> Pair:
    prefill_worker, decode_worker = workers.endpoints
    return Pair(
        prefill_worker,
        decode_worker,
        workers.pids,
        store.resolve(base),
        store.resolve(decoder),
        log_dir,
    )
