"""The gate: training, evaluation in this process and a running server compute the same thing."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from prefillshare_server.config import Cluster, LayoutSettings
from prefillshare_server.models import store
from prefillshare_training import attention, collator, objective
from prefillshare_training.data import Renderer
from prefillshare_training.evaluate.engine import Engine
from prefillshare_training.evaluate.served import Served
from prefillshare_training.models import Models
from prefillshare_training.samples import Sample, Turn
from prefillshare_training.train import train
from tests.served import serve_in_thread
from tests.training.runs import LORA, settings

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

TOLERANCE = 1e-3
MAX_TOKENS = 24
LENGTHS = (1, 2, 5, 17, 31, 32, 33, 48, 63, 64, 65, 90, 96, 97, 128, 129, 150, 200, 256, 300)

CLUSTER = """\
version: 1
base: {model: tiny-base}
roles:
  solver: {model: tiny-a}
  full: {model: ./full}
  lora: {adapter: ./lora}
dtype: float32
max_model_len: 1024
kv: {blocks: 256}
timeouts: {start_s: 240}
allow_untrained: true
"""


class Running(NamedTuple):
    """A served cluster and the folder with its trained decoders."""

    url: str
    folder: Path

    def decoder(self, role: str) -> Path:
        """What `prefillshare train` wrote for the role."""
        return self.folder / role


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cluster")
    base = store.resolve("tiny-base")
    for role, lora in (("full", None), ("lora", LORA)):
        run = settings(base, folder, out=folder / role, lora=lora, learning_rate=1e-2)
        train(run, Console(quiet=True))
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER)
    with serve_in_thread(Cluster.load(path), log_dir=folder / "logs") as served:
        yield Running(served.url, folder)


@pytest.fixture(scope="module")
def url(running: Running) -> str:
    return running.url


def test_a_server_and_this_process_say_the_same(url: str) -> None:
    draw = random.Random(11)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]
    base, decoder = store.resolve("tiny-base"), store.resolve("tiny-a")
    # Ids that the model says now and then, beside the end of its turn.
    stop_ids = {258, *range(60, 80)}
    shared = Engine(base, decoder, mode="shared", dtype="float32", batch_size=7)
    ours = shared.generate(prompts, max_tokens=MAX_TOKENS, stop_ids=stop_ids)
    theirs = Served(url, "solver", concurrency=4).generate(
        prompts, max_tokens=MAX_TOKENS, stop_ids=stop_ids
    )
    assert [answer.ids for answer in theirs] == [answer.ids for answer in ours]
    assert [answer.finish for answer in theirs] == [answer.finish for answer in ours]
    assert {answer.finish for answer in ours} == {"stop", "length"}
    for one, other in zip(ours, theirs, strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=TOLERANCE)
    own = Engine(base, decoder, mode="own", dtype="float32").generate(
        prompts, max_tokens=MAX_TOKENS, stop_ids=stop_ids
    )
    assert [answer.ids for answer in own] != [answer.ids for answer in ours]


def training_logprobs(decoder_dir: Path, turns: list[Turn]) -> list[list[float]]:
    """Of every completion token, by the very forward passes of training, adapter unmerged."""
    base = AutoModelForCausalLM.from_pretrained(store.resolve("tiny-base"), dtype=torch.float32)
    if (decoder_dir / "adapter_config.json").is_file():
        decoder = PeftModel.from_pretrained(base, decoder_dir)
        pair = Models(decoder, decoder)
    else:
        decoder = AutoModelForCausalLM.from_pretrained(decoder_dir, dtype=torch.float32)
        attention.use(base)
        pair = Models(decoder, base)
    attention.use(decoder.get_base_model() if isinstance(decoder, PeftModel) else decoder)
    # Packed into one row, to be the hardest case.
    batch = collator.collate([[Sample((turn,)) for turn in turns]])
    with torch.no_grad():
        kv = objective.base_kv(pair.base, batch)
        logits = objective.shared_logits(pair.decoder, batch, kv)[0].log_softmax(-1)
    chosen = logits.gather(1, batch["labels"][0].unsqueeze(1)).squeeze(1)
    lengths = [len(turn.completion_ids) for turn in turns]
    return [part.tolist() for part in chosen.split(lengths)]


@pytest.mark.parametrize("role", ["full", "lora"])
def test_a_trained_decoder_is_served_as_it_was_trained(running: Running, role: str) -> None:
    base, decoder = store.resolve("tiny-base"), running.decoder(role)
    renderer = Renderer.for_base(base, LayoutSettings())
    questions = ["abc", "hgfedcba", "aa", "gfhdah bcd" * 4]
    system = {"role": "system", "content": "Write it backwards."}
    conversations = [[system, {"role": "user", "content": each}] for each in questions]
    prompts = [renderer.prompt(messages) for messages in conversations]
    answers = Served(running.url, role, concurrency=2).generate(
        prompts, max_tokens=MAX_TOKENS, stop_ids=renderer.stop_ids
    )
    turns = [
        Turn(tuple(prompt), answer.ids) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    engine = Engine(base, decoder, mode="shared", dtype="float32")
    evaluated = engine.generate(prompts, max_tokens=MAX_TOKENS, stop_ids=renderer.stop_ids)
    assert [each.ids for each in evaluated] == [answer.ids for answer in answers]
    for answer, trained, scored in zip(
        answers, training_logprobs(decoder, turns), engine.logprobs(turns), strict=True
    ):
        assert answer.logprobs == pytest.approx(trained, abs=TOLERANCE)
        assert scored == pytest.approx(trained, abs=TOLERANCE)
    untrained = Engine(base, None, mode="shared", dtype="float32").logprobs(turns)
    moved = [
        abs(a - b)
        for one, other in zip(untrained, engine.logprobs(turns), strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert max(moved) > 10 * TOLERANCE, "training changed nothing: nothing is compared"


@pytest.mark.parametrize("role", ["full", "lora"])
def test_messages_are_rendered_in_serving_as_in_training(running: Running, role: str) -> None:
    base = store.resolve("tiny-base")
    renderer = Renderer.for_base(base, LayoutSettings())
    messages = [
        {"role": "system", "content": "Write it backwards."},
        {"role": "user", "content": "defg"},
    ]
    engine = Engine(base, running.decoder(role), mode="shared", dtype="float32")
    [wanted] = engine.generate(
        [renderer.prompt(messages)], max_tokens=MAX_TOKENS, stop_ids=renderer.stop_ids
    )
    body = {"model": role, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    reply = httpx.post(
        f"{running.url}/v1/chat/completions",
        json={**body, "return_token_ids": True},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    assert tuple(choice["token_ids"]) == wanted.ids
