"""Tasks of lm-evaluation-harness run on the base's KV."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # What the harness imports warns of its own old habits.
    warnings.simplefilter("ignore")
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    from prefillshare_training.evaluate.lm_eval import PrefillShareLM

from prefillshare_training.samples import Turn
from tests.reference import base_cache_greedy, base_cache_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-3

QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " green", " loud"], "answer": 0},
    {"question": "Two and two", "choices": [" four", " five and a half", "!"], "answer": 1},
    {"question": "A cat says a word that is", "choices": [" meow", " x", " yes"], "answer": 2},
]


@pytest.fixture(scope="module")
def decoder_dir(tiny_home: Path) -> Path:
    return tiny_home / "models" / "tiny-a"


def model(base_dir: Path, decoder_dir: Path, mode: str) -> PrefillShareLM:
    return PrefillShareLM(str(base_dir), str(decoder_dir), mode=mode, batch_size=2)


@pytest.fixture(scope="module")
def shared(base_dir: Path, decoder_dir: Path) -> PrefillShareLM:
    return model(base_dir, decoder_dir, "shared")


def logliks(lm: PrefillShareLM, folder: Path) -> list[float]:
    """Every choice's log-likelihood, from a run of a local multiple-choice task."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=[task],
        # Its own thousands of tasks take long to list.
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    samples = sorted(found["samples"]["tiny_choice"], key=lambda sample: sample["doc_id"])
    assert 0 <= found["results"]["tiny_choice"]["acc,none"] <= 1
    return [resp[0][0] for sample in samples for resp in sample["resps"]]


def test_a_task_is_scored_on_the_base_s_kv(
    shared: PrefillShareLM, base_dir: Path, decoder_dir: Path, tmp_path: Path
) -> None:
    found = logliks(shared, tmp_path)
    encode = shared.tokenizer.encode
    pairs = [(row["question"], choice) for row in QUESTIONS for choice in row["choices"]]  # type: ignore[attr-defined]
    expected = [
        sum(base_cache_logprobs(base_dir, decoder_dir, encode(asked), encode(choice)))
        for asked, choice in pairs
    ]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    turns = [Turn(tuple(encode(asked)), tuple(encode(choice))) for asked, choice in pairs]
    ours = [sum(each) for each in shared.engine.logprobs(turns)]
    assert found == pytest.approx(ours, abs=TOLERANCE)
    own = logliks(model(base_dir, decoder_dir, "own"), tmp_path)
    assert max(abs(a - b) for a, b in zip(found, own, strict=True)) > 0.1


def test_answers_are_generated_on_the_base_s_kv(
    shared: PrefillShareLM, base_dir: Path, decoder_dir: Path
) -> None:
    contexts = ["A short one", "One that is quite a bit longer than the other two", "x"]
    arguments: list[Any] = [(text, {"until": ["\n"], "max_gen_toks": 12}) for text in contexts]
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=each, idx=index)
        for index, each in enumerate(arguments)
    ]
    found = shared.generate_until(requests, disable_tqdm=True)
    encode = shared.tokenizer.encode
    for text, said in zip(contexts, found, strict=True):
        ids = base_cache_greedy(
            base_dir, decoder_dir, encode(text), 12, stop_ids=[shared.eot_token_id]
        )
        assert said == shared.tok_decode(ids).split("\n")[0]


def test_generation_ends_with_a_stop_sequence(shared: PrefillShareLM) -> None:
    [whole] = _generate(shared, "Once upon a time", [])
    stop = whole[5:8]
    [cut] = _generate(shared, "Once upon a time", [stop])
    assert cut == whole[: whole.index(stop)]
    spent = shared.engine.generate(
        [shared.tokenizer.encode("Once upon a time")],
        max_tokens=30,
        until=lambda ids: shared._says_stop(ids, [stop]),
    )
    assert len(spent[0].ids) < 30


def test_generation_ends_with_every_id_that_ends_it_in_serving(
    base_dir: Path, decoder_dir: Path, tmp_path: Path
) -> None:
    """A checkpoint may name more of them than its tokenizer's end of sequence."""
    plain = model(base_dir, decoder_dir, "shared")
    [whole] = plain.engine.generate([plain.tokenizer.encode("Once upon")], max_tokens=30)
    stop = whole.ids[7]
    ending = Path(shutil.copytree(base_dir, tmp_path / "base"))
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    [said] = _generate(model(ending, decoder_dir, "shared"), "Once upon", [])
    upto = whole.ids[: whole.ids.index(stop) + 1]
    assert said == plain.tok_decode(list(upto))


def _generate(lm: PrefillShareLM, text: str, until: list[str]) -> list[str]:
    arguments: Any = (text, {"until": until, "max_gen_toks": 30})
    request = Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)
    said: list[str] = lm.generate_until([request], disable_tqdm=True)
    return said


def test_sampling_is_refused(shared: PrefillShareLM) -> None:
    arguments: Any = ("x", {"do_sample": True, "temperature": 0.8, "max_gen_toks": 4})
    request = Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)
    with pytest.raises(NotImplementedError, match="generation is greedy"):
        shared.generate_until([request], disable_tqdm=True)


def test_nothing_is_scored_by_the_decoder_alone(shared: PrefillShareLM) -> None:
    with pytest.raises(NotImplementedError, match="loglikelihood_rolling"):
        shared.loglikelihood_rolling([])
    with pytest.raises(NotImplementedError, match="decoder alone"):
        shared._model_call(None)


def test_the_harness_finds_it_by_name() -> None:
    assert get_model("prefillshare") is PrefillShareLM


def test_a_batch_size_that_is_to_be_found_out_is_refused(base_dir: Path) -> None:
    with pytest.raises(ValueError, match="batch_size must be a number, not 'auto'"):
        PrefillShareLM(str(base_dir), batch_size="auto")
