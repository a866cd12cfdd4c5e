"""An evaluation from settings to a result that is kept, stopped and gone on with."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError
from prefillshare_server.models import adapter
from prefillshare_server.models.provenance import Provenance
from prefillshare_training.data.rendering import Renderer
from prefillshare_training.evaluate import answers
from prefillshare_training.evaluate.engine import Engine
from prefillshare_training.evaluate.run import EvalSettings, evaluate
from prefillshare_training.evaluate.score import accuracy
from tests.reference import base_cache_greedy

ITEMS = 9
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def decoder_dir(tiny_home: Path) -> Path:
    return tiny_home / "models" / "tiny-a"


@pytest.fixture(scope="module")
def data(base_dir: Path, decoder_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions; to two of three, what the decoder says on the base's KV is the answer."""
    renderer = Renderer.for_base(base_dir, LayoutSettings())
    draw = random.Random(3)
    rows = []
    for index in range(ITEMS):
        words = " ".join("abcdefgh"[: draw.randrange(1, 8)] for _ in range(draw.randrange(1, 9)))
        ask = {"role": "user", "content": f"{index} {words}"}
        ids = base_cache_greedy(
            base_dir,
            decoder_dir,
            renderer.prompt([ask]),
            MAX_TOKENS,
            stop_ids=tuple(renderer.stop_ids),
        )
        right = index % 3 != 0
        rows.append({"messages": [ask], "answer": renderer.decode(ids) if right else "other"})
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def settings(base_dir: Path, decoder_dir: Path, data: Path, tmp_path: Path) -> EvalSettings:
    return EvalSettings(
        base=str(base_dir),
        decoder=str(decoder_dir),
        task="exact",
        data=str(data),
        max_tokens=MAX_TOKENS,
        batch_size=4,
        out=tmp_path / "answers.jsonl",
    )


