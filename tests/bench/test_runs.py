"""What is measured when, and that a run leaves enough to go on, to be repeated and to be drawn."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from prefillshare_bench import adapters, runs, systems, traces
from prefillshare_bench.experiments import EXPERIMENTS, SIZES, Load, of_file
from prefillshare_bench.report import files
from prefillshare_bench.report.files import FILES
from prefillshare_bench.report.points import read
from prefillshare_bench.setting import Running, Setting
from prefillshare_bench.worker_state import Sampler, WorkerState
from prefillshare_server.cli import app, main
from prefillshare_server.errors import ConfigError

SMALL = SIZES["small"]


def every_point(name: str, **options: Any) -> list[runs.Point]:
    return runs.points(name, EXPERIMENTS[name], SMALL, repeats=2, **options)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_systems_are_sent_the_same_sessions(name: str) -> None:
    sent: dict[tuple[str, str, int], set[str]] = defaultdict(set)
    for point in every_point(name):
        whole = point.workload.model_dump_json()
        sent[point.workload.name, str(point.load), point.repeat].add(whole)
    assert {len(workloads) for workloads in sent.values()} == {1}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_point_finds_what_another_left_in_the_caches(name: str) -> None:
    starts: dict[object, list[int]] = defaultdict(list)
    for point in every_point(name):
        start = (point.system, point.workload.roles, point.load.max_sessions)
        starts[start].append(point.workload.seed)
    for seeds in starts.values():
        assert len(set(seeds)) == len(seeds)


def test_the_sessions_of_a_point_do_not_depend_on_what_else_is_asked_for() -> None:
    few = replace(SMALL, rates=(0.4,), caps=(8,))
    [alone] = runs.points("react", EXPERIMENTS["react"], few, repeats=1, only=("per_model",))
    among = [p for p in every_point("react") if p.load.rate == 0.4 and p.repeat == 0]
    assert {point.workload.model_dump_json() for point in [alone, *among]} == {
        alone.workload.model_dump_json()
    }


def test_limits_at_one_rate_are_tried_on_the_same_sessions() -> None:
    seeds: dict[str, set[int]] = defaultdict(set)
    for point in runs.points("react", EXPERIMENTS["react"], SMALL, repeats=1):
        seeds[point.load.arrivals].add(point.workload.seed)
    assert [len(each) for each in seeds.values()] == [1, 1]


def test_points_are_files_of_different_names() -> None:
    for name in EXPERIMENTS:
        files = [point.file for point in every_point(name)]
        assert len(set(files)) == len(files)


def test_tables_6_and_7_are_about_the_same_sessions() -> None:
    of = {
        name: [point.workload for point in every_point(name, only=(system,))]
        for name, system in (("attribution", "per_model"), ("prediction", "predictive"))
    }
    assert of["attribution"] == of["prediction"]


def test_every_experiment_has_a_file_of_results() -> None:
    assert {file.experiment for file in FILES.values()} == set(EXPERIMENTS)


def test_a_system_is_started_once_for_the_loads_that_it_can_be_started_once_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "prefillshare_bench.adapters.draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path)
    )
    # Two rates and two repeats, with and without a limit.
    assert [len(plan.points) for plan in planned("react", tmp_path)] == [4, 4] * 6
    limits = [plan.setting.max_sessions for plan in planned("concurrency", tmp_path)]
    assert limits == [*SMALL.limits] * 2
    workers = {plan.setting.workers: plan.setting for plan in planned("roles_scaling", tmp_path)}
    assert [*workers] == [2, 4, 8, 16]
    assert {setting.kv_blocks / count for count, setting in workers.items()} == {SMALL.blocks}


def planned(name: str, scratch: Path) -> list[runs.Plan]:
    return list(runs.plans(every_point(name), "base", SMALL, scratch))


def test_recorded_sessions_find_empty_caches_at_every_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "prefillshare_bench.adapters.draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path)
    )
    file = tmp_path / "mine.jsonl"
    traces.write(every_point("react")[0].workload, file)
    experiment = of_file(file)
    points = runs.points("mine", experiment, SMALL, repeats=1, only=("per_model",))
    plans = list(runs.plans(points, "base", SMALL, tmp_path, apart=experiment.apart))
    assert [len(plan.points) for plan in plans] == [1] * len(SMALL.rates) * len(SMALL.caps)


def test_a_load_says_what_it_is() -> None:
    loads = [Load(rate=0.05), Load(limit=3), Load(rate=2.0, max_sessions=8), Load(0.12345678)]
    assert list(map(str, loads)) == ["rate0.05", "limit3", "rate2-max8", "rate0.12345678"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"sessions": 3}, "workload"), ({"scale": 0.1}, "workload"), ({"blocks": 300}, "kv_blocks")],
)
def test_a_folder_is_not_gone_on_with_by_other_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(adapters, "draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path))
    plan = planned("react", tmp_path)[0]
    done = plan.points[0]
    result = {
        "version": 1,
        "workload": runs._header(done.workload),
        "setting": runs._told(plan.setting),
    }
    (tmp_path / done.file).write_text(json.dumps(result))
    assert runs.missing(plan, tmp_path).points == plan.points[1:]
    other = runs.points("react", EXPERIMENTS["react"], replace(SMALL, **changes), repeats=2)
    [another, *_] = runs.plans(other, "base", replace(SMALL, **changes), tmp_path)
    with pytest.raises(ConfigError, match=f"another {field}.*another --out"):
        runs.missing(another, tmp_path)


def test_a_file_with_the_name_of_an_experiment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "react.jsonl"
    traces.write(every_point("react")[0].workload, file)
    with pytest.raises(ConfigError, match="name of the experiment react"):
        of_file(file)


def test_one_system_that_dies_leaves_the_others_to_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began = []

    def dies(system: str, *_: object) -> None:
        began.append(system)
        raise OSError("no memory left")

    monkeypatch.setattr(systems, "start", dies)
    options = ["--rate", 5, "--max-sessions", 0, "--out", tmp_path, "--base", "tiny-base"]
    monkeypatch.setattr(adapters, "draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path))
    command = ["bench", "run", "attribution", *map(str, options)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert began == ["prefillshare", "per_model", "shared_pool"]
    assert done.exit_code == 1
    assert "per_model left out: no memory left" in done.stderr


def test_calls_that_failed_are_told_of_and_a_point_without_any_other_is_none() -> None:
    good, bad = {"error": None, "status": 200}, {"error": "no room", "status": 429}
    assert runs._failures({"lost": None, "calls": [good]}) == ""
    assert runs._failures({"lost": None, "calls": [good, bad]}).startswith("1 calls failed")
    with pytest.raises(RuntimeError, match="no call succeeded; the first says: no room"):
        runs._failures({"lost": None, "calls": [bad]})


def test_a_system_that_dies_under_a_load_leaves_what_its_calls_saw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states: Iterator[list[WorkerState]] = iter([[]])

    def workers(_: Running) -> list[WorkerState]:
        for state in states:
            return state
        raise httpx.ConnectError("prefill-0 is gone")

    @contextmanager
    def start(name: str, setting: Setting, folder: Path) -> Iterator[Running]:
        urls = dict.fromkeys(setting.roles, ("http://127.0.0.1:9",))
        yield Running(name, urls, (), 1.0, False, "base: x", ())

    monkeypatch.setattr(systems, "start", start)
    monkeypatch.setattr(Running, "workers", workers)
    monkeypatch.setattr(Running, "sampler", lambda _: nullcontext(Sampler((), ())))
    monkeypatch.setattr(runs, "_warm_up", lambda *_: None)
    monkeypatch.setattr(adapters, "draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path))
    size = replace(SMALL, sessions=2, rates=(1000.0,), caps=(None,))
    only = runs.points("react", EXPERIMENTS["react"], size, repeats=1, only=["per_model"])
    [plan] = runs.plans(only, "base", size, tmp_path)
    with pytest.raises(RuntimeError, match="after 2 calls: prefill-0 is gone"):
        runs.measure(
            plan, tmp_path, tmp_path, on_point=lambda _: lambda _: None, on_failures=lambda *_: None
        )

    [point] = read(tmp_path)
    assert [call["status"] for call in point.calls] == [0, 0]
    assert point.data["lost"] == "prefill-0 is gone"
    assert not point.survived
    assert files.results([point])["serving_react"]["not_survived"] == {"per_model": [1000]}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["run", "raect"], "EXPERIMENT: 'raect' is none; use react,"),
        (["run", "react", "--system", "ours"], "--system: 'ours' is none; use prefillshare,"),
        (["run", "react", "--closed-loop", "2", "--rate", "1"], "--closed-loop: does not go with"),
        (["run", "react", "--size", "huge"], "--size: 'huge' is none; use smoke, small, paper"),
        (["run", "no.jsonl"], "no.jsonl: cannot be read"),
        (["workload", "raect", "x.jsonl"], "NAME: 'raect' is none; use react,"),
        (["workload", "supervisor", "x.jsonl", "--roles", "1"], "supervisor: roles is 1; "),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(
    arguments: list[str], field: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["prefillshare", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert field in " ".join(capsys.readouterr().err.split())


def test_a_workload_is_written_and_told_of(tmp_path: Path) -> None:
    file = tmp_path / "react.jsonl"
    said = bench("workload", "react", file, "--sessions", 2, "--scale", 0.1).output
    assert "2 sessions, 32 calls, 4 roles" in said
    assert traces.read(file).calls == 32


@pytest.fixture
def home(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of the tests also for the processes that they start."""
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tiny_home))
    return tiny_home


