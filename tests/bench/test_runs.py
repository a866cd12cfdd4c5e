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
from typer.testing import CliRunner

from prefillshare_bench import adapters, runs, systems, traces
from prefillshare_bench.experiments import EXPERIMENTS, SIZES, Load, of_file
from prefillshare_bench.report import files
from prefillshare_bench.report.files import FILES
from prefillshare_bench.report.points import read
from prefillshare_bench.setting import Running, Setting
from prefillshare_bench.worker_state import Sampler, WorkerState
from prefillshare_server.cli import app, main
from prefillshare_server.errors import ConfigError
from tests.bench.conftest import bench

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
        "lost": None,
        "calls": [{"error": None}],
    }
    (tmp_path / done.file).write_text(json.dumps(result))
    assert runs.missing(plan, tmp_path).points == plan.points[1:]
    other = runs.points("react", EXPERIMENTS["react"], replace(SMALL, **changes), repeats=2)
    [another, *_] = runs.plans(other, "base", replace(SMALL, **changes), tmp_path)
    with pytest.raises(ConfigError, match=f"another {field}.*another --out"):
        runs.missing(another, tmp_path)


@pytest.mark.parametrize(
    ("lost", "error", "is_measured_again"),
    [(None, None, False), (None, "no room", True), ("prefill-0 is gone", None, True)],
)
def test_points_in_which_calls_failed_are_measured_again_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lost: str | None,
    error: str | None,
    is_measured_again: bool,
) -> None:
    monkeypatch.setattr(adapters, "draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path))
    plan = planned("react", tmp_path)[0]
    result = {
        "version": 1,
        "workload": runs._header(plan.points[0].workload),
        "setting": runs._told(plan.setting),
        "lost": lost,
        "calls": [{"error": None}, {"error": error}],
    }
    (tmp_path / plan.points[0].file).write_text(json.dumps(result))
    assert len(runs.missing(plan, tmp_path).points) == len(plan.points) - 1
    left = len(plan.points) - (0 if is_measured_again else 1)
    assert len(runs.missing(plan, tmp_path, again=True).points) == left


def test_a_folder_has_points_of_one_kind_of_loop(tmp_path: Path) -> None:
    rates = runs.points("react", EXPERIMENTS["react"], SMALL, repeats=1)
    closed = replace(EXPERIMENTS["react"], loads=lambda _: [Load(limit=2)])
    runs.require_one_loop(rates, tmp_path)
    (tmp_path / rates[0].file).touch()
    runs.require_one_loop(rates, tmp_path)
    with pytest.raises(ConfigError, match=r"closed loop.*another --out"):
        runs.require_one_loop(runs.points("react", closed, SMALL, repeats=1), tmp_path)


def test_what_is_asked_for_twice_is_measured_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(adapters, "draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path))
    monkeypatch.setattr(
        runs, "measure", lambda plan, *_, **__: measured.extend(p.file for p in plan.points)
    )
    options = ["--system", "per_model"] * 2 + ["--max-sessions", "4"] * 2
    command = ["run", "concurrency", *options, "--base", "tiny-base", "--out", tmp_path]
    bench(*command)
    assert measured == ["react.per_model.rate0.4-max4.0.json"]


def test_a_context_that_the_base_does_not_have_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "measure", lambda *_, **__: pytest.fail("it was measured"))
    command = ["bench", "run", "memory", "react", "--size", "paper", "--base", "tiny-base"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "needs 4352 tokens of context; tiny-base has 4096" in str(done.exception)


def test_an_option_without_effect_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path))
    monkeypatch.setattr(runs, "measure", lambda *_, **__: None)
    command = ["run", "memory", "concurrency", "--rate", 1, "--size", "smoke"]
    said = bench(*command, "--base", "tiny-base", "--out", tmp_path).stderr
    assert "memory: --rate has no effect on it" in said
    assert "concurrency: --rate" not in said


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 1, "workload": {}}'])
def test_a_file_that_is_no_measurement_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setattr(adapters, "draw", lambda _, __, roles: dict.fromkeys(roles, tmp_path))
    plan = planned("react", tmp_path)[0]
    (tmp_path / plan.points[0].file).write_text(text)
    with pytest.raises(ConfigError, match=r"is no measurement.*delete it"):
        runs.missing(plan, tmp_path)


@pytest.mark.parametrize("name", ["react", "serving_react"])
def test_a_file_with_the_name_of_an_experiment_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.jsonl"
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
    point = "react.per_model.rate5.0"
    why = tmp_path / "attribution" / "logs" / point / "error.txt"
    assert "OSError: no memory left" in why.read_text()


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
        (["run", "react", "react"], "EXPERIMENT: react is there twice"),
        (["run", "no.jsonl"], "no.jsonl: cannot be read"),
        (["workload", "react", "react.jsonl"], "react.jsonl: has the name of the experiment"),
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
    file = tmp_path / "mine.jsonl"
    said = bench("workload", "react", file, "--sessions", 2, "--scale", 0.1).output
    assert "2 sessions, 32 calls, 4 roles" in said
    assert traces.read(file).calls == 32
