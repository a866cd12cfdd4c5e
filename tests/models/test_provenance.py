"""Which decoder may read whose KV, and what says so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError
from prefillshare_server.models import provenance
from prefillshare_server.models.layout import Layout
from prefillshare_server.models.provenance import Provenance, base_fingerprint, untrained


@pytest.fixture
def base(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["tiny-base"]


@pytest.fixture
def layout(base: Path) -> Layout:
    return Layout.for_model(base, LayoutSettings())


@pytest.fixture
def decoder(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of tiny-a that says nothing of itself yet."""
    return Path(shutil.copytree(tiny_models["tiny-a"], tmp_path / "decoder"))


@pytest.fixture
def trained(base: Path, layout: Layout) -> Provenance:
    """Of a decoder that was trained for `base` and `layout`."""
    return Provenance(
        method="prefillshare",
        base="tiny-base",
        base_fingerprint=base_fingerprint(base),
        layout_fingerprint=layout.fingerprint,
        data={"source": "rows.jsonl", "sha256": "0" * 64, "samples": 3},
        hyperparameters={"learning_rate": 1e-4, "lora": None},
        evaluation=({"task": "exact", "accuracy": 75.0},),
        versions={"torch": "2"},
    )


def test_what_is_written_is_read(trained: Provenance, tmp_path: Path) -> None:
    trained.write(tmp_path)

    assert Provenance.read(tmp_path) == trained
    assert [path.name for path in tmp_path.iterdir()] == [provenance.FILE]


def test_a_directory_that_says_nothing_is_none(tmp_path: Path) -> None:
    assert Provenance.read(tmp_path) is None


def test_a_later_record_takes_the_place_of_the_earlier(trained: Provenance, tmp_path: Path) -> None:
    trained.write(tmp_path)
    later = replace(trained, evaluation=(*trained.evaluation, {"task": "gsm8k"}))

    later.write(tmp_path)

    assert Provenance.read(tmp_path) == later


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"method": 3}, "prefillshare.json: method: 3 is not of its type"),
        ({"evaluation": {}}, "prefillshare.json: evaluation: {} is not of its type"),
        ({"data": None}, "prefillshare.json: data: None is not of its type"),
        ({"more": 1}, "prefillshare.json: is no object of method, base,"),
        ({"format": 2}, "has format 2, this program knows 1; upgrade prefillshare-agents"),
    ],
)
def test_a_damaged_file_is_named(
    trained: Provenance, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    trained.write(tmp_path)
    file = tmp_path / provenance.FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    with pytest.raises(ConfigError) as caught:
        Provenance.read(tmp_path)

    assert complaint in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_what_is_no_record_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / provenance.FILE).write_text(text)

    with pytest.raises(ConfigError, match=r"prefillshare\.json: "):
        Provenance.read(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(trained: Provenance, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        trained.write(tmp_path / "gone")


def test_a_base_is_named_by_its_weights_and_tokenizer(
    tiny_models: dict[str, Path], base: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))

    assert base_fingerprint(copy) == base_fingerprint(base)
    assert base_fingerprint(tiny_models["tiny-a"]) != base_fingerprint(base)
    shutil.copy(tiny_models["tiny-other-tokenizer"] / "tokenizer.json", copy)
    assert base_fingerprint(copy) != base_fingerprint(base)


def test_a_base_is_not_named_by_its_template(base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    (copy / "chat_template.jinja").write_text("{{ messages }}")

    assert base_fingerprint(copy) == base_fingerprint(base)


def test_the_bases_own_weights_may_be_served(base: Path, layout: Layout, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))

    assert untrained(base, base, layout) == []
    assert untrained(copy, base, layout) == []


def test_what_was_trained_for_base_and_layout_may_be_served(
    trained: Provenance, decoder: Path, base: Path, layout: Layout
) -> None:
    trained.write(decoder)

    assert untrained(decoder, base, layout) == []


def test_a_decoder_that_says_nothing_may_not(decoder: Path, base: Path, layout: Layout) -> None:
    [problem] = untrained(decoder, base, layout)

    assert problem.where == str(decoder)
    assert problem.what == "was not trained to read the base's KV (no prefillshare.json)"
    assert f"`prefillshare train --base {base} …`" in problem.remedy
    assert "--allow-untrained" in problem.remedy


def test_a_decoder_trained_on_its_own_kv_may_not(
    trained: Provenance, decoder: Path, base: Path, layout: Layout
) -> None:
    replace(trained, method="full-ft").write(decoder)

    [problem] = untrained(decoder, base, layout)

    assert "(its method is full-ft)" in problem.what


def test_another_base_is_a_problem_that_names_both(
    trained: Provenance, decoder: Path, base: Path, layout: Layout
) -> None:
    replace(trained, base="./other", base_fingerprint="0123456789abcdef").write(decoder)

    [problem] = untrained(decoder, base, layout)

    assert problem.what == (
        f"was trained for base ./other (0123456789abcdef), not for {base} "
        f"({base_fingerprint(base)})"
    )


def test_another_layout_is_a_problem_that_names_both(
    trained: Provenance, decoder: Path, base: Path, layout: Layout
) -> None:
    trained.write(decoder)
    other = Layout.for_model(base, LayoutSettings(tail_role="user"))

    [problem] = untrained(decoder, base, other)

    assert f"prompt layout {layout.fingerprint}" in problem.what
    assert f"this cluster's is {other.fingerprint}" in problem.what


def test_a_damaged_record_is_the_problem(decoder: Path, base: Path, layout: Layout) -> None:
    (decoder / provenance.FILE).write_text("{")

    [problem] = untrained(decoder, base, layout)

    assert problem.where == str(decoder / provenance.FILE)