def lines(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(settings: EvalSettings, **changes: Any) -> Any:
    return evaluate(settings.model_copy(update=changes), Console(quiet=True))


def test_accuracy_counts_right_answers(settings: EvalSettings) -> None:
    result = run(settings)
    assert (result.n, result.mode, result.task) == (ITEMS, "shared", "exact")
    assert result.accuracy == pytest.approx(100 * 6 / 9)
    assert result.ci95 == accuracy([1.0] * 6 + [0.0] * 3)[1:]
    saved = json.loads((settings.out or Path()).with_suffix(".json").read_text())
    assert saved == result.to_json()
    assert saved["accuracy"] == pytest.approx(66.6667)


def test_own_kv_gives_other_answers(settings: EvalSettings, tmp_path: Path) -> None:
    assert run(settings, mode="own", out=tmp_path / "own.jsonl").accuracy < 50


def test_every_item_has_a_line(settings: EvalSettings) -> None:
    run(settings)
    header, *rows = lines(settings.out)
    assert (header["mode"], header["task"], header["max_tokens"]) == ("shared", "exact", 6)
    assert {line["item"] for line in rows} == {str(index) for index in range(ITEMS)}
    for line in rows:
        assert line["scores"] in ({"exact": 0.0}, {"exact": 1.0})
        assert len(line["ids"]) <= MAX_TOKENS
        assert line["logprob"] < 0


def test_what_is_answered_is_not_asked_again(
    settings: EvalSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(settings)
    monkeypatch.setattr(Engine, "generate", _never)
    monkeypatch.setattr(Engine, "__init__", _never)
    assert run(settings) == first


def test_a_stopped_evaluation_goes_on(
    settings: EvalSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(settings)
    assert settings.out is not None
    settings.out.unlink()

    add = answers.AnswersFile.add

    def stop_after_three(file: answers.AnswersFile, line: answers.Line) -> None:
        if len(file.lines) == 3:
            raise KeyboardInterrupt
        add(file, line)

    with monkeypatch.context() as patch:
        patch.setattr(answers.AnswersFile, "add", stop_after_three)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert len(lines(settings.out)) == 4
    asked: list[int] = []
    generate = Engine.generate

    def counted(engine: Engine, prompts: Any, **options: Any) -> Any:
        asked.append(len(prompts))
        return generate(engine, prompts, **options)

    monkeypatch.setattr(Engine, "generate", counted)
    assert run(settings) == whole
    assert asked == [ITEMS - 3]


def test_a_line_that_was_cut_off_is_answered_again(settings: EvalSettings) -> None:
    whole = run(settings)
    assert settings.out is not None
    text = settings.out.read_text()
    settings.out.write_text(text[:-20])
    assert run(settings) == whole
    assert len(lines(settings.out)) == ITEMS + 1


def test_a_larger_limit_goes_on_from_a_smaller_one(
    settings: EvalSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(settings, limit=4).n == 4
    assert len(lines(settings.out)) == 5
    assert run(settings).n == ITEMS
    monkeypatch.setattr(Engine, "generate", _never)
    assert run(settings, limit=4).n == 4


def test_a_seed_draws_other_items(settings: EvalSettings, tmp_path: Path) -> None:
    drawn = []
    for seed in (0, 1):
        out = tmp_path / f"{seed}.jsonl"
        run(settings, limit=3, seed=seed, out=out)
        drawn.append({line["item"] for line in lines(out)[1:]})
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mode": "own"}, "mode"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"decoder": None}, "decoder"),
        ({"match": "contains"}, "match"),
        ({"seed": 4}, "seed"),
        ({"layout": LayoutSettings(shared_head="We are a team.")}, "layout"),
    ],
)
def test_answers_of_other_settings_are_not_mixed_in(
    settings: EvalSettings, change: dict[str, Any], named: str
) -> None:
    run(settings, limit=1)
    with pytest.raises(ConfigError, match=f"another evaluation .*{named}.* differ.*--overwrite"):
        run(settings, limit=1, **change)
    assert run(settings, limit=1, overwrite=True, **change).n == 1


def test_two_evaluations_do_not_write_one_file(settings: EvalSettings) -> None:
    assert settings.out is not None
    with (
        answers.opened(settings.out, {}),
        pytest.raises(ConfigError, match="another evaluation is writing it"),
    ):
        run(settings)


def test_a_prompt_that_fills_the_context_counts_as_wrong(
    settings: EvalSettings, tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"messages": [{"role": "user", "content": word * 500}], "answer": "x"} for word in
            ("a", "long text ")]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(settings, data=str(path))
    assert (result.n, result.no_room, result.accuracy) == (2, 1, 0)


class TestRecord:
    @pytest.fixture
    def trained(self, decoder_dir: Path, tmp_path: Path) -> Path:
        folder = tmp_path / "trained"
        folder.mkdir()
        for file in decoder_dir.iterdir():
            (folder / file.name).symlink_to(file)
        Provenance("prefillshare", "tiny-base", "f" * 16, "e" * 16, {}, {}, (), {}).write(folder)
        return folder

    def test_the_result_is_written_into_the_decoder(
        self, settings: EvalSettings, trained: Path
    ) -> None:
        result = run(settings, decoder=str(trained), record=True)
        [entry] = _provenance(trained).evaluation
        assert entry == json.loads(json.dumps(result.to_json()))

    def test_the_same_evaluation_is_recorded_once(
        self, settings: EvalSettings, trained: Path, tmp_path: Path
    ) -> None:
        for out, mode in (("a", "shared"), ("b", "own"), ("c", "shared")):
            run(settings, decoder=str(trained), record=True, mode=mode, out=tmp_path / out)
        assert [entry["mode"] for entry in _provenance(trained).evaluation] == ["own", "shared"]

    def test_an_adapter_is_recorded_in_its_own_folder(
        self,
        settings: EvalSettings,
        decoder_dir: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        Provenance("prefillshare", "tiny-base", "f" * 16, "e" * 16, {}, {}, (), {}).write(folder)
        monkeypatch.setattr(adapter, "merged", lambda *_: decoder_dir)
        result = run(settings, decoder=str(folder), record=True)
        [entry] = _provenance(folder).evaluation
        assert entry["accuracy"] == round(result.accuracy, 4)
        assert not (decoder_dir / "prefillshare.json").exists()

    def test_nothing_is_computed_that_cannot_be_recorded(
        self, settings: EvalSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Engine, "generate", _never)
        with pytest.raises(ConfigError, match=r"has no prefillshare.json.*leave out --record"):
            run(settings, record=True)


def _provenance(folder: Path) -> Provenance:
    found = Provenance.read(folder)
    assert found is not None
    return replace(found)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is to be computed")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"server": "http://x"}, "--role: is missing"),
        ({"role": "solver"}, "--server: is missing"),
        ({"server": "http://x", "role": "r"}, "--decoder: the server has its own"),
        ({"record": True, "decoder": None}, "--record: there is no decoder"),
        ({"mode": "half"}, "mode 'half'"),
        ({"data": None}, "--data: is missing"),
        ({"out": Path("answers.json")}, "--out answers.json: the result would take its place"),
    ],
)
def test_settings_that_do_not_fit(
    settings: EvalSettings, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(settings, **changes)


def test_ids_must_differ(settings: EvalSettings, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"id": 1, "prompt": "a", "completion": "b"}\n' * 2)
    with pytest.raises(ConfigError, match="its id is there twice"):
        run(settings, data=str(path))


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 10, 0.0, 27.75), (5, 10, 23.66, 76.34), (10, 10, 72.25, 100.0), (713, 1000, 68.42, 74.02)],
)
def test_wilson_intervals(right: int, n: int, low: float, high: float) -> None:
    found = accuracy([1.0] * right + [0.0] * (n - right))
    assert found.percent == pytest.approx(100 * right / n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)
