"""Prometheus metrics. Labels never hold session ids, and `vllm:` is left to the workers."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prefillshare_server.router.handoff import Computed, Handoff, WorkerAccount

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_OVERHEAD = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)


class Metrics:
    """The metrics of one router, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("router_requests", "Calls ended.", "model", "result")
        self._duration = self._histogram(
            "router_request_duration_seconds", "Whole calls.", _SECONDS, "model"
        )
        self._overhead = self._histogram(
            "router_overhead_seconds",
            "From the received request to its token ids; waiting for room comes after it.",
            _OVERHEAD,
        )
        self._ttft = self._histogram(
            "ttft_seconds", "From the request to the first chunk of a stream.", _SECONDS, "model"
        )
        self._itl = self._histogram(
            "itl_seconds", "Between the chunks of a stream.", _SECONDS, "model"
        )
        self._prefill = self._histogram(
            "prefill_duration_seconds", "Prefill calls.", _SECONDS, "worker"
        )
        self._cached = self._counter(
            "prefill_cached_tokens", "Prompt tokens found in the prefix cache.", "worker"
        )
        self._computed = self._counter(
            "prefill_computed_tokens", "Prompt tokens computed by the base.", "worker"
        )
        self._handoff_bytes = self._counter(
            "handoff_bytes", "KV moved to decode workers.", "model", "worker"
        )
        self._handoff_failures = self._counter(
            "handoff_failures", "Handoffs nothing was decoded from.", "reason"
        )
        self._pending = self._gauge("kv_pending_handoffs", "KV leases in hand now.")
        self._lease_expired = self._counter("kv_lease_expired", "Handoffs read too late.")
        self._base_received = self._counter(
            "decode_base_tokens_received", "Prompt tokens whose base KV was moved.", "worker"
        )
        self._base_reused = self._counter(
            "decode_base_tokens_reused", "Prompt tokens whose base KV was there already.", "worker"
        )
        self._own_prompt = self._counter(
            "decode_prompt_tokens_computed",
            "Prompt tokens that decoders computed: the last one of each call and attempt.",
            "worker",
        )
        self._resumes = self._counter(
            "resumes", "Answers that broke off and were continued.", "reason"
        )
        self._local_prefill = self._counter(
            "decode_local_prefill_tokens",
            "Prompt tokens besides the last that decoders computed. Anything but 0 is a defect.",
            "worker",
        )
        self._preemptions = self._counter(
            "decode_preemptions", "Calls that decode workers ended for lack of KV blocks.", "worker"
        )
        self._affinity = self._counter("session_affinity", "Calls by affinity.", "result")
        self._rebinds = self._counter("session_rebinds", "Sessions pinned anew.", "reason")
        self._switches = self._counter(
            "model_switches", "Role changes between calls of a session.", "from", "to"
        )
        self._breaks = self._counter(
            "prefix_breaks",
            "Contexts that do not go on from their session's. Prefills ahead have no model.",
            "model",
            "cause",
        )
        self._ahead = self._counter(
            "prefills_ahead", "Contexts prefilled before a call needs them.", "result"
        )
        self._ahead_wait = self._histogram(
            "prefill_ahead_wait_seconds", "How long calls waited for prefills ahead.", _SECONDS
        )
        self._warm_ups = self._counter(
            "warm_ups",
            "Prompts prefilled for the role that is said to be next; dropped: too many at once.",
            "result",
        )
        self._retries = self._counter("retries", "Repeated worker calls.", "phase")
        self._stream_errors = self._counter(
            "stream_errors", "Streams that ended in an error event.", "reason"
        )
        self._up = self._gauge("worker_up", "0 while a worker is passed over.", "worker")
        self._opened = self._counter(
            "circuit_opened", "How often a worker began to be passed over.", "worker"
        )
        self._reserved = self._gauge(
            "decode_reserved_blocks", "KV blocks reserved for running answers.", "worker"
        )
        self._queued = self._gauge("queued_calls", "Calls that wait for room.", "role")
        self._queue = self._histogram(
            "queue_seconds", "How long calls waited for room on a decode worker.", _SECONDS
        )
        self._pins = self._gauge("session_pins", "Sessions pinned to a prefill worker.")
        self._active = self._gauge(
            "active_sessions", "Sessions that have not ended, and calls without one."
        )
        self._waiting = self._gauge(
            "queued_session_calls", "Calls that wait for a place among router.max_sessions."
        )

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def watch_pins(self, count: Callable[[], float]) -> None:
        """Read the number of pinned sessions from `count` whenever metrics are asked for."""
        self._pins.set_function(count)

    def watch_sessions(self, active: Callable[[], float], waiting: Callable[[], float]) -> None:
        """The same for active sessions and for calls that wait to be one's first."""
        self._active.set_function(active)
        self._waiting.set_function(waiting)

    def ended(self, model: str, result: str, seconds: float) -> None:
        """A call ended; `result` is "ok", "client_closed" or an error code."""
        self._requests.labels(model, result).inc()
        self._duration.labels(model).observe(seconds)

    def tokenised(self, started_at: float) -> None:
        """A call that came in at `started_at` (perf_counter) has its token ids now."""
        self._overhead.observe(time.perf_counter() - started_at)

    def first_chunk(self, model: str, seconds: float) -> None:
        """The first chunk of a stream was sent `seconds` after the request."""
        self._ttft.labels(model).observe(seconds)

    def next_chunk(self, model: str, seconds: float) -> None:
        """A later chunk was sent `seconds` after the one before."""
        self._itl.labels(model).observe(seconds)

    @contextmanager
    def prefill_duration(self, worker: str) -> Iterator[None]:
        """Time the block as one prefill call."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._prefill.labels(worker).observe(time.perf_counter() - start)

    @contextmanager
    def pending_handoffs(self, count: int) -> Iterator[None]:
        """Count leases as in hand while the block runs."""
        self._pending.inc(count)
        try:
            yield
        finally:
            self._pending.dec(count)

    def prefilled(self, worker: str, done: Handoff | Computed) -> None:
        """A prefill succeeded."""
        self._cached.labels(worker).inc(done.cached_tokens or 0)
        self._computed.labels(worker).inc(done.computed_tokens or 0)

    def prefilled_ahead(self, result: str) -> None:
        """A prefill ahead ended; `result` is "ok" or an error code."""
        self._ahead.labels(result).inc()

    def waited_for_prefill(self, seconds: float) -> None:
        """A call waited for a prefill ahead of it."""
        self._ahead_wait.observe(seconds)

    def placed(self, affinity: str) -> None:
        """A call got its prefill worker."""
        self._affinity.labels(affinity).inc()

    def warmed_up(self, result: str) -> None:
        """A warm-up ended or was not begun; `result` is "ok", "dropped" or an error code."""
        self._warm_ups.labels(result).inc()

    def rebound(self, reason: str) -> None:
        """A session was pinned to another worker; `reason` says what was with the first one."""
        self._rebinds.labels(reason).inc()

    def switched(self, before: str, after: str) -> None:
        """A session changed its role."""
        self._switches.labels(before, after).inc()

    def broke(self, model: str, cause: str) -> None:
        """A context did not go on from its session's."""
        self._breaks.labels(model, cause).inc()

    def decoded(self, role: str, handoff: Handoff, account: WorkerAccount) -> None:
        """A decode worker's account of an attempt of `role` that ended."""
        worker = handoff.worker
        own = account.prompt_tokens_computed or 0
        self._handoff_bytes.labels(role, worker.id).inc(account.handoff_bytes or 0)
        self._base_received.labels(worker.id).inc(account.base_tokens_received or 0)
        self._base_reused.labels(worker.id).inc(account.base_tokens_reused or 0)
        self._own_prompt.labels(worker.id).inc(own)
        self._local_prefill.labels(worker.id).inc(max(own - 1, 0))

    def resumed(self, reason: str) -> None:
        """An answer goes on that broke off; `reason` is the code of the error it would be."""
        self._resumes.labels(reason).inc()

    def decode_gave_up(self, handoff: Handoff, code: str) -> None:
        """A decode worker ended a call; `code` is the error's."""
        self._handoff_failures.labels(code).inc()
        if code == "decode_preempted":
            self._preemptions.labels(handoff.worker.id).inc()
        if code == "lease_expired":
            self._lease_expired.inc()

    def handoff_failed(self, code: str) -> None:
        """A handoff came to nothing."""
        self._handoff_failures.labels(code).inc()

    def retried(self, phase: str) -> None:
        """A worker call that failed is repeated."""
        self._retries.labels(phase).inc()

    def worker_up(self, worker: str, up: bool) -> None:
        """Whether `worker` gets calls, as far as its health goes."""
        self._up.labels(worker).set(up)

    def circuit_opened(self, worker: str) -> None:
        """`worker` is passed over from now on."""
        self._opened.labels(worker).inc()

    def reserved(self, worker: str, blocks: int) -> None:
        """So many KV blocks of `worker` are reserved now."""
        self._reserved.labels(worker).set(blocks)

    @contextmanager
    def queued(self, role: str) -> Iterator[None]:
        """Count a call as waiting for room while the block runs, and time it."""
        start = time.perf_counter()
        self._queued.labels(role).inc()
        try:
            yield
        finally:
            self._queued.labels(role).dec()
            self._queue.observe(time.perf_counter() - start)

    def stream_failed(self, code: str) -> None:
        """A stream that had begun ended in an error event."""
        self._stream_errors.labels(code).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"prefillshare_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"prefillshare_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"prefillshare_{name}", text, labels, buckets=buckets, registry=self._registry
        )
