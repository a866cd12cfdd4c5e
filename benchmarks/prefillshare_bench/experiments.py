"""What is measured: each experiment answers for a figure or a table of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefillshare_bench import traces, workloads
from prefillshare_bench.traces import Workload
from prefillshare_server.errors import ConfigError, Problem

BLOCK = 32
"""Tokens per KV block, in every system."""


@dataclass(frozen=True)
class Size:
    """How large the experiments are, for the machine at hand."""

    about: str
    sessions: int
    """Of each point."""
    scale: float
    """Of all token lengths; 1 is the paper's."""
    blocks: int
    """KV blocks per worker; an engine that stands for several workers has those of all."""
    rates: Sequence[float]
    """Sessions per second, from a low load to more than the baseline can take."""
    limits: Sequence[int]
    """Most sessions at once, for the figure over the concurrency limit."""
    caps: Sequence[int | None] = (None,)
    """The same, tried at each rate elsewhere: what is best for a system counts (§4.1)."""
    inputs: Sequence[int] = (64, 4096)
    """Tokens of the first prompt, for the table over its length; not scaled."""
    context: int = 4096
    """Tokens that roles of any number read; not scaled."""
    roles: Sequence[int] = (1, 2, 4, 8)
    """How many they are."""


SIZES: Mapping[str, Size] = {
    "smoke": Size(
        about="whether everything runs: a minute or two per system, figures that say nothing",
        sessions=2,
        scale=0.03,
        blocks=64,
        rates=(2.0,),
        limits=(1, 2),
        inputs=(64, 256),
        context=256,
        roles=(1, 2),
    ),
    "small": Size(
        about="four roles of a 135M base on a few cores",
        sessions=12,
        scale=0.25,
        blocks=256,
        rates=(0.1, 0.4),
        limits=(1, 2, 4, 8, 12),
        caps=(None, 4),
    ),
    "paper": Size(
        about="the paper's lengths, sessions and rates: 8B roles on eight GPUs",
        sessions=64,
        scale=1.0,
        blocks=8192,
        rates=(0.5, 1.0, 2.0, 4.0),
        limits=(20, 40, 60, 80, 110),
        caps=(None, 20, 40, 60),
    ),
}


@dataclass(frozen=True)
class Load:
    """How sessions come."""

    rate: float | None = None
    """Sessions per second at random times (Poisson); None: the next comes when one has ended."""
    limit: int | None = None
    """Sessions at once, without a rate."""
    max_sessions: int | None = None
    """Further sessions wait: in the router, by `router.max_sessions`; where there is none, in the
    client."""

    @property
    def arrivals(self) -> str:
        """When sessions come, whether or not they have to wait then."""
        return f"limit{self.limit}" if self.rate is None else f"rate{self.rate:.10g}"

    def __str__(self) -> str:
        most = "" if self.max_sessions is None else f"-max{self.max_sessions}"
        return f"{self.arrivals}{most}"


Build = Callable[[Size, int], Workload]
"""Makes the workload of a size, drawn with a seed."""


@dataclass(frozen=True)
class Experiment:
    """Workloads under loads, on several systems."""

    about: str
    workloads: Callable[[Size], Sequence[Build]]
    systems: Sequence[str]
    loads: Callable[[Size], Sequence[Load]]
    apart: bool = False
    """Whether each point has to find empty caches: a system is started anew for it."""
    fixed: Sequence[str] = ()
    """Options of a run that have no effect on it."""


ALL = ("prefillshare", "per_model", "shared_pool", "predictive", "aggregated", "multi_lora")
BOTH = ("prefillshare", "per_model")
_ALONE_FIXED = ("--rate", "--max-sessions", "--sessions")


def _same(build: Callable[..., Workload]) -> Callable[[Size], Sequence[Build]]:
    def made(size: Size, seed: int) -> Workload:
        return build(sessions=size.sessions, seed=seed, scale=size.scale)

    return lambda _: [made]


