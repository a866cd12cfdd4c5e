"""Runs experiments: one file for each system, workload, load and repeat, in a folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from prefillshare_bench import adapters, lengths, machine, systems, traces
from prefillshare_bench.experiments import BLOCK, Experiment, Load, Size
from prefillshare_bench.measures import figures
from prefillshare_bench.records import CallRecord
from prefillshare_bench.replay import replay
from prefillshare_bench.setting import Running, Setting
from prefillshare_bench.traces import Call, Session, Workload
from prefillshare_server.errors import ConfigError, Problem

VERSION = 1
_LOOP = re.compile(r"\.(rate|limit)\d")
_WARM_UP_SEED = 1_000_003
_ROUND_TO = 256
"""Of `max_model_len`, in tokens."""


@dataclass(frozen=True)
class Point:
    """One measurement."""

    experiment: str
    system: str
    workload: Workload
    load: Load
    repeat: int

    @property
    def file(self) -> str:
        """Its name, which says all that tells it from the other points of the experiment."""
        return f"{self.workload.name}.{self.system}.{self.load}.{self.repeat}.json"

    @property
    def workload_file(self) -> str:
        """Where the workload lies beside it: that of all systems, with and without a limit."""
        return f"{self.workload.name}.{self.load.arrivals}.{self.repeat}.jsonl"


@dataclass(frozen=True)
class Plan:
    """Points that one start of a system can serve, in order."""

    system: str
    setting: Setting
    points: Sequence[Point]


def points(
    name: str,
    experiment: Experiment,
    size: Size,
    *,
    repeats: int,
    seed: int = 0,
    only: Sequence[str] = (),
) -> list[Point]:
    """All points of the experiment of this name; `only` these systems, if any are named.

    The sessions of a point depend on the workload, the arrivals and the repeat, and on nothing else
    that is asked for at the same time: all systems are sent the same, and none finds in its cache
    what an earlier point has left there.
    """
    return [
        Point(name, system, build(size, drawn), load, repeat)
        for system in only or experiment.systems
        for build in experiment.workloads(size)
        for load in experiment.loads(size)
        for repeat in range(repeats)
        for drawn in [_seed(seed, build(size, 0).name, load.arrivals, repeat)]
    ]


def plans(
    points: Sequence[Point], base: str, size: Size, scratch: Path, *, apart: bool = False
) -> list[Plan]:
    """Group points by what has to be started for them; draws adapters in `scratch`.

    With `apart` each point has a start of its own. Raises ConfigError for a workload that does not
    fit the size.
    """
    groups: dict[object, list[Point]] = {}
    longest: dict[tuple[str, ...], int] = {}
    measured: dict[int, int] = {}
    for point in points:
        roles = point.workload.roles
        key = (point.system, roles, point.load.max_sessions, point.file if apart else None)
        groups.setdefault(key, []).append(point)
        # A recorded workload is the same in all points, and takes a while to count.
        if id(point.workload) not in measured:
            measured[id(point.workload)] = lengths.longest(point.workload, base)
        longest[roles] = max(longest.get(roles, 0), measured[id(point.workload)])
    return [_plan(group, base, size, scratch, longest) for group in groups.values()]


def _plan(
    group: Sequence[Point],
    base: str,
    size: Size,
    scratch: Path,
    longest: Mapping[tuple[str, ...], int],
) -> Plan:
    roles = group[0].workload.roles
    try:
        setting = Setting(
            base=base,
            roles=roles,
            adapters=adapters.draw(base, scratch / "adapters", roles),
            kv_blocks=size.blocks * 2 * len(roles),
            block_size=BLOCK,
            max_model_len=-(-longest[roles] // _ROUND_TO) * _ROUND_TO,
            max_sessions=group[0].load.max_sessions,
        )
    except ValueError as error:
        where = f"workload {group[0].workload.name}"
        remedy = f"or give --blocks, which is {size.blocks} for each of {2 * len(roles)} workers"
        raise ConfigError(Problem(where, str(error), remedy)) from None
    return Plan(group[0].system, setting, group)


def require_one_loop(points: Sequence[Point], folder: Path) -> None:
    """Raise ConfigError if `folder` has points at rates and these are of a closed loop, or not."""
    closed = {point.load.rate is None for point in points}
    there = {found[1] == "limit" for p in folder.glob("*.json") if (found := _LOOP.search(p.name))}
    if len(closed | there) > 1:
        what = "has points at rates of arrival and others of a closed loop"
        raise ConfigError(Problem(str(folder), what, "give another --out"))


def missing(plan: Plan, folder: Path, *, again: bool = False) -> Plan:
    """The plan without the points that `folder` has already; `again`: that it has without failures.

    Raises ConfigError for one that was measured with other sessions or another setting.
    """
    left = [point for point in plan.points if not _is_there(point, plan.setting, folder, again)]
    return replace(plan, points=left)


def _is_there(point: Point, setting: Setting, folder: Path, again: bool) -> bool:
    file = folder / point.file
    if not file.exists():
        return False
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        then = {"version": found["version"], "workload": found["workload"], **found["setting"]}
        lost = found.get("lost") or any(call["error"] for call in found["calls"])
    except (ValueError, KeyError, TypeError):
        what = "is no measurement, or not of this version"
        raise ConfigError(Problem(str(file), what, "delete it to measure the point")) from None
    now = {"version": VERSION, "workload": _header(point.workload), **_told(setting)}
    for field, value in now.items():
        if then.get(field) != json.loads(json.dumps(value)):
            what = f"was measured with another {field}"
            remedy = "give another --out, or delete the file to measure it again"
            raise ConfigError(Problem(str(file), what, remedy))
    return not (again and lost)


def measure(
    plan: Plan,
    folder: Path,
    scratch: Path,
    *,
    on_point: Callable[[Point], Callable[[CallRecord], None]],
    on_failures: Callable[[Point, str], None],
) -> None:
    """Start the plan's system and write a file for each of its points.

    Raises what `systems.start` raises, and RuntimeError when no call of a warm-up or a point
    succeeds, a worker is gone, or one does not come to rest. The point is written all the same: it
    tells which load the system did not survive.
    """
    with systems.start(plan.system, plan.setting, scratch / plan.system) as running:
        _warm_up(running, plan.setting)
        for point in plan.points:
            result = _measured(running, point, plan.setting, on_point(point))
            traces.write(point.workload, folder / point.workload_file)
            _write(result, folder / point.file)
            if failures := _failures(result):
                on_failures(point, failures)


def command() -> str:
    """This process's command line, as a user types it."""
    return shlex.join(["prefillshare", *sys.argv[1:]])


