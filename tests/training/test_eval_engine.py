"""The in-process engine: base KV only, whatever is batched together."""

import random
from pathlib import Path

import pytest
import torch

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import adapter
from prefillshare_training.evaluate.engine import Answer, Engine
from prefillshare_training.evaluate.modes import Mode, Ratio
from prefillshare_training.samples import Turn
from tests.reference import base_cache_greedy, base_cache_logprobs

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def base(tiny_home: Path) -> Path:
    return tiny_home / "models" / "tiny-base"


@pytest.fixture(scope="module")
def decoder(tiny_home: Path) -> Path:
    return tiny_home / "models" / "tiny-a"


def prompts(lengths: list[int]) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


LENGTHS = [1, 40, 3, 17, 2, 64, 1, 30, 9, 120]


def engine(base: Path, decoder: Path | None, mode: Mode, batch_size: int = 4) -> Engine:
    return Engine(base, decoder, mode=mode, batch_size=batch_size)


def answers(base: Path, decoder: Path | None, mode: Mode, batch_size: int = 4) -> list[list[int]]:
    found = engine(base, decoder, mode, batch_size).generate(
        prompts(LENGTHS), max_tokens=24, stop_ids=STOPS
    )
    return [list(answer.ids) for answer in found]


# Some of what the tiny models say, so that rows of a batch end at different times.
STOPS = tuple(range(60, 80))


def test_shared_is_the_reference(base: Path, decoder: Path) -> None:
    expected = [
        base_cache_greedy(base, decoder, prompt, 24, stop_ids=STOPS) for prompt in prompts(LENGTHS)
    ]
    assert answers(base, decoder, "shared") == expected
    lengths = {len(answer) for answer in expected}
    assert len(lengths) > 3, "the answers should end at different times"


def test_own_is_ordinary_generation(base: Path, decoder: Path) -> None:
    expected = [
        base_cache_greedy(decoder, decoder, prompt, 24, stop_ids=STOPS)
        for prompt in prompts(LENGTHS)
    ]
    assert answers(base, decoder, "own") == expected
    assert expected != answers(base, decoder, "shared"), "the base's KV should change answers"


@pytest.mark.parametrize(
    "mode",
    ["own", "shared", Ratio(0.3), Ratio(0.5, "layer")],
    ids=["own", "shared", "prefix", "layer"],
)
def test_a_batch_changes_no_row(base: Path, decoder: Path, mode: Mode) -> None:
    one_by_one = answers(base, decoder, mode, batch_size=1)
    assert answers(base, decoder, mode, batch_size=3) == one_by_one
    assert answers(base, decoder, mode, batch_size=16) == one_by_one


@pytest.mark.parametrize("by", ["prefix", "layer"])
def test_the_ends_of_the_ratio_are_own_and_shared(base: Path, decoder: Path, by: str) -> None:
    all_ratio, no_ratio = Ratio(1.0, by), Ratio(0.0, by)  # type: ignore[arg-type]
    assert answers(base, decoder, all_ratio) == answers(base, decoder, "shared")
    assert answers(base, decoder, no_ratio) == answers(base, decoder, "own")


