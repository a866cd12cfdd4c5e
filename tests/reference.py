"""In-process reference for what a PrefillShare cluster must answer.

The base computes the KV of prompt tokens x_1..x_{n-1}; the decoder then processes x_n and every
generated token on top of that cache. A decoder is a
full model or a LoRA adapter. Nothing here knows vLLM: plain Hugging Face and PEFT models in fp32.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from openai.types.chat import ChatCompletion
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM


@lru_cache(maxsize=8)
def _model(directory: Path) -> Any:
    if (directory / "adapter_config.json").is_file():
        return AutoPeftModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _base_cache(base_dir: Path, prompt_ids: Sequence[int]) -> Any:
    """KV cache of every prompt token but the last, computed by the base (None for one token)."""
    if len(prompt_ids) == 1:
        return None
    context = torch.tensor([list(prompt_ids[:-1])])
    return _model(base_dir)(context, use_cache=True).past_key_values


@torch.inference_mode()
def base_cache_logprobs(
    base_dir: Path, decoder_dir: Path, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> list[float]:
    """Log-probability of each output token, teacher-forced: shape [len(output_ids)]."""
    logits = _teacher_forced(base_dir, decoder_dir, prompt_ids, output_ids)
    chosen = torch.tensor(list(output_ids)).unsqueeze(1)
    logprobs = logits.log_softmax(dim=-1).gather(1, chosen).squeeze(1)
    return [float(value) for value in logprobs]


@torch.inference_mode()
def base_cache_gaps(
    base_dir: Path,
    decoder_dir: Path,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    allowed: Sequence[Sequence[bool]] | None = None,
) -> list[float]:
    """How far the log-probability of each output token is below the highest: 0 is greedy.

    `allowed` is shaped [len(output_ids), vocabulary]: what a grammar left to choose from.
    """
    logits = _teacher_forced(base_dir, decoder_dir, prompt_ids, output_ids)
    if allowed is not None:
        logits = logits.masked_fill(~torch.tensor(allowed), -torch.inf)
    chosen = torch.tensor(list(output_ids)).unsqueeze(1)
    gaps = logits.max(dim=-1).values - logits.gather(1, chosen).squeeze(1)
    return [float(gap) for gap in gaps]


def _teacher_forced(
    base_dir: Path, decoder_dir: Path, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> torch.Tensor:
    """Logits for each output token, in one forward pass."""
    cache = _base_cache(base_dir, prompt_ids)
    inputs = torch.tensor([[prompt_ids[-1], *output_ids[:-1]]])
    logits: torch.Tensor = _model(decoder_dir)(inputs, past_key_values=cache).logits[0]
    return logits


@torch.inference_mode()
def base_cache_greedy(
    base_dir: Path,
    decoder_dir: Path,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    stop_ids: Sequence[int] = (),
) -> list[int]:
    """Greedy continuation; a stop id ends it and is part of the result."""
    cache = _base_cache(base_dir, prompt_ids)
    output: list[int] = []
    token = prompt_ids[-1]
    while len(output) < max_tokens:
        step = _model(decoder_dir)(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache, token = step.past_key_values, int(step.logits[0, -1].argmax())
        output.append(token)
        if token in stop_ids:
            break
    return output


def chat_deviation(
    answer: ChatCompletion, base_dir: Path, decoder_dir: Path, *, tokens: int
) -> float:
    """Largest |served − reference| logprob over the answer's tokens; there must be `tokens`."""
    [choice] = answer.choices
    assert answer.model_extra is not None
    assert choice.model_extra is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    served = [token.logprob for token in choice.logprobs.content]
    prompt, output = answer.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    reference = base_cache_logprobs(base_dir, decoder_dir, prompt, output)
    assert len(served) == len(reference) == tokens
    return max(abs(a - float(b)) for a, b in zip(served, reference, strict=True))
