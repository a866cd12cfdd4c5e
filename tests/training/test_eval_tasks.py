"""The benchmarks: what is asked, and which answers count as right."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError
from prefillshare_training.data.rendering import Renderer
from prefillshare_training.evaluate import tasks
from prefillshare_training.evaluate.tasks import Item, text, wheels
from prefillshare_training.evaluate.tasks.gsm8k import Gsm8k


@pytest.fixture(scope="module")
def renderer(base_dir: Path) -> Renderer:
    return Renderer.for_base(base_dir, LayoutSettings())


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class TestText:
    @pytest.mark.parametrize(
        ("said", "expected"),
        [
            ("So he has 1,234.50 dollars.", "1234.50"),
            ("5 + 7 = 12", "12"),
            ("It is -3.", "-3"),
            ("no number", None),
            ("$18.", "18"),
            ("It is 1, 2 or 3,4,5", "5"),
            ("about 12,345,678.", "12345678"),
            ("It is \N{MINUS SIGN}3.", "-3"),
            ("a loss of -$1,500", "-1500"),
        ],
    )
    def test_last_number(self, said: str, expected: str | None) -> None:
        assert text.last_number(said) == (None if expected is None else text.number(expected))

    @pytest.mark.parametrize(
        "said",
        [
            call("f", x=1),
            '<tool_call>{"name": "f", "arguments": {"x": 1}}',
            '{"name": "f", "arguments": {"x": 1}}',
            '[{"name": "f", "arguments": {"x": 1}}]',
            '```json\n{"name": "f", "parameters": {"x": 1}}\n```',
            'I call it: {"function": {"name": "f", "arguments": "{\\"x\\": 1}"}} now',
        ],
    )
    def test_tool_calls_are_found_in_every_form(self, said: str) -> None:
        assert text.tool_calls(said) == [("f", {"x": 1})]

    @pytest.mark.parametrize(
        "said",
        [
            call("f", x=1) + "\n" + call("g"),
            '{"name": "f", "arguments": {"x": 1}}\n{"name": "g", "arguments": {}}',
            '{"name": "f", "arguments": {"x": 1}}; {"name": "g", "arguments": {}} both',
            '<tool_call>[{"name": "f", "arguments": {"x": 1}}, '
            '{"name": "g", "arguments": {}}]</tool_call>',
        ],
    )
    def test_several_tool_calls(self, said: str) -> None:
        assert text.tool_calls(said) == [("f", {"x": 1}), ("g", {})]

    @pytest.mark.parametrize(
        "said",
        [
            "The answer is 5.",
            "<tool_call>not json</tool_call>",
            '{"name": "f", "arguments": [1]}',
            '{"arguments": {}}',
            '{"name": "Bob", "age": 3}',
            call("f") + "<tool_call>{broken</tool_call>",
            "[" * 100_000,
        ],
    )
    def test_what_is_no_tool_call(self, said: str) -> None:
        assert text.tool_calls(said) is None


class TestGsm8k:
    ROWS = (
        {"question": "What is 6 times 3?", "answer": "6 * 3 = <<6*3=18>>18\n#### 18"},
        {"question": "And 1000 more?", "answer": "#### 1,018"},
    )

    def test_prompts_are_those_of_the_training_preset(
        self, renderer: Renderer, tmp_path: Path
    ) -> None:
        first, second = Gsm8k(write(tmp_path / "test.jsonl", *self.ROWS)).items(renderer)
        ask = [{"role": "user", "content": "What is 6 times 3?"}]
        assert first.prompt_ids == tuple(renderer.prompt(ask))
        assert (first.expected, second.expected) == ("18", "1,018")

    def test_the_test_file_of_a_folder_is_found(self, renderer: Renderer, tmp_path: Path) -> None:
        write(tmp_path / "train.jsonl", self.ROWS[0])
        write(tmp_path / "test.jsonl", self.ROWS[1])
        [item] = Gsm8k(str(tmp_path)).items(renderer)
        assert item.expected == "1,018"

    @pytest.mark.parametrize(
        ("said", "flexible", "strict"),
        [
            ("6 * 3 = 18\n#### 18", 1, 1),
            ("#### $18.00", 1, 1),
            ("#### 18.\n#### 19", 1, 1),
            ("#### -18", 0, 0),
            ("#### \N{MINUS SIGN}18", 0, 0),
            ("The answer is: 18.", 1, 0),
            ("#### 17\nor rather 18", 0, 0),
            ("18 or 19", 0, 0),
            ("", 0, 0),
        ],
    )
    def test_scores(self, said: str, flexible: float, strict: float) -> None:
        scores = Gsm8k().score(Item("0", (1,), "18"), said)
        assert scores == {"flexible": flexible, "strict": strict}

    def test_a_row_without_its_number_is_named(self, renderer: Renderer, tmp_path: Path) -> None:
        path = write(tmp_path / "test.jsonl", self.ROWS[0], {"question": "?", "answer": "18"})
        with pytest.raises(ConfigError, match=r"line 2: answer: has no `#### N` line"):
            Gsm8k(path).items(renderer)

    def test_without_the_hub_the_remedy_is_a_file(
        self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ConnectionError("no route to host")

        monkeypatch.setattr("datasets.load_dataset", fail)
        with pytest.raises(ConfigError, match=r"no route to host.*--data test.jsonl"):
            Gsm8k().items(renderer)


class TestMake:
    def test_every_task_can_be_made(self) -> None:
        made = [tasks.make(name, data="x" if name == "exact" else None) for name in tasks.TASKS]
        assert tuple(task.name for task in made) == tasks.TASKS

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"name": "gsm"}, "did you mean 'gsm8k'"),
            ({"name": "exact"}, "--data: is missing"),
            ({"name": "exact", "data": "x", "match": "exakt"}, "did you mean 'exact'"),
            ({"name": "gsm8k", "match": "exact"}, "--match: gsm8k has its own rule"),
            ({"name": "humaneval", "data": "x"}, "--data: humaneval brings its own"),
        ],
    )
    def test_options_that_do_not_fit(self, options: dict[str, str], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
            tasks.make(**options)

    def test_a_missing_wheel_has_a_remedy(self) -> None:
        with pytest.raises(ConfigError, match="run: pip install something"):
            wheels.rows("no_such_package", "data.jsonl", install="pip install something")
