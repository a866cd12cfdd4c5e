"""What a decoder must have in common with the base, read from files of any spelling."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_server.models.geometry import Geometry, differences

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
}


def geometry(folder: Path, **changes: Any) -> Geometry:
    folder.mkdir(exist_ok=True)
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return Geometry.of(folder)


def test_members_of_one_family_fit(tiny_models: dict[str, Path]) -> None:
    base, decoder = (Geometry.of(tiny_models[name]) for name in ("tiny-base", "tiny-a"))

    assert differences(base, decoder) == []
    assert base.fingerprint() == decoder.fingerprint()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("tiny-other-geometry", "num_kv_heads"),
        ("tiny-other-tokenizer", "tokenizer_sha256"),
    ],
)
def test_a_stranger_differs_in_exactly_one_field(
    tiny_models: dict[str, Path], name: str, field: str
) -> None:
    base, decoder = Geometry.of(tiny_models["tiny-base"]), Geometry.of(tiny_models[name])

    assert [difference.field for difference in differences(base, decoder)] == [field]
    assert base.fingerprint() != decoder.fingerprint()


def test_missing_keys_mean_what_transformers_takes_them_for(tmp_path: Path) -> None:
    found = geometry(tmp_path, num_key_value_heads=...)

    assert (found.num_kv_heads, found.head_size, found.sliding_window) == (4, 32, None)


def test_an_explicit_head_size_wins(tmp_path: Path) -> None:
    assert geometry(tmp_path, head_dim=64).head_size == 64


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        (
            {"rope_theta": 500000, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}},
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "type": "linear",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                }
            },
        ),
    ],
    ids=["default", "theta", "scaled"],
)
def test_old_and_new_spelling_of_rope_agree(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert geometry(tmp_path / "old", **old).rope == geometry(tmp_path / "new", **new).rope


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ],
)
def test_another_rope_is_another_geometry(tmp_path: Path, change: dict[str, Any]) -> None:
    assert geometry(tmp_path, **change).rope != geometry(tmp_path).rope


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    off = geometry(tmp_path, sliding_window=4096, use_sliding_window=False)

    assert off.sliding_window is None
    assert geometry(tmp_path, sliding_window=4096).sliding_window == 4096


def test_a_multimodal_checkpoint_counts_by_its_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["SomeVLM"], "text_config": {**LLAMA, "architectures": None}})
    )

    assert Geometry.of(tmp_path).num_layers == 4


def test_how_a_tokenizer_file_is_written_does_not_matter(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_models["tiny-base"]
    raw = json.loads((source / "tokenizer.json").read_text())
    raw["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw, indent=3, ensure_ascii=True))

    assert Geometry.of(tmp_path).tokenizer_sha256 == Geometry.of(source).tokenizer_sha256


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        (
            "tokenizer_config.json",
            json.dumps(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "{{ tools }}"},
                        {"name": "default", "template": "{{ messages }}"},
                    ]
                }
            ),
        ),
    ],
    ids=["own file", "tokenizer config", "named templates"],
)
def test_the_chat_template_is_found_wherever_it_is(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / file).write_text(content)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "chat_template.jinja").write_text("{{ messages }}")

    one, two = geometry(tmp_path / "one"), geometry(tmp_path / "two")

    assert one.template_sha256 is not None
    assert one == two


def test_a_decoder_without_a_template_of_its_own_fits(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    base, decoder = geometry(tmp_path / "base"), geometry(tmp_path / "decoder")

    assert differences(base, decoder) == []
    assert [each.field for each in differences(decoder, base)] == ["template_sha256"]


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "is no Hugging Face checkpoint .no config.json."),
        ({"adapter_config.json": "{}"}, "is a LoRA adapter.*name it with `adapter:`"),
        ({"config.json": "{"}, "config.json: cannot be read"),
        ({"config.json": "[]"}, "config.json: is no JSON object"),
        ({"config.json": '{"model_type": "mamba"}'}, "num_attention_heads: None is not a positive"),
    ],
    ids=["empty", "adapter", "broken", "no object", "no attention"],
)
def test_a_directory_that_is_no_checkpoint_is_refused(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=complaint):
        Geometry.of(tmp_path)


def test_reading_it_loads_neither_torch_nor_transformers(
    tiny_models: dict[str, Path],
) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from prefillshare_server.models.geometry import Geometry\n"
        f"Geometry.of(Path({str(tiny_models['tiny-base'])!r}))\n"
        "sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
