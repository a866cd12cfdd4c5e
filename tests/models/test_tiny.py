"""The tiny family: alike where it must be, and different where a test could not fail otherwise."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.reference import base_cache_logprobs

DECODERS = ["tiny-a", "tiny-b", "tiny-c"]
TEXT = (
    "<|im_start|>user\nWhat is the capital of France, and why?<|im_end|>\n<|im_start|>assistant\n"
)
ANSWER = list(b"It is Paris.")


@pytest.fixture(scope="module")
def prompt_ids(tiny_models: dict[str, Path]) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(tiny_models["tiny-base"]).encode(TEXT)
    return ids


@torch.inference_mode()
def own_logprobs(directory: Path, ids: list[int]) -> torch.Tensor:
    """Of the next token; shape [vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([ids])).logits
    return logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("decoder", DECODERS)
def test_base_and_decoders_disagree_clearly(
    tiny_models: dict[str, Path], prompt_ids: list[int], decoder: str
) -> None:
    base = own_logprobs(tiny_models["tiny-base"], prompt_ids)
    other = own_logprobs(tiny_models[decoder], prompt_ids)

    assert (base - other).abs().max() > 0.05


@pytest.mark.parametrize("decoder", DECODERS)
def test_whose_kv_a_decoder_reads_changes_its_answer(
    tiny_models: dict[str, Path], prompt_ids: list[int], decoder: str
) -> None:
    directory = tiny_models[decoder]

    on_base_kv = base_cache_logprobs(tiny_models["tiny-base"], directory, prompt_ids, ANSWER)
    on_own_kv = base_cache_logprobs(directory, directory, prompt_ids, ANSWER)

    differences = [abs(a - b) for a, b in zip(on_base_kv, on_own_kv, strict=True)]
    assert differences[0] > 0.02
    assert median(differences) > 0.02


def test_one_wrong_context_token_shows_in_the_answer(
    tiny_models: dict[str, Path], prompt_ids: list[int]
) -> None:
    base, decoder = tiny_models["tiny-base"], tiny_models["tiny-a"]
    wrong = [*prompt_ids]
    wrong[20] = (wrong[20] + 1) % 256

    right_answer = base_cache_logprobs(base, decoder, prompt_ids, ANSWER)
    wrong_answer = base_cache_logprobs(base, decoder, wrong, ANSWER)

    assert max(abs(a - b) for a, b in zip(right_answer, wrong_answer, strict=True)) > 0.02


@pytest.mark.parametrize("text", ["plain", "naïve 😀\n\t x", "<|im_start|>user\nHi<|im_end|>"])
def test_every_text_survives_the_tokenizer(tiny_models: dict[str, Path], text: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_models["tiny-base"])

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_byte_is_a_token(tiny_models: dict[str, Path]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_models["tiny-base"])

    assert len(tokenizer.encode("naïve")) == 6
    assert len(tokenizer.encode("<|im_end|>")) == 1


def test_decoders_end_a_turn_at_im_end(tiny_models: dict[str, Path]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_models["tiny-a"])
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_models["tiny-a"])

    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.max_position_embeddings == 4096
    assert model.dtype == torch.float32
