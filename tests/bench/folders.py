"""Folders of measured points, made by hand: what a run would leave, without running anything."""

import json
from pathlib import Path
from typing import Any

ALL = ("prefillshare", "per_model", "shared_pool", "predictive", "aggregated", "multi_lora")
MACHINE = {"cpu": "Test CPU", "cores": 2, "versions": {"vllm": "0.32.0"}, "revision": "abc"}
BLOCK_BYTES = 2**20


def figures(better: float = 1, **others: Any) -> dict[str, Any]:
    """All figures of a point; `better` times as good as the plain ones in the telling measures."""
    return {
        "p50_s": 2 / better,
        "p95_s": 4 / better,
        "p99_s": 5 / better,
        "mean_s": 2.5 / better,
        **{f"session_{name}_s": 40 / better for name in ("mean", "p50", "p95", "p99")},
        "ttft_ms": 1000 / better,
        **{f"ttft_p{percent}_ms": 2000 / better for percent in (50, 95, 99)},
        "tpot_ms": 20.0,
        **{f"itl_p{percent}_ms": 25.0 for percent in (50, 95, 99)},
        "throughput_tok_s": 1000 * better,
        "generated_tok_s": 50 * better,
        "hit_rate": min(0.2 * better, 1),
        "prefilled_tokens": round(12000 / better),
        "prefilled_per_worker": {"prefill-0": 8000, "prefill-1": 4000},
        "load_ratio": 2.0,
        "recompute_amplification": 3 / better,
        "handoff_bytes": 2**30,
        "handoff_ms": 3.0,
        "kv_bytes_peak": 2**28,
        "preemptions": 0,
        "rejected_sessions": 0,
        "failed_sessions": 0,
        "sessions": 2,
        "calls": 4,
        "wall_s": 60.0,
        **others,
    }


def call(session: str, index: int, **others: Any) -> dict[str, Any]:
    return {
        "session": session,
        "index": index,
        "role": "agent1",
        "prompt_tokens": 100,
        "arrived_s": 0,
        "sent_s": 0,
        "first_s": 1,
        "last_s": 2,
        "generated": 8,
        "status": 200,
        "error": None,
        **others,
    }


CALLS = [call(session, index) for session in ("s0", "s1") for index in (0, 1)]


def workers(cached: int | None = 0) -> list[dict[str, Any]]:
    """Two workers that prefill and one that decodes, each of which has `cached` blocks."""
    return [
        {
            "id": name,
            "phase": phase,
            "role": role,
            "cached_blocks": cached,
            "blocks": 4096,
            "bytes_per_block": BLOCK_BYTES,
        }
        for name, phase, role in (
            ("prefill-0", "prefill", "main"),
            ("prefill-1", "prefill", "A"),
            ("decode-0", "decode", "main"),
        )
    ]


def point(folder: Path, experiment: str, system: str, **others: Any) -> Path:
    """Writes one point. `others` replace fields of it; `measured` its figures."""
    load = {"rate": 0.2, "limit": None, "max_sessions": None, "repeat": 0} | {
        name: others.pop(name)
        for name in ("rate", "limit", "max_sessions", "repeat")
        if name in others
    }
    name = others.pop("name", experiment)
    roles = others.pop("roles", ("agent1", "agent2", "agent3", "agent4"))
    content = {
        "version": 1,
        "experiment": experiment,
        "system": system,
        **load,
        "workload": {"name": name, "seed": 0, "roles": roles, "head": 16, "sha256": f"{name:f<64}"},
        "workload_file": f"{name}.jsonl",
        "setting": {"base": "smollm2-135m-instruct", "kv_blocks": 5120, "block_size": 16},
        "lost": None,
        "memory_bytes": 2**32,
        "cluster_file": f"base: smollm2\n# {system}\n",
        "about": {
            **MACHINE,
            "command": f"prefillshare bench run {experiment}",
            "started_at": "2026-01-02T03:04:05Z",
        },
        "workers": {"before": workers(), "after": workers(4), "peak": {"workers": []}},
        "calls": others.pop("calls", CALLS),
        "figures": others.pop("measured", figures()),
        **others,
    }
    places = "-".join(str(value) for value in (experiment, name, system, *load.values()))
    file = folder / experiment / f"{places}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def whole(folder: Path) -> Path:
    """Every experiment with every system it is about; PrefillShare is four times as good.

    ReAct has two repeats.
    """
    for system in ALL:
        measured = figures(4 if system == "prefillshare" else 1)
        for rate in (0.1, 0.2):
            for experiment in ("react", "reflexion", "swarm", "low_overlap", "long_output"):
                point(folder, experiment, system, rate=rate, measured=measured)
            point(folder, "react", system, rate=rate, repeat=1, measured=measured)
        for limit in (1, 4, 16):
            point(folder, "concurrency", system, rate=4, max_sessions=limit, measured=measured)
        for length in (64, 4096):
            name = f"input_length_{length}"
            point(folder, "input_length", system, name=name, measured=measured)
        for count in (1, 2, 4, 8):
            roles = [f"agent{number}" for number in range(count)]
            name = f"roles_{count}"
            point(folder, "roles_scaling", system, name=name, roles=roles, measured=measured)
        point(folder, "memory", system, measured=measured)
        if system in ("prefillshare", "per_model", "shared_pool"):
            point(folder, "attribution", system, measured=measured)
        if system in ("prefillshare", "per_model", "predictive"):
            point(folder, "prediction", system, measured=measured)
    return folder
