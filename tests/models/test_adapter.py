"""LoRA adapters become full checkpoints of the base: once, whole, and saying the same."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import adapter, checkpoint, child
from prefillshare_server.models.geometry import Geometry, differences

PROBE = torch.tensor([[11, 72, 101, 108, 108, 111, 44, 32, 119]])

Usage = namedtuple("Usage", "total used free")


class Merge(NamedTuple):
    """A merged checkpoint, and the steps that were shown while it was made."""

    directory: Path
    steps: list[str]


@pytest.fixture(scope="module")
def store_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(store_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(store_home))


@pytest.fixture(scope="module")
def merge(tiny_models: dict[str, Path], tiny_adapter: Path, store_home: Path) -> Merge:
    """The adapter merged into tiny-base, once for the tests of this file."""
    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFILLSHARE_HOME", str(store_home))
        return Merge(adapter.merged(tiny_models["tiny-base"], tiny_adapter, steps.append), steps)


@pytest.fixture
def base(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["tiny-base"]


@pytest.fixture
def lora(tiny_adapter: Path, tmp_path: Path) -> Path:
    """A copy of the adapter that a test may change."""
    return Path(shutil.copytree(tiny_adapter, tmp_path / "lora"))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(PROBE).logits
    return found


def train_further(lora: Path) -> None:
    file = lora / "adapter_model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)


def no_merge(*_: Any) -> subprocess.CompletedProcess[str]:
    raise AssertionError("nothing is to be merged")


def complaint(base: Path, directory: Path) -> str:
    """What is said of an adapter that cannot be merged; nothing of it may be left."""
    before = checkpoints()
    with pytest.raises(ConfigError) as caught:
        adapter.merged(base, directory)
    assert checkpoints() == before
    return str(caught.value)


def checkpoints() -> set[str]:
    folder = adapter.home()
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if not name.endswith(".lock")}


def test_the_merged_checkpoint_says_what_the_adapted_base_says(
    base: Path, lora: Path, merge: Merge
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, lora))
    found = logits(AutoModelForCausalLM.from_pretrained(merge.directory, dtype=torch.float32))
    assert (found - expected).abs().max() < 1e-5
    assert (expected - before).abs().max() > 0.1


def test_all_but_the_weights_is_the_bases_own(base: Path, merge: Merge) -> None:
    merged = merge.directory
    names = {path.name for path in base.iterdir()} - {"prefillshare-model.json"}
    assert {path.name for path in merged.iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (merged / name).read_bytes() == (base / name).read_bytes()
    assert differences(Geometry.of(base), Geometry.of(merged)) == []


def test_weights_are_saved_in_the_bases_type(base: Path, lora: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(half)

    merged = adapter.merged(half, lora)

    assert checkpoint.dtype(merged) == "bfloat16"
    tensors = load_file(merged / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    # Rounded once, after the sum.
    name = "model.layers.0.self_attn.q_proj"
    parts = load_file(lora / "adapter_model.safetensors")
    a, b = (parts[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    whole = load_file(half / "model.safetensors")[f"{name}.weight"].float() + 2 * b @ a
    assert torch.equal(tensors[f"{name}.weight"], whole.to(torch.bfloat16))


def test_a_merged_adapter_is_found_again(
    base: Path, lora: Path, tiny_adapter: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "run", no_merge)

    # By what is in it, not by where it lies.
    assert adapter.merged(base, tiny_adapter, merge.steps.append) == merge.directory
    assert adapter.merged(base, lora, merge.steps.append) == merge.directory
    assert merge.steps == [f"merge {tiny_adapter} into {base}"]


def test_a_retrained_adapter_is_merged_again(
    base: Path, lora: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_further(lora)
    monkeypatch.setattr(child, "run", no_merge)

    with pytest.raises(AssertionError, match="nothing is to be merged"):
        adapter.merged(base, lora)


def test_the_record_of_the_training_goes_along(
    base: Path, lora: Path, tiny_adapter: Path, merge: Merge
) -> None:
    record = merge.directory / "prefillshare.json"
    (lora / "prefillshare.json").write_text('{"evaluation": []}')

    adapter.merged(base, lora)
    assert record.read_text() == '{"evaluation": []}'

    adapter.merged(base, tiny_adapter)
    assert not record.exists()


def test_of_two_processes_one_merges_and_the_other_waits(
    base: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tmp_path / "home"))
    code = (
        "import sys; from pathlib import Path; from prefillshare_server.models import adapter; "
        "adapter.merged(Path(sys.argv[1]), Path(sys.argv[2]), print)"
    )
    command = [sys.executable, "-c", code, str(base), str(lora)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    outputs = [process.communicate(timeout=200)[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert sum(f"merge {lora}" in output for output in outputs) == 1


def remove_config(lora: Path) -> None:
    (lora / "adapter_config.json").unlink()


def remove_weights(lora: Path) -> None:
    (lora / "adapter_model.safetensors").unlink()


def cut_off(lora: Path) -> None:
    with (lora / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(3000)


def be_a_prompt(lora: Path) -> None:
    configure(lora, peft_type="PREFIX_TUNING")


def be_activated(lora: Path) -> None:
    configure(lora, alora_invocation_tokens=[1, 2])


def break_config(lora: Path) -> None:
    (lora / "adapter_config.json").write_text("{")


def configure(lora: Path, **values: Any) -> None:
    file = lora / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (remove_config, "has no adapter_config.json; point to the folder that peft saved"),
        (remove_weights, "has no adapter_model.safetensors; copy it there, or train it again"),
        (cut_off, "adapter_model.safetensors: is damaged or no safetensors file"),
        (break_config, "adapter_config.json: cannot be read"),
        (be_a_prompt, "is an adapter of type PREFIX_TUNING, not LORA"),
        (be_activated, "is an activated LoRA"),
    ],
)
def test_what_is_no_whole_lora_is_refused_before_anything_is_loaded(
    base: Path,
    lora: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    what: str,
) -> None:
    monkeypatch.setattr(child, "run", no_merge)
    damage(lora)

    assert what in complaint(base, lora)


def test_an_adapter_of_another_shape_is_refused_before_anything_is_loaded(
    base: Path, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "run", no_merge)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    file = lora / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(4, 64)}, file)

    line = complaint(base, lora)

    assert "was made for another model: model.layers.1.self_attn.q_proj is 128 x 64" in line
    assert "the base's 128 x 128" in line


def test_an_adapter_of_a_deeper_model_is_refused(base: Path, lora: Path) -> None:
    file = lora / "adapter_model.safetensors"
    tensors = load_file(file)
    deeper = {
        name.replace("layers.3.", "layers.9."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.3." in name
    }
    save_file({**tensors, **deeper}, file)

    line = complaint(base, lora)

    assert "cannot be merged into" in line
    assert "model.layers.9.mlp.down_proj.lora_A.weight is only in the adapter" in line


def test_an_adapter_of_tied_embeddings_is_refused(base: Path, lora: Path, tmp_path: Path) -> None:
    tied = Path(shutil.copytree(base, tmp_path / "tied"))
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    file, name = lora / "adapter_model.safetensors", "base_model.model.lm_head"
    parts = {
        f"{name}.lora_A.weight": torch.ones(4, 128),
        f"{name}.lora_B.weight": torch.ones(259, 4),
    }
    save_file({**load_file(file), **parts}, file)

    assert "it adapts lm_head, which is tied to the other end" in complaint(tied, lora)


def test_numbers_that_are_none_are_refused(base: Path, lora: Path) -> None:
    file = lora / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)

    assert "NaNs detected" in complaint(base, lora)


def test_a_disk_that_is_known_to_be_too_small_is_named(
    base: Path, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_further(lora)
    monkeypatch.setattr(child, "run", no_merge)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 30, 1 << 30, 1 << 20))

    line = complaint(base, lora)

    assert "the disk is full (2 MiB needed, 1 MiB free)" in line
    assert "set PREFILLSHARE_HOME" in line


def test_a_disk_that_fills_up_is_named(
    base: Path, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "model.safetensors").write_bytes(b"half")
        reason = f'I/O error: Os {{ code: 28, message: "{os.strerror(errno.ENOSPC)}" }}'
        return subprocess.CompletedProcess(command, 1, "", reason)

    train_further(lora)
    monkeypatch.setattr(child, "run", fill)

    assert "the disk is full; free some space" in complaint(base, lora)
