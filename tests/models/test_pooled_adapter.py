"""An adapter that shares workers: copied under a name of its content, or refused with a reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import pooled_adapter
from tests.adapters import write_adapter


@pytest.fixture
def base(tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Tests in other processes keep adapters in the home that is shared.
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tmp_path / "home"))
    return tiny_home / "models" / "tiny-base"


@pytest.fixture
def lora(tiny_adapter: Path, tmp_path: Path) -> Path:
    """A copy of the adapter that a test may change."""
    return Path(shutil.copytree(tiny_adapter, tmp_path / "lora"))


def configured(lora: Path, **changes: Any) -> Path:
    path = lora / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return lora


def renamed(lora: Path, change: Callable[[str], str]) -> None:
    """Give its tensors other names."""
    file = lora / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file)


def complaint(base: Path, directory: Path) -> str:
    with pytest.raises(ConfigError) as error:
        pooled_adapter.pooled(base, directory)
    return str(error.value)


def test_the_copy_is_whole_and_does_not_change_with_the_folder(base: Path, lora: Path) -> None:
    name = pooled_adapter.pooled(base, lora)
    copy = pooled_adapter.home() / name
    before = (copy / "adapter_model.safetensors").read_bytes()
    assert before == (lora / "adapter_model.safetensors").read_bytes()
    assert {file.name for file in copy.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    write_adapter(base, lora, seed=11)
    assert pooled_adapter.pooled(base, lora) != name
    assert (copy / "adapter_model.safetensors").read_bytes() == before


def test_equal_adapters_have_one_name_wherever_they_are(
    base: Path, lora: Path, tiny_adapter: Path
) -> None:
    assert pooled_adapter.pooled(base, lora) == pooled_adapter.pooled(base, tiny_adapter)


def test_what_changes_while_it_is_copied_is_not_served(
    base: Path, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a training writes there."""
    copyfile, before = shutil.copyfile, list(pooled_adapter.home().glob("adapter-*"))

    def copy_something_else(source: Path, target: Path) -> None:
        copyfile(source, target)
        with target.open("ab") as file:
            file.write(b" ")

    configured(lora, lora_alpha=12345)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copy_something_else)
        assert "changed while it was read; try again" in complaint(base, lora)
    assert list(pooled_adapter.home().glob("adapter-*")) == before
    pooled_adapter.pooled(base, lora)


def test_another_scale_is_another_adapter(base: Path, lora: Path) -> None:
    before = pooled_adapter.pooled(base, lora)
    assert pooled_adapter.pooled(base, configured(lora, lora_alpha=3)) != before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]]"),
        (
            {"modules_to_save": ["lm_head"]},
            "it has full weights of its own (modules_to_save: lm_head)",
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base's weights"),
    ],
)
def test_what_cannot_share_a_worker_is_told_how_to_be_served(
    base: Path, lora: Path, changes: dict[str, Any], what: str
) -> None:
    said = complaint(base, configured(lora, **changes))
    assert f"cannot share a decode worker: {what}" in said
    assert "set merge: true for the role, which then gets workers of its own" in said


def test_the_largest_rank_counts(lora: Path) -> None:
    assert pooled_adapter.rank(lora) == 4
    assert pooled_adapter.rank(configured(lora, rank_pattern={"q_proj": 24, "o_proj": 2})) == 24


@pytest.mark.parametrize(("ranks", "most"), [([], 1), ([4], 8), ([8, 9], 16), ([512], 512)])
def test_the_workers_take_the_next_rank_that_vllm_knows(ranks: list[int], most: int) -> None:
    assert pooled_adapter.max_rank(ranks) == most


def test_a_rank_beyond_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 513: vLLM serves ranks up to 512"):
        pooled_adapter.max_rank([513])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda n: n.replace("model.model.", "model."), "it adapts layers.0."),
        (lambda n: n.replace(".layers.3.", ".layers.31."), "it adapts model.layers.31."),
        (lambda n: n.replace("self_attn.q_proj", "attn.c_attn"), "it adapts model.layers.0.attn."),
    ],
    ids=["prefix", "layer", "architecture"],
)
def test_weights_that_the_base_has_no_place_for_are_refused(
    base: Path, lora: Path, change: Callable[[str], str], what: str
) -> None:
    """vLLM would leave them out and answer as the base."""
    renamed(lora, change)
    said = complaint(base, lora)
    assert f"was made for another model: {what}" in said
    assert "which the base does not have" in said


def test_a_quantised_base_has_the_same_modules(
    base: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = Path(shutil.copytree(base, tmp_path / "quantised"))
    for file in quantised.glob("*.safetensors"):
        found = load_file(file)
        save_file({n.replace("_proj.weight", "_proj.qweight"): t for n, t in found.items()}, file)
    assert pooled_adapter.pooled(quantised, lora)


def test_what_vllm_cannot_apply_is_said_before_what_comes_of_it(base: Path, lora: Path) -> None:
    """PEFT saves a bias as another tensor, and replicated layers under numbers of their own."""
    renamed(lora, lambda name: name.replace("0.self_attn.q_proj.lora_B.weight", "9.lora_B.bias"))
    said = complaint(base, configured(lora, lora_bias=True, layer_replication=[[0, 4]]))
    assert "lora_bias is True" in said
    assert "layer_replication is [[0, 4]]" in said


def test_half_an_adapter_is_refused(base: Path, lora: Path) -> None:
    renamed(
        lora, lambda name: name.replace("0.self_attn.q_proj.lora_B", "0.self_attn.k_proj.lora_B")
    )
    assert "is damaged: it has " in complaint(base, lora)


@pytest.mark.parametrize("rank", [None, "4", 0])
def test_an_adapter_without_a_rank_is_refused(base: Path, lora: Path, rank: Any) -> None:
    assert f"has the rank (r) {rank!r}" in complaint(base, configured(lora, r=rank))


def test_what_is_no_adapter_of_this_base_is_refused(
    base: Path, tiny_home: Path, tmp_path: Path
) -> None:
    assert "is a full checkpoint, not an adapter" in complaint(base, base)
    other = tiny_home / "models" / "tiny-other-geometry"
    adapter = write_adapter(other, tmp_path / "other", targets=("k_proj",))
    assert "was made for another model" in complaint(base, adapter)
