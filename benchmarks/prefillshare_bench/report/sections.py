"""The sections of the page: what the results files say, in the words of a reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prefillshare_bench.report import tables
from prefillshare_bench.report.labels import HEADLINES, MEASURES, OURS
from prefillshare_bench.report.tables import Table

Content = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """One results file on the page; `content` None: nothing was measured for it."""

    name: str
    title: str
    intro: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    content: Content | None = None


_ALL: Final = (
    "session_p95_s",
    "p50_s",
    "p95_s",
    "ttft_ms",
    "tpot_ms",
    "throughput_tok_s",
    "hit_rate",
    "prefilled_tokens",
    "load_ratio",
    "recompute_amplification",
    "kv_bytes_peak",
    "preemptions",
    "rejected_sessions",
)


def sections(results: Mapping[str, Content]) -> list[Section]:
    """All of them, in the order of the page, measured or not."""
    return [_section(name, results.get(name)) for name in dict.fromkeys([*_SECTIONS, *results])]


def _section(name: str, content: Content | None) -> Section:
    title, intro, build = _SECTIONS.get(name, (name, "Sessions of a file of your own.", _serving))
    if content is None:
        return Section(name, title, intro)
    found, notes = build(content)
    absent = [tables.label(system) for system in content.get("missing", ())]
    if absent:
        notes = [*notes, f"Not measured: {', '.join(absent)}."]
    if content["about"]["machines"] > 1:
        notes = [*notes, "These points come from different machines or versions: see the end."]
    return Section(name, title, intro, tuple(found), tuple(notes), content)


Built = tuple[list[Table], list[str]]


def _serving(content: Content) -> Built:
    systems = list(content["ci95"])
    rows = content["loads"]
    place = "rate" if rows and "rate" in rows[0] else "limit"
    theirs = ((content["paper"] or {}).get("ratios_up_to") or {}).get("per_model") or {}
    printed = {
        "session_p95_s": theirs.get("p95"),
        "p95_s": theirs.get("p95"),
        "throughput_tok_s": theirs.get("throughput_tok_s"),
    }
    row = [("paper: per-model baseline, up to", printed)] if theirs else []
    load, found, notes = content["load"], [], []
    if load is None:
        notes.append("No load was survived by every measured system: there is no common figure.")
    else:
        at = f"at {_place(place, load[place])}, the highest load that all survive"
        found = [
            tables.by_system(
                f"Ours, {at}", {s: content[s] for s in systems}, (*HEADLINES, "load_ratio")
            ),
            tables.ratios(
                f"How many times better PrefillShare is, {at} (95% interval)",
                content["ratios"],
                HEADLINES,
                content["ratios_ci95"],
                row,
            ),
        ]
    best = {
        baseline: {name: (own.get(name) or {}).get("ratio") for name in HEADLINES}
        for baseline, own in content["up_to"].items()
    }
    caption = "The best ratio over all loads that both survive, as the paper counts (“up to”)"
    found.append(tables.ratios(caption, best, HEADLINES, {}, row))
    notes += _repeated({s: content[s] for s in systems})
    for system, lost in content["not_survived"].items():
        places = ", ".join(_place(place, value) for value in lost)
        notes.append(f"{tables.label(system)} did not complete every session at {places}.")
    if theirs:
        notes.append(
            "The paper does not say whether Fig. 4 shows the p95 of a call or of a session: its "
            "ratio stands in both columns."
        )
    return [
        *found,
        tables.everything("Every measured load", rows, place, _ALL),
        tables.tried("Every limit of sessions at once that was tried", content["tried"], HEADLINES),
    ], notes


def _rows(content: Content) -> Built:
    columns = (
        "mean_ttft_s",
        "session_p95_s",
        "throughput_tok_s",
        "local_prefill_tokens",
        "hit_percent",
    )
    ours = {row["system"]: row for row in content["rows"]}
    theirs = {row["system"]: row["paper"] for row in content["rows"]}
    at = "" if content["load"] is None else f", at {_place(*next(iter(content['load'].items())))}"
    found = [
        tables.by_system(f"Ours{at}", ours, columns),
        tables.by_system(f"The paper: {content['paper']}", theirs, columns),
        tables.ratios(
            "How many times better PrefillShare is (95% interval)",
            content["ratios"],
            columns,
            content["ratios_ci95"],
            [
                (f"paper: {tables.label(name)}", own)
                for name, own in content["paper_ratios"].items()
            ],
        ),
    ]
    lost = [tables.label(row["system"]) for row in content["rows"] if row["survived"] is False]
    notes = [
        "The paper does not say of what its p95 is. It fits a session: 16 calls with a mean "
        "TTFT of 8 s make a session of minutes, and few calls can have taken 322 s."
    ]
    notes += _repeated(ours)
    if lost:
        notes.append(f"Not every session completed there with: {', '.join(lost)}.")
    rows = content["loads"]
    place = "rate" if rows and "rate" in rows[0] else "limit"
    return [*found, tables.everything("Every measured load", rows, place, _ALL)], notes


def _pairs(rows: str, place: str, names: Sequence[str]) -> Callable[[Content], Built]:
    def build(content: Content) -> Built:
        axis = _axis(content[rows], place)
        found = [tables.pairs("Ours", content[rows], axis, names)]
        theirs = (content["paper"] or {}).get(rows)
        if theirs:
            caption = f"The paper: {content['paper']['where']}"
            found.append(tables.pairs(caption, theirs, place, names))
        return [*found, tables.everything("All that was measured", content[rows], axis, _ALL)], []

    return build


def _low_overlap(content: Content) -> Built:
    found, notes = _pairs("loads", "rate", ("p95_s", "throughput_tok_s"))(content)
    workers = content["workers"]
    theirs = workers["paper"]
    paper_rows = {f"paper: {tables.label(name)}": theirs[name] for name in ("per_model", OURS)}
    rows = [
        (
            tables.label(name),
            *(
                tables.number(own.get(measure))
                for measure in ("prefilled_tokens", "load_ratio", "recompute_amplification")
            ),
            ", ".join(
                f"{own.get('roles', {}).get(worker, worker)}: {tables.number(tokens)}"
                for worker, tokens in own["prefilled_per_worker"].items()
            ),
            ", ".join(
                f"{role}: {tables.number(times)}"
                for role, times in own.get("recompute_amplification_by_role", {}).items()
            ),
        )
        for name, own in {**workers["systems"], **paper_rows}.items()
    ]
    if content["overlap"] is not None:
        notes = [
            *notes,
            f"{content['overlap']:.1%} of a prompt is common to all roles, a KV block at least; "
            f"the paper's {theirs['overlap']:.1%}.",
        ]
    columns = ("prefilled tokens", "max/min", "amplification")
    header = ("system", *columns, "prefilled by each worker", "amplification by role")
    at = "" if workers["load"] is None else f", at {_place(*next(iter(workers['load'].items())))}"
    caption = f"Prefilled tokens of each worker (Table 8){at}"
    return [*found[:-1], Table(caption, header, tuple(rows)), found[-1]], notes


def _concurrency(content: Content) -> Built:
    names = ("throughput_tok_s", "hit_rate", "session_p95_s", "prefilled_tokens")
    peaks = [
        (
            tables.label(name),
            tables.number(peak["limit"]),
            tables.shown("throughput_tok_s", peak["throughput_tok_s"]),
            tables.shown("hit_rate", peak["hit_rate"]),
        )
        for name, peak in content["peaks"].items()
    ]
    theirs = content["paper"]
    base, ours = theirs["per_model"], theirs[OURS]
    notes = [
        f"The paper ({theirs['where']}): the baseline's hit rate peaks at about "
        f"{base['hit_rate_peak']:.0%} and falls beyond {base['throughput_falls_from_limit']} "
        f"sessions; PrefillShare stays near {ours['hit_rate']:.0%}, and its throughput falls from "
        f"about {ours['throughput_falls_from_limit']} on."
    ]
    header = ("system", "sessions at once", "throughput (tok/s)", "prefix-cache hits (%)")
    return [
        Table("Where throughput is highest", header, tuple(peaks)),
        tables.pairs("Ours", content["limits"], "limit", names[:2]),
        tables.everything("All that was measured", content["limits"], "limit", names),
    ], notes


def _roles(content: Content) -> Built:
    names = ("prefilled_tokens", "kv_prefill_bytes", "kv_kept_bytes")
    counts = [row["roles"] for row in content["roles"]]
    rows = [
        (tables.label(system), *(tables.number(own.get(name)) for name in names))
        for system, own in content["growth"].items()
    ]
    caption = f"At {max(counts)} roles over {min(counts)}: 1 is flat"
    header = ("system", *(MEASURES[name].label for name in names))
    return [
        Table(caption, header, tuple(rows)),
        tables.pairs("Ours", content["roles"], "roles", names),
        tables.everything("All that was measured", content["roles"], "roles", (*names, *_ALL)),
    ], []


def _memory(content: Content) -> Built:
    names = ("kv_bytes", "kv_bytes_per_session", "memory_bytes")
    theirs = content["paper"]
    shown = {
        **content["systems"],
        **{f"paper: {tables.label(name)}": theirs[name] for name in ("per_model", OURS)},
    }
    return [
        tables.by_system("KV that the prefill workers keep", shown, names),
        tables.ratios("How many times less PrefillShare keeps", content["ratios"], names[:2], {}),
    ], [f"The paper: {theirs['where']}. Ours is read from the engines."]


def _repeated(systems: Mapping[str, Content]) -> list[str]:
    """Which were measured how often, where not all were equally often."""
    counts = {name: found["repeats"] for name, found in systems.items() if found["repeats"]}
    if len(set(counts.values())) < 2:
        return []
    each = "; ".join(f"{tables.label(name)}: {count}" for name, count in counts.items())
    return [
        f"Measurements ({each}): figures are means; a ratio is of the measurements "
        "that both systems have, for each has sessions of its own."
    ]


def _axis(rows: Sequence[Content], wanted: str) -> str:
    """`limit` for a load that was measured in a closed loop."""
    return wanted if not rows or wanted in rows[0] else "limit"


def _place(place: str, value: Any) -> str:
    text = tables.number(value)
    return f"{text} sessions per second" if place == "rate" else f"{text} sessions at once"


_SECTIONS: Final[Mapping[str, tuple[str, str, Callable[[Content], Built]]]] = {
    "serving_react": (
        "ReAct (Fig. 4)",
        "Four agents in turn, four rounds, one growing context: 16 calls a session. Sessions "
        "arrive at random; the same trace goes to every system.",
        _serving,
    ),
    "serving_reflexion": (
        "Reflexion (Fig. 4)",
        "As ReAct, with the lengths of Reflexion.",
        _serving,
    ),
    "attribution": (
        "Attribution (Table 6)",
        "What pooling the prefill workers gives, and what reuse of KV across models adds.",
        _rows,
    ),
    "prediction": (
        "Predictive prefill (Table 7)",
        "The baseline, told the next role, prefills for it while the current one answers: the work "
        "is done earlier, not saved.",
        _rows,
    ),
    "low_overlap": (
        "Low overlap (Tables 4 and 8)",
        "A supervisor and three specialists that share almost no prefix: what is left is the pool, "
        "which evens out the load of the workers.",
        _low_overlap,
    ),
    "concurrency": (
        "Concurrency limit (Fig. 8)",
        "More sessions at once need more KV: the prefix cache of the baseline overflows first.",
        _concurrency,
    ),
    "input_length": (
        "Input length (Table 9)",
        "Short and long inputs.",
        _pairs("lengths", "input_length", ("ttft_ms", "throughput_tok_s")),
    ),
    "swarm": (
        "Swarm (Table 5)",
        "The next agent is drawn at random.",
        _pairs("loads", "rate", ("ttft_ms", "throughput_tok_s")),
    ),
    "roles_scaling": (
        "Number of roles",
        "The same conversation among 1, 2, 4 and 8 roles: prefilled tokens and KV must stay flat "
        "for PrefillShare.",
        _roles,
    ),
    "memory": (
        "KV memory (Table 11)",
        "What a session's prompt takes in the prefill workers.",
        _memory,
    ),
    "long_output": (
        "Long outputs",
        "Answers longer than what is prefilled: where decoding takes the time, less is gained.",
        _pairs("loads", "rate", ("session_p95_s", "p95_s", "throughput_tok_s")),
    ),
}