@pytest.mark.engine
def test_a_file_of_sessions_is_measured_once_and_reported(home: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.jsonl", tmp_path / "results"
    bench("workload", "react", file, "--sessions", 2, "--scale", 0.03, "--roles", 2)
    measure = ["run", file, "--system", "prefillshare", "--rate", 5, "--base", "tiny-base"]
    measure += ["--max-sessions", 1]
    assert "1 of 1 points to measure" in bench(*measure, "--out", out).stderr
    assert "0 of 1 points to measure" in bench(*measure, "--out", out).stderr

    [point] = (out / "mine").glob("*.json")
    found = json.loads(point.read_text())
    assert traces.read(point.with_name(found["workload_file"])).calls == len(found["calls"])
    assert found["figures"]["calls"] == 16
    assert found["figures"]["failed_sessions"] == 0
    # Nothing twice; each of the two prefill workers has one session.
    once = traces.read(point.with_name(found["workload_file"])).session_prefill_tokens(
        block_size=32
    )
    assert once is not None
    assert found["figures"]["prefilled_tokens"] == once
    # What so small a workload has in use may be over before it is seen; what it leaves is not.
    assert min(worker["cached_blocks"] for worker in found["workers"]["after"]) > 0
    assert found["peaks"]["cached_blocks"] > 0
    assert found["figures"]["kv_bytes_peak"] == found["peaks"]["kv_bytes"]
    assert "agent1" in found["cluster_file"]

    page = out / "report.html"
    bench("report", out)
    assert "mine" in page.read_text()


@pytest.mark.engine
def test_recorded_requests_are_run_on_ours_and_on_stock_engines(home: Path, tmp_path: Path) -> None:
    log, file, out = tmp_path / "log.jsonl", tmp_path / "mine.jsonl", tmp_path / "results"
    said = [{"role": "user", "content": "Where is the red door?"}]
    said += [{"role": "assistant", "content": "North."}, {"role": "user", "content": "And blue?"}]
    requests = [
        {"model": model, "messages": said[:length], "max_tokens": 9, "session_id": session}
        for session in ("a", "b")
        for model, length in (("org/Planner", 1), ("org/Coder", 3))
    ]
    log.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    bench("import", log, "--out", file, "--longest-answer", 6)
    measure = ["run", file, "--closed-loop", 1, "--base", "tiny-base", "--out", out]
    bench(*measure, "--system", "prefillshare", "--system", "aggregated")

    points = sorted((out / "mine").glob("*.json"))
    assert [point.name for point in points] == [
        f"mine.{system}.limit1.0.json" for system in ("aggregated", "prefillshare")
    ]
    stock, ours = (json.loads(point.read_text()) for point in points)
    for found in (stock, ours):
        assert [call["generated"] for call in found["calls"]] == [6, 6, 6, 6]
        assert [call["role"] for call in found["calls"]] == ["org-planner", "org-coder"] * 2
        assert found["figures"]["failed_sessions"] == 0
    assert [call["prompt_tokens"] for call in ours["calls"]] == [
        call["prompt_tokens"] for call in stock["calls"]
    ]


def bench(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done
