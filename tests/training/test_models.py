"""Which bases can be trained on: any whose layers attend plainly, whatever else they do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefillshare_server.errors import ConfigError
from prefillshare_training import collator, models, objective
from prefillshare_training.samples import Sample
from prefillshare_training.settings import LoraSettings
from prefillshare_training.train import train
from tests.training.runs import QUIET, settings
from tests.training.test_objective import load, plain, require_same, step

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 16}
ALL_HEADS = {"num_key_value_heads": 4}
LINEAR = {f"linear_{each}_head_dim": 16 for each in ("key", "value")}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def build(folder: Path, kind: str, **options: Any) -> Path:
    """A tiny random checkpoint of another architecture."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {}),
        ("qwen3", HEADS),
        ("gemma", HEADS),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("granite", {"attention_multiplier": 0.3}),
    ],
)
def test_other_architectures_have_the_gradients_of_the_plain_loop(
    tmp_path: Path, samples: list[Sample], kind: str, options: dict[str, Any]
) -> None:
    pair = load(build(tmp_path, kind, **options), None)
    require_same(step(pair, [collator.collate([samples[:2], samples[2:]])]), plain(pair, samples))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # Its attention is not transformers' interface.
        ("stablelm", {}),
        # A layer without attention: it would see nothing of the prompt.
        ("qwen3_next", {**HEADS, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32}),
        # Its KV in serving is a latent that every model unfolds for itself.
        ("deepseek_v3", {"kv_lora_rank": 16, "first_k_dense_replace": 2, **ALL_HEADS}),
    ],
)
@pytest.mark.parametrize("lora", [None, LoraSettings(targets=("o_proj",))], ids=["full", "lora"])
def test_a_base_whose_kv_cannot_be_read_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], lora: LoraSettings | None
) -> None:
    base_dir = build(tmp_path, kind, **options)
    with pytest.raises(ConfigError, match=r"cannot read the KV of a base; .* Qwen3"):
        load(base_dir, lora)


def test_training_begins_with_the_bases_own_answers(
    base_dir: Path, tmp_path: Path, samples: list[Sample]
) -> None:
    pair = models.load(base_dir, settings(base_dir, tmp_path))
    batch = collator.collate([samples])
    kv = objective.base_kv(pair.base, batch)
    shared = objective.shared_logits(pair.decoder, batch, kv)
    assert torch.allclose(shared, objective.own_logits(pair.base, batch), atol=1e-5)


def test_a_generation_config_that_transformers_would_not_save_is_copied_as_it_is(
    base_dir: Path, tmp_path: Path
) -> None:
    """Public checkpoints have such: a temperature, and no sampling."""
    base = tmp_path / "base"
    shutil.copytree(base_dir, base)
    file = base / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.6}))
    run = settings(base, tmp_path)
    train(run, QUIET)
    assert (run.out / "generation_config.json").read_text() == file.read_text()


def test_an_adapter_on_a_tied_matrix_is_refused(tmp_path: Path) -> None:
    base_dir = build(tmp_path, "llama", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"of its own named lm_head"):
        load(base_dir, LoraSettings(targets=("lm_head",)))
