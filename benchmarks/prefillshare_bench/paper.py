"""The paper's figures as data (arXiv 2602.12029 v2), each with the place it stands in.

Names are those of our own measures, so that both can stand in one table. The paper says "p95" and
not of what; these are our readings. Tables 6 and 7: `session_p95_s`, for 16 calls with a mean TTFT
of 8.28 s make a session of minutes, and a p95 of 322 s fits the 417 s that such a run takes (9.56 M
computed tokens at 20% hits are 12 M, at 28.68k tok/s). Table 4: `p95_s` of a call, for 17.5k tok/s
at 0.010 sessions/s are 1.75 M tokens a session, which do not pass in 5.54 s. Fig. 4: it may be
either, so its ratio stands beside both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SOURCE: Final = "PrefillShare, arXiv 2602.12029 v2"

SERVING: Final[Mapping[str, Mapping[str, Any]]] = {
    "react": {
        "where": "Fig. 4 and section 4.3, LLaMA-3.1-8B, 8 A100",
        "ratios_up_to": {"per_model": {"p95": 4.1, "throughput_tok_s": 1.9}},
    },
    "reflexion": {
        "where": "Fig. 4 and section 4.3, LLaMA-3.1-8B, 8 A100",
        "ratios_up_to": {"per_model": {"p95": 4.5, "throughput_tok_s": 2.0}},
    },
}
"""Fig. 4: how many times better PrefillShare is at the best arrival rate. Its curves are a picture:
the text gives no other figure of them."""

LARGE_MODEL: Final[Mapping[str, Any]] = {
    "where": "Table 3, LLaMA-3.1-70B, four 8-H100 nodes, two models",
    "loads": [
        {
            "rate": 4,
            "per_model": {"throughput_tok_s": 37_400, "ttft_ms": 470},
            "prefillshare": {"throughput_tok_s": 39_000, "ttft_ms": 391},
        },
        {
            "rate": 8,
            "per_model": {"throughput_tok_s": 36_600, "ttft_ms": 1_559},
            "prefillshare": {"throughput_tok_s": 56_800, "ttft_ms": 717},
        },
        {
            "rate": 48,
            "per_model": {"throughput_tok_s": 36_500, "ttft_ms": 2_300},
            "prefillshare": {"throughput_tok_s": 59_800, "ttft_ms": 1_781},
        },
    ],
}

LOW_OVERLAP: Final[Mapping[str, Any]] = {
    "where": "Table 4, Qwen3-14B, 8 H100; a 16-token (0.2%) shared prefix of 8,145 tokens",
    "loads": [
        {
            "rate": 0.010,
            "per_model": {"p95_s": 5.54, "throughput_tok_s": 17_500},
            "prefillshare": {"p95_s": 5.59, "throughput_tok_s": 17_400},
        },
        {
            "rate": 0.018,
            "per_model": {"p95_s": 9.33, "throughput_tok_s": 26_500},
            "prefillshare": {"p95_s": 8.13, "throughput_tok_s": 27_600},
        },
        {
            "rate": 0.026,
            "per_model": {"p95_s": 31.42, "throughput_tok_s": 18_900},
            "prefillshare": {"p95_s": 12.07, "throughput_tok_s": 33_900},
        },
        {
            "rate": 0.032,
            "per_model": {"p95_s": 36.46, "throughput_tok_s": 17_000},
            "prefillshare": {"p95_s": 15.46, "throughput_tok_s": 36_700},
        },
    ],
}

WORKER_LOAD: Final[Mapping[str, Any]] = {
    "where": "Table 8 and appendix C.3, at 0.02625 sessions/s",
    "overlap": 0.002,
    "per_model": {
        "prefilled_per_worker": {
            "main": 4_668_967,
            "A": 254_739,
            "B": 168_097,
            "C": 110_625,
        },
        "prefilled_tokens": 5_202_428,
        "load_ratio": 42.2,
        "recompute_amplification_by_role": {"main": 7.55},
    },
    "prefillshare": {
        "prefilled_per_worker": {"1": 391_369, "2": 550_692, "3": 265_681, "4": 390_771},
        "prefilled_tokens": 1_598_513,
        "load_ratio": 2.07,
        "recompute_amplification": 1.06,
    },
}

SWARM: Final[Mapping[str, Any]] = {
    "where": "Table 5, LLaMA-3.1-8B, 8 A100",
    "loads": [
        {
            "rate": 0.5,
            "per_model": {"ttft_ms": 152, "throughput_tok_s": 7_314},
            "prefillshare": {"ttft_ms": 76, "throughput_tok_s": 7_319},
        },
        {
            "rate": 1.5,
            "per_model": {"ttft_ms": 280, "throughput_tok_s": 21_094},
            "prefillshare": {"ttft_ms": 81, "throughput_tok_s": 21_280},
        },
        {
            "rate": 2.5,
            "per_model": {"ttft_ms": 733, "throughput_tok_s": 28_206},
            "prefillshare": {"ttft_ms": 94, "throughput_tok_s": 34_272},
        },
        {
            "rate": 3.5,
            "per_model": {"ttft_ms": 741, "throughput_tok_s": 28_325},
            "prefillshare": {"ttft_ms": 141, "throughput_tok_s": 45_919},
        },
    ],
}

_PER_MODEL: Final = {
    "mean_ttft_s": 8.28,
    "session_p95_s": 322.60,
    "throughput_tok_s": 28_680,
    "local_prefill_tokens": 9_560_000,
    "hit_percent": 20.0,
}
_PREFILLSHARE: Final = {
    "mean_ttft_s": 1.63,
    "session_p95_s": 87.02,
    "throughput_tok_s": 63_130,
    "local_prefill_tokens": 680_000,
    "hit_percent": 94.4,
}

ATTRIBUTION: Final[Mapping[str, Any]] = {
    "where": "Table 6, Qwen3-14B, 4P+4D, 64 sessions at 0.5 sessions/s",
    "per_model": _PER_MODEL,
    "shared_pool": {
        "mean_ttft_s": 3.05,
        "session_p95_s": 132.09,
        "throughput_tok_s": 52_710,
        "local_prefill_tokens": 4_920_000,
        "hit_percent": 58.8,
    },
    "prefillshare": _PREFILLSHARE,
}

PREDICTION: Final[Mapping[str, Any]] = {
    "where": "Table 7, Qwen3-14B, 4P+4D, 64 sessions at 0.5 sessions/s",
    "per_model": _PER_MODEL,
    "predictive": {
        "mean_ttft_s": 7.81,
        "session_p95_s": 331.88,
        "throughput_tok_s": 28_090,
        "local_prefill_tokens": 9_720_000,
        "hit_percent": 40.7,
    },
    "prefillshare": _PREFILLSHARE,
    "ttft_reduction_at_0.05_sessions_per_s": 0.31,
}

CONCURRENCY: Final[Mapping[str, Any]] = {
    "where": "Fig. 8 and appendix C.4, ReAct at 4 sessions/s, LLaMA-3.1-8B",
    "per_model": {"hit_rate_peak": 0.60, "throughput_falls_from_limit": 40},
    "prefillshare": {"hit_rate": 0.89, "throughput_falls_from_limit": 110},
}

INPUT_LENGTH: Final[Mapping[str, Any]] = {
    "where": "Table 9, LLaMA-3.1-8B, 8 A100",
    "lengths": [
        {
            "input_length": 64,
            "per_model": {"ttft_ms": 520, "throughput_tok_s": 2_515},
            "prefillshare": {"ttft_ms": 270, "throughput_tok_s": 2_515},
        },
        {
            "input_length": 4_096,
            "per_model": {"ttft_ms": 20_180, "throughput_tok_s": 40_218},
            "prefillshare": {"ttft_ms": 6_110, "throughput_tok_s": 88_323},
        },
    ],
}

MEMORY: Final[Mapping[str, Any]] = {
    "where": "Table 11 and appendix D.2, LLaMA-3.1-8B, four models, a 4K shared prefix (computed)",
    "bytes_per_token": 128 * 1024,
    "per_model": {"prefix_copies": 4, "kv_bytes_per_session": 2 * 1024**3},
    "prefillshare": {"prefix_copies": 1, "kv_bytes_per_session": 1024**3 // 2},
}
