"""Weight files read without torch: what is in them, and when two checkpoints are one."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import weights

FILE = "model.safetensors"


@pytest.fixture
def copy(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of tiny-base that a test may change."""
    return Path(shutil.copytree(tiny_models["tiny-base"], tmp_path / "copy"))


def test_the_header_says_what_torch_reads(copy: Path) -> None:
    found = weights.tensors(copy / FILE)

    expected = {name: tuple(value.shape) for name, value in load_file(copy / FILE).items()}
    assert {name: tensor.shape for name, tensor in found.items()} == expected
    assert {tensor.dtype for tensor in found.values()} == {"F32"}


def test_a_copy_has_the_same_digest_and_is_identical(
    tiny_models: dict[str, Path], copy: Path
) -> None:
    assert weights.digest(copy) == weights.digest(tiny_models["tiny-base"])
    assert weights.identical(copy, tiny_models["tiny-base"])


def test_one_trained_matrix_changes_the_digest(tiny_models: dict[str, Path], copy: Path) -> None:
    tensors = load_file(copy / FILE)
    tensors["model.layers.2.self_attn.q_proj.weight"] *= 1.01
    save_file(tensors, copy / FILE, metadata={"format": "pt"})

    assert weights.digest(copy) != weights.digest(tiny_models["tiny-base"])


def test_one_changed_number_is_not_identical(tiny_models: dict[str, Path], copy: Path) -> None:
    # The last number of a matrix: the digest reads from its middle.
    tensors = load_file(copy / FILE)
    tensors["model.layers.2.mlp.up_proj.weight"][-1, -1] += 1
    save_file(tensors, copy / FILE, metadata={"format": "pt"})

    assert weights.digest(copy) == weights.digest(tiny_models["tiny-base"])
    assert not weights.identical(copy, tiny_models["tiny-base"])


def test_no_weights_are_identical_to_nothing(tmp_path: Path) -> None:
    assert not weights.identical(tmp_path, tmp_path)


def test_weights_in_torchs_own_format_are_told_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, value in ((one, 1.0), (other, 2.0)):
        folder.mkdir()
        torch.save({"a": torch.full((64, 64), value)}, folder / "pytorch_model.bin")

    assert weights.digest(one) != weights.digest(other)
    assert not weights.identical(one, other)


@pytest.mark.parametrize("size", [0, 4, 100, 10_000])
def test_a_file_that_was_cut_off_is_damaged(copy: Path, size: int) -> None:
    with (copy / FILE).open("r+b") as file:
        file.truncate(size)

    with pytest.raises(ConfigError, match=r"model\.safetensors: is damaged or no safetensors file"):
        weights.digest(copy)