def scratch_folder() -> TemporaryDirectory[str]:
    """For what is started: its files, logs and adapters."""
    return TemporaryDirectory(prefix="prefillshare-bench-", ignore_cleanup_errors=True)


def _warm_up(running: Running, setting: Setting) -> None:
    """Let every worker do what it does for the first time. Raises RuntimeError if one cannot.

    As many sessions at once as there are workers, short and unlike all others.
    """
    calls = tuple(Call(role=role, new=BLOCK, tail=1, answer=4) for role in setting.roles)
    count = setting.workers
    warm_up = Workload(
        name="warm_up",
        seed=_WARM_UP_SEED,
        roles=setting.roles,
        sessions=tuple(Session(id=f"w{n}", arrival=0, calls=calls) for n in range(count)),
    )
    done = asyncio.run(replay(warm_up, running.urls, limit=count, router=running.has_router))
    for call in done.calls:
        if not call.ok:
            raise RuntimeError(f"a call of the warm-up failed: {call.error or call.status}")


def _seed(*what: object) -> int:
    return zlib.crc32(repr(what).encode())


def _failures(result: Mapping[str, Any]) -> str:
    """What is to be told of calls that failed. Raises RuntimeError if the system is no more."""
    if result["lost"]:
        raise RuntimeError(f"after {len(result['calls'])} calls: {result['lost']}")
    failed = [call for call in result["calls"] if call["error"] or call["status"] != 200]
    if not failed:
        return ""
    why = f"the first says: {failed[0]['error'] or failed[0]['status']}"
    if len(failed) == len(result["calls"]):
        raise RuntimeError(f"no call succeeded; {why}")
    return f"{len(failed)} calls failed, and with them their sessions; {why}"


def _measured(
    running: Running, point: Point, setting: Setting, on_call: Callable[[CallRecord], None]
) -> dict[str, Any]:
    most = point.load.max_sessions
    before = running.workers()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with running.sampler() as sampler:
        done = asyncio.run(
            replay(
                point.workload,
                running.urls,
                rate=point.load.rate,
                limit=point.load.limit or (None if running.has_router else most),
                router=running.has_router,
                next_role=point.system == "predictive",
                on_call=on_call,
            )
        )
    lost = None
    try:
        after = running.workers()
    except (httpx.HTTPError, TimeoutError) as reason:
        # What calls saw of it is kept; what was computed by whom is not known any more.
        before, after, lost = [], [], str(reason) or type(reason).__name__
    peaks = sampler.peaks()
    found = figures(
        done,
        before,
        after,
        workload=point.workload,
        block_size=setting.block_size,
        kv_bytes_peak=peaks.kv_bytes,
    )
    return {
        "version": VERSION,
        "experiment": point.experiment,
        "system": point.system,
        **asdict(point.load),
        "repeat": point.repeat,
        "workload": _header(point.workload),
        "workload_file": point.workload_file,
        "setting": _told(setting),
        "adapter_seed": adapters.SEED,
        "cluster_file": running.cluster_file,
        "about": {**machine.facts(), "command": command(), "started_at": started_at},
        "ready_s": round(running.ready_s, 2),
        "wall_s": round(done.wall_s, 3),
        "lost": lost,
        "memory_bytes": running.memory_bytes(),
        "workers": {
            "before": [asdict(worker) for worker in before],
            "after": [asdict(worker) for worker in after],
            "peak": [asdict(worker) for worker in peaks.workers],
        },
        "peaks": {name: value for name, value in asdict(peaks).items() if name != "workers"},
        "calls": [asdict(call) for call in done.calls],
        "figures": found,
    }


def _header(workload: Workload) -> dict[str, Any]:
    whole = json.dumps(workload.model_dump(), sort_keys=True).encode()
    return {
        **workload.model_dump(exclude={"sessions"}),
        "sessions": len(workload.sessions),
        "calls": workload.calls,
        "sha256": hashlib.sha256(whole).hexdigest(),
    }


def _told(setting: Setting) -> dict[str, Any]:
    """What the setting says, less where things lie on this machine."""
    return {name: value for name, value in asdict(setting).items() if name != "adapters"}


def _write(result: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a file that is there is a point that is done."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(result) + "\n", encoding="utf-8")
    os.replace(partial, path)