def test_ratio_by_prefix_prefills_the_rest_on_the_base_s_part(base: Path, decoder: Path) -> None:
    """The definition, written out for one row with nothing but the models."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(each).eval() for each in (base, decoder)]
    [prompt] = prompts([40])
    with torch.inference_mode():
        cache = models[0](torch.tensor([prompt[:19]]), use_cache=True).past_key_values
        logits = models[1](torch.tensor([prompt[19:]]), past_key_values=cache).logits[0, -1]
    first = engine(base, decoder, Ratio(0.5)).generate([prompt], max_tokens=1)[0]
    assert first.ids == (int(logits.argmax()),)
    assert first.logprobs[0] == pytest.approx(float(logits.log_softmax(0).max()), abs=TOLERANCE)


def test_ratio_by_layer_takes_the_first_layers_from_the_base(base: Path, decoder: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    models = [AutoModelForCausalLM.from_pretrained(each).eval() for each in (base, decoder)]
    [prompt] = prompts([40])
    context = torch.tensor([prompt[:-1]])
    with torch.inference_mode():
        caches = [model(context, use_cache=True).past_key_values for model in models]
        mixed = DynamicCache()
        for layer in range(4):
            source = caches[0 if layer < 1 else 1].layers[layer]
            mixed.update(source.keys, source.values, layer)
        logits = models[1](torch.tensor([prompt[-1:]]), past_key_values=mixed).logits[0, -1]
    first = engine(base, decoder, Ratio(0.3, "layer")).generate([prompt], max_tokens=1)[0]
    assert first.ids == (int(logits.argmax()),)
    assert first.logprobs[0] == pytest.approx(float(logits.log_softmax(0).max()), abs=TOLERANCE)


def test_generated_logprobs_are_the_reference_s(base: Path, decoder: Path) -> None:
    given = prompts([50, 1, 5])
    for prompt, answer in zip(
        given, engine(base, decoder, "shared").generate(given, max_tokens=8), strict=True
    ):
        expected = base_cache_logprobs(base, decoder, prompt, answer.ids)
        assert list(answer.logprobs) == pytest.approx(expected, abs=TOLERANCE)
        assert answer.finish == "length"


def test_teacher_forced_logprobs_are_the_reference_s(base: Path, decoder: Path) -> None:
    turns = [
        Turn(tuple(prompt), tuple(completion))
        for prompt, completion in zip(prompts(LENGTHS), prompts([5, 1, 9, 30, 2] * 2), strict=True)
    ]
    found = engine(base, decoder, "shared", batch_size=3).logprobs(turns)
    for turn, logprobs in zip(turns, found, strict=True):
        expected = base_cache_logprobs(base, decoder, turn.prompt_ids, turn.completion_ids)
        assert logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_score_knows_greedy_completions(base: Path, decoder: Path) -> None:
    shared = engine(base, decoder, "shared")
    [prompt] = prompts([20])
    said = shared.generate([prompt], max_tokens=6)[0].ids
    other = (*said[:-1], (said[-1] + 1) % 256)
    scores = shared.score([Turn(tuple(prompt), said), Turn(tuple(prompt), other)])
    assert [score.greedy for score in scores] == [True, False]


def test_no_decoder_means_the_base_itself(base: Path) -> None:
    expected = [
        base_cache_greedy(base, base, prompt, 24, stop_ids=STOPS) for prompt in prompts(LENGTHS)
    ]
    assert answers(base, None, "shared") == answers(base, None, "own") == expected


def test_answers_are_reported_as_they_are_complete(base: Path, decoder: Path) -> None:
    seen: dict[int, Answer] = {}
    found = engine(base, decoder, "shared").generate(
        prompts(LENGTHS), max_tokens=24, stop_ids=STOPS, progress=seen.__setitem__
    )
    assert [seen[number] for number in range(len(LENGTHS))] == found
    assert list(seen) != list(range(len(LENGTHS)))


def test_half_precision_rows_with_padding_have_no_nan(base: Path, decoder: Path) -> None:
    models = engine(base, decoder, "shared").models
    models.base.to(torch.bfloat16)
    models.decoder.to(torch.bfloat16)
    found = Engine.on(models, mode=Ratio(0.5), batch_size=8).generate(
        prompts(LENGTHS), max_tokens=12
    )
    assert all(value <= 0 for answer in found for value in answer.logprobs)
    assert len({answer.ids for answer in found}) > 3


def test_a_memory_limit_makes_batches_smaller(
    base: Path, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(base, decoder, "shared")
    shared = engine(base, decoder, "shared", batch_size=16)
    monkeypatch.setattr(
        "prefillshare_training.evaluate.engine.KV_BYTES", shared.models.kv_token_bytes * 2 * 200
    )
    monkeypatch.setattr("prefillshare_training.evaluate.kv.PREFILL_TOKENS", 64)
    widest = []
    step = shared.models.decoder.forward

    def watched(*args, **kwargs):  # type: ignore[no-untyped-def]
        widest.append(kwargs["attention_mask"].numel())
        return step(*args, **kwargs)

    monkeypatch.setattr(shared.models.decoder, "forward", watched)
    found = shared.generate(prompts(LENGTHS), max_tokens=24, stop_ids=STOPS)
    assert [list(answer.ids) for answer in found] == expected
    assert max(widest) <= 200


def test_an_answer_ends_where_the_context_ends(base: Path, decoder: Path) -> None:
    shared = engine(base, decoder, "shared")
    shared.models.decoder.config.max_position_embeddings = 50
    [answer] = shared.generate(prompts([45]), max_tokens=24)
    assert (len(answer.ids), answer.finish) == (5, "length")
    with pytest.raises(ValueError, match=r"prompt 1 needs room for 51 tokens.* is 50"):
        shared.generate(prompts([4, 50]), max_tokens=24)


def test_an_empty_prompt_is_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine(base, None, "shared").generate([[1], []], max_tokens=1)


def test_a_decoder_of_another_shape_is_refused(base: Path, tiny_home: Path) -> None:
    other = tiny_home / "models" / "tiny-other-geometry"
    with pytest.raises(ConfigError, match=r"num_kv_heads 4 \(base 2\)"):
        engine(base, other, "shared")


def test_an_adapter_decodes_as_the_server_merges_it(
    base: Path, decoder: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What merging makes of it is tested in tests/models; here any checkpoint stands for that."""
    asked: list[tuple[Path, Path]] = []

    def merged(base_dir: Path, adapter_dir: Path, progress: object = None) -> Path:
        asked.append((base_dir, adapter_dir))
        return decoder

    monkeypatch.setattr(adapter, "merged", merged)
    assert answers(base, tiny_adapter, "shared") == answers(base, decoder, "shared")
    assert asked == [(base, tiny_adapter)]


def test_without_the_base_nothing_is_shared(base: Path, decoder: Path) -> None:
    own = engine(base, decoder, "own")
    assert own.models.base is None
    with pytest.raises(ValueError, match="needs the base"):
        Engine.on(own.models, mode="shared")