def _inputs(size: Size) -> list[Build]:
    def of(tokens: int) -> Build:
        return lambda size, seed: workloads.input_length(tokens, sessions=size.sessions, seed=seed)

    return [of(tokens) for tokens in size.inputs]


def _roles(size: Size) -> list[Build]:
    def of(roles: int) -> Build:
        return lambda size, seed: workloads.roles_scaling(
            roles, sessions=1, seed=seed, context=size.context
        )

    return [of(roles) for roles in size.roles]


def _four_roles(_: Size) -> list[Build]:
    return [
        lambda size, seed: workloads.roles_scaling(4, sessions=1, seed=seed, context=size.context)
    ]


def _rates(size: Size) -> list[Load]:
    return [Load(rate, max_sessions=cap) for rate in size.rates for cap in size.caps]


def _lowest_and_highest(size: Size) -> list[Load]:
    rates = dict.fromkeys((min(size.rates), max(size.rates)))
    return [Load(rate, max_sessions=cap) for rate in rates for cap in size.caps]


def _highest(size: Size) -> list[Load]:
    return [Load(max(size.rates), max_sessions=cap) for cap in size.caps]


def _limits(size: Size) -> list[Load]:
    return [Load(max(size.rates), max_sessions=limit) for limit in size.limits]


def _alone(_: Size) -> list[Load]:
    return [Load(limit=1)]


EXPERIMENTS: Mapping[str, Experiment] = {
    "react": Experiment("Fig. 4: ReAct over the arrival rate", _same(workloads.react), ALL, _rates),
    "reflexion": Experiment(
        "Fig. 4: Reflexion over the arrival rate", _same(workloads.reflexion), ALL, _rates
    ),
    "attribution": Experiment(
        "Table 6: what pooling gives and what reuse across roles",
        _same(workloads.react),
        ("prefillshare", "per_model", "shared_pool"),
        _lowest_and_highest,
    ),
    "prediction": Experiment(
        "Table 7: prefill ahead by a perfect guess of the next role; run attribution or react too",
        _same(workloads.react),
        ("predictive",),
        _lowest_and_highest,
    ),
    "low_overlap": Experiment(
        "Tables 4 and 8: a supervisor, histories that share nothing",
        _same(workloads.supervisor),
        BOTH,
        _rates,
    ),
    "swarm": Experiment("Table 5: roles in random order", _same(workloads.swarm), BOTH, _rates),
    "concurrency": Experiment(
        "Fig. 8: ReAct over the limit of sessions at once", _same(workloads.react), BOTH, _limits
    ),
    "input_length": Experiment("Table 9: short and long inputs", _inputs, BOTH, _highest),
    "roles_scaling": Experiment(
        "1 to 8 roles over one context; not in the paper",
        _roles,
        BOTH,
        _alone,
        apart=True,
        fixed=_ALONE_FIXED,
    ),
    "long_output": Experiment(
        "answers much longer than what comes in; not in the paper",
        _same(workloads.long_output),
        BOTH,
        _highest,
    ),
    "memory": Experiment(
        "Table 11: KV kept of one context that four roles read",
        _four_roles,
        BOTH,
        _alone,
        apart=True,
        fixed=_ALONE_FIXED,
    ),
}


def of_file(path: Path) -> Experiment:
    """The sessions of a workload file over the arrival rate, on every system.

    Raises ConfigError for a file that is none, or that has the name of an experiment or of what is
    written of one.
    """
    require_own_name(path)
    workload = traces.read(path)
    return Experiment(
        f"{workload.about or workload.name}, from {path}",
        lambda _: [lambda size, seed: workload],
        ALL,
        _rates,
        apart=True,
        fixed=("--sessions",),
    )


def require_own_name(path: Path) -> None:
    """Raise ConfigError for a file with the name of an experiment, or of what is written of one."""
    name = path.stem.removeprefix("serving_")
    if name in EXPERIMENTS:
        what = f"has the name of the experiment {name}"
        raise ConfigError(Problem(str(path), what, "give it another one"))
