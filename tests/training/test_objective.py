"""One objective, however a batch is laid out; and it is the served computation.

Equal losses are not enough: a layer that silently drops the base's KV in its recomputed pass has
the right loss and the wrong gradient. So gradients are compared, parameter by parameter, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from prefillshare_training import collator, models, objective
from prefillshare_training.models import Models
from prefillshare_training.samples import Sample, Turn
from prefillshare_training.settings import LoraSettings, TrainSettings
from tests.training.conftest import Draw

LORA = LoraSettings(rank=4, alpha=8)


@dataclass(frozen=True)
class Step:
    """What one optimizer step would see."""

    loss: float
    gradients: dict[str, torch.Tensor]


def load(base_dir: Path, lora: LoraSettings | None, **options: Any) -> Models:
    """A base and a decoder that differs from it, as in the middle of a run."""
    settings = TrainSettings(base="tiny", data="-", out=Path("out"), lora=lora, **options)
    pair = models.load(base_dir, settings)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in pair.decoder.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise.to(parameter.dtype), alpha=0.02)
    return pair


@pytest.fixture(params=[None, LORA], ids=["full", "lora"])
def pair(base_dir: Path, request: pytest.FixtureRequest) -> Models:
    return load(base_dir, request.param)


def shared_loss(pair: Models, batch: collator.Batch) -> torch.Tensor:
    kv = objective.base_kv(pair.base, batch)
    return objective.summed_loss(objective.shared_logits(pair.decoder, batch, kv), batch)


def step(pair: Models, batches: Sequence[collator.Batch]) -> Step:
    """Loss and gradients summed over `batches`, as gradient accumulation does."""
    pair.decoder.zero_grad()
    pair.decoder.train()
    total = 0.0
    for batch in batches:
        loss = shared_loss(pair, batch)
        loss.backward()
        total += loss.item()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in pair.decoder.named_parameters()
        if parameter.grad is not None
    }
    return Step(total, gradients)


def plain(pair: Models, samples: Sequence[Sample]) -> Step:
    """The definition, turn by turn and one at a time: a Hugging Face cache of x_1 … x_{n-1},
    computed by the base, then the decoder from x_n on."""
    pair.decoder.zero_grad()
    pair.decoder.train()
    total = torch.zeros(())
    for turn in (turn for sample in samples for turn in sample.turns):
        cache = DynamicCache(config=pair.decoder.config)
        with torch.no_grad(), objective._without_adapter(pair.base):
            if turn.prompt_ids[:-1]:
                pair.base(torch.tensor([turn.prompt_ids[:-1]]), past_key_values=cache)
        fed = torch.tensor([[turn.prompt_ids[-1], *turn.completion_ids[:-1]]])
        start = len(turn.prompt_ids) - 1
        size = fed.shape[1]
        # sdpa takes no mask for "causal", and aligns it with the first key: wrong with a cache.
        mask = torch.ones(size, start + size, dtype=torch.bool).tril(start)
        logits = pair.decoder(
            fed,
            attention_mask=mask[None, None],
            position_ids=torch.arange(start, start + size)[None],
            past_key_values=cache,
        ).logits[0]
        targets = torch.tensor(turn.completion_ids)
        total = total - logits.log_softmax(-1)[range(size), targets].sum()
    total.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in pair.decoder.named_parameters()
        if parameter.grad is not None
    }
    return Step(total.item(), gradients)


def require_same(found: Step, wanted: Step) -> None:
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        scale = gradient.abs().max().item()
        assert scale > 0, f"{name} gets no gradient: nothing is compared"
        difference = (found.gradients[name] - gradient).abs().max().item()
        assert difference <= 2e-5 * scale, name


def layouts(samples: Sequence[Sample]) -> Iterator[tuple[str, list[collator.Batch]]]:
    """Every way to lay out `samples` in an optimizer step."""
    yield "one row each, accumulated", [collator.collate([[sample]]) for sample in samples]
    yield "padded rows", [collator.collate([[sample] for sample in samples])]
    yield "padded rows in another order", [collator.collate([[s] for s in reversed(samples)])]
    yield "packed into one row", [collator.collate([samples])]
    yield (
        "packed, padded and accumulated",
        [
            collator.collate([samples[:2], samples[2:3]]),
            collator.collate([samples[3:]]),
        ],
    )


def test_every_layout_has_the_loss_and_the_gradients_of_the_plain_loop(
    pair: Models, samples: list[Sample]
) -> None:
    wanted = plain(pair, samples)
    for _, batches in layouts(samples):
        require_same(step(pair, batches), wanted)


def test_gradient_checkpointing_changes_no_gradient(pair: Models, samples: list[Sample]) -> None:
    batches = [collator.collate([samples[:2], samples[2:]])]
    wanted = step(pair, batches)
    pair.decoder.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    found = step(pair, batches)
    assert found.loss == wanted.loss
    for name, gradient in wanted.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_without_the_bases_kv_the_loss_is_another(pair: Models, samples: list[Sample]) -> None:
    """What gradient checkpointing over a cache would train on; so that the tests above can fail."""
    batch = collator.collate([[samples[0]]])
    kv = objective.base_kv(pair.base, batch)
    assert kv is not None
    nothing = tuple((key * 0, value * 0) for key, value in kv)
    right = objective.summed_loss(objective.shared_logits(pair.decoder, batch, kv), batch)
    wrong = objective.summed_loss(objective.shared_logits(pair.decoder, batch, nothing), batch)
    assert abs(right.item() - wrong.item()) > 0.1


def test_base_kv_that_a_model_does_not_pass_on_is_an_error(
    pair: Models, samples: list[Sample]
) -> None:
    batch = collator.collate([[samples[0]]])
    with pytest.raises(RuntimeError, match=r"size of tensor|expanded size"):
        objective.shared_logits(pair.decoder, batch, None)


def test_base_kv_without_a_mask_is_an_error(pair: Models, samples: list[Sample]) -> None:
    batch = collator.collate([[samples[0]]])
    kv = objective.base_kv(pair.base, batch)
    with pytest.raises(ValueError, match="explicit attention mask"):
        pair.decoder(batch["decoder_input_ids"], base_kv=kv)


def test_the_base_gets_no_gradient_and_never_changes(pair: Models, samples: list[Sample]) -> None:
    frozen = {
        name: parameter.clone()
        for name, parameter in pair.base.named_parameters()
        if not (pair.base is pair.decoder and parameter.requires_grad)
    }
    optimizer = torch.optim.AdamW(
        [p for p in pair.decoder.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1
    )
    found = step(pair, [collator.collate([samples])])
    optimizer.step()
    assert not frozen.keys() & found.gradients.keys() or pair.base is not pair.decoder
    for name, before in frozen.items():
        parameter = pair.base.get_parameter(name)
        assert parameter.grad is None, name
        assert torch.equal(parameter, before), name


def test_with_lora_the_base_is_the_same_weights_with_the_adapter_off(
    base_dir: Path, samples: list[Sample]
) -> None:
    pair = load(base_dir, LORA)
    assert pair.base is pair.decoder
    pair.decoder.train()
    batch = collator.collate([samples])
    adapted = objective.base_kv(pair.base, batch)
    untouched = objective.base_kv(
        load(base_dir, None, method="prefillshare").base, collator.collate([samples])
    )
    assert adapted is not None
    assert untouched is not None
    for ours, theirs in zip(adapted, untouched, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert pair.decoder.training, "the base pass left dropout off"


def test_lora_equals_pefts_activated_lora_with_the_split_at_the_last_prompt_token(
    base_dir: Path, draw: Draw
) -> None:
    """The same objective by others, in one forward pass (activated LoRA, arXiv 2504.12397)."""
    pair = load(base_dir, LORA)
    turn = Turn(draw(14), draw(6))
    wanted = step(pair, [collator.collate([[Sample((turn,))]])])

    import peft

    plain_model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    activated = peft.get_peft_model(
        plain_model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=LORA.rank,
            lora_alpha=LORA.alpha,
            target_modules=list(LORA.targets),
            alora_invocation_tokens=[0],
        ),
    )
    adapter = {
        name: parameter
        for name, parameter in pair.decoder.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in activated.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(adapter[name])
    sequence = turn.prompt_ids + turn.completion_ids
    # Counted from the end: the adapter is on for the last prompt token and what follows it.
    logits = activated(
        torch.tensor([sequence]), alora_offsets=[len(turn.completion_ids) + 1]
    ).logits[0, len(turn.prompt_ids) - 1 : -1]
    targets = torch.tensor(turn.completion_ids)
    loss = -logits.log_softmax(-1)[range(len(targets)), targets].sum()
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in activated.named_parameters()
        if parameter.grad is not None
    }
    require_same(Step(loss.item(), gradients), wanted)


def test_a_decoder_that_is_the_base_is_trained_as_usual(
    base_dir: Path, samples: list[Sample]
) -> None:
    """With equal weights the two objectives are one: ordinary completion-only fine-tuning."""
    settings = TrainSettings(base="tiny", data="-", out=Path("out"))
    pair = models.load(base_dir, settings)
    batch = collator.collate([samples[:2], samples[2:]])
    ordinary = objective.summed_loss(objective.own_logits(pair.decoder, batch), batch)
    assert shared_loss(pair, batch).item() == pytest.approx(ordinary.item(), rel=1e-6)

    reference = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    total = 0.0
    for turn in (turn for sample in samples for turn in sample.turns):
        sequence = torch.tensor([turn.prompt_ids + turn.completion_ids])
        labels = sequence.clone()
        labels[:, : len(turn.prompt_ids)] = -100
        total += reference(sequence, labels=labels).loss.item() * len(turn.completion_ids)
    assert ordinary.item() == pytest.approx(total, rel=1e-6)


def test_bfloat16_follows_float32(base_dir: Path, samples: list[Sample]) -> None:
    """Autocast, as the Trainer computes with bf16: the base in bfloat16, its KV too."""
    exact = step(load(base_dir, None), [collator.collate([samples])])
    half = load(base_dir, None, bf16=True)
    assert half.base.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = step(half, [collator.collate([samples])])
        packed = step(half, [collator.collate([[sample]]) for sample in samples])
    assert rounded.loss == pytest.approx(exact.loss, rel=0.02)
    for name, gradient in exact.gradients.items():
        for found in (rounded, packed):
            cosine = torch.cosine_similarity(
                found.gradients[name].flatten().float(), gradient.flatten(), dim=0
            )
            assert cosine > 0.98, name
