"""How measures and systems are called, and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Measure:
    """One figure of a point. `scale` turns its value into `unit` for a reader."""

    label: str
    unit: str = ""
    scale: float = 1


MEASURES: Final[Mapping[str, Measure]] = {
    "p50_s": Measure("call latency p50", "s"),
    "p95_s": Measure("call latency p95", "s"),
    "p99_s": Measure("call latency p99", "s"),
    "mean_s": Measure("call latency, mean", "s"),
    "session_mean_s": Measure("session latency, mean", "s"),
    "session_p50_s": Measure("session latency p50", "s"),
    "session_p95_s": Measure("session latency p95", "s"),
    "session_p99_s": Measure("session latency p99", "s"),
    "ttft_ms": Measure("TTFT, mean", "s", scale=1e-3),
    "ttft_p50_ms": Measure("TTFT p50", "s", scale=1e-3),
    "ttft_p95_ms": Measure("TTFT p95", "s", scale=1e-3),
    "ttft_p99_ms": Measure("TTFT p99", "s", scale=1e-3),
    "tpot_ms": Measure("TPOT", "ms"),
    "itl_p50_ms": Measure("ITL p50", "ms"),
    "itl_p95_ms": Measure("ITL p95", "ms"),
    "itl_p99_ms": Measure("ITL p99", "ms"),
    "throughput_tok_s": Measure("throughput", "tok/s"),
    "generated_tok_s": Measure("generated", "tok/s"),
    "hit_rate": Measure("prefix-cache hits", "%", scale=100),
    "prefilled_tokens": Measure("prefilled tokens"),
    "load_ratio": Measure("max/min worker load"),
    "recompute_amplification": Measure("recompute amplification"),
    "handoff_bytes": Measure("handed off", "MiB", scale=2**-20),
    "handoff_ms": Measure("handoff", "ms"),
    "kv_bytes_peak": Measure("KV memory, peak", "MiB", scale=2**-20),
    "preemptions": Measure("preemptions"),
    "rejected_sessions": Measure("rejected sessions"),
    "mean_ttft_s": Measure("TTFT, mean", "s"),
    "local_prefill_tokens": Measure("prefilled tokens"),
    "hit_percent": Measure("prefix-cache hits", "%"),
    "kv_prefill_bytes": Measure("KV kept by prefill workers", "MiB", scale=2**-20),
    "kv_kept_bytes": Measure("KV kept by all workers", "MiB", scale=2**-20),
    "kv_bytes": Measure("KV kept", "MiB", scale=2**-20),
    "memory_bytes": Measure("memory of all processes", "MiB", scale=2**-20),
    "kv_bytes_per_session": Measure("KV kept per session", "MiB", scale=2**-20),
}
"""`sessions` and `calls` are not here: no ratio of them says that a system is better."""

SERVING: Final = (
    "p50_s",
    "p95_s",
    "throughput_tok_s",
    "ttft_ms",
    "prefilled_tokens",
    "hit_rate",
    "load_ratio",
    "preemptions",
)
"""What the summary of a serving experiment says of each system, before what is added to it."""


HEADLINES: Final = (
    "session_p95_s",
    "p95_s",
    "throughput_tok_s",
    "ttft_ms",
    "prefilled_tokens",
    "hit_rate",
)
"""What the paper's claims are about."""


@dataclass(frozen=True)
class System:
    """How a system is called and drawn."""

    label: str
    colour: str
    marker: str


OURS: Final = "prefillshare"
SYSTEMS: Final[Mapping[str, System]] = {
    OURS: System("PrefillShare", "#2f7fd0", "o"),
    "per_model": System("per-model baseline", "#d0504f", "s"),
    "shared_pool": System("shared pool, no cross-model reuse", "#d98a2b", "^"),
    "predictive": System("predictive prefill", "#9a66c4", "v"),
    "aggregated": System("stock vLLM, one per model", "#4f9d55", "D"),
    "multi_lora": System("stock vLLM, multi-LoRA", "#8a8a8a", "X"),
}
