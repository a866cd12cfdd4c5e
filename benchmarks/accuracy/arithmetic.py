"""A language model of 0.8M parameters and two kinds of work for it: moving digits, adding them.

The base learns to copy, sort and reverse six digits. A specialist learns three-digit addition,
which the base cannot do at all, so that what sharing costs is not hidden by what the base knows.
Sums are written from the last digit on: then carries travel in the order of generation, and a
model of this size learns them within minutes.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Row = dict[str, str]
"""A row of training data: ``prompt`` and ``completion``."""

DIGITS = "0123456789"
END = "<end>"
UNKNOWN = "<unknown>"
WORDS = (END, UNKNOWN, *["copy", "sort", "reverse", "+", "="], *DIGITS)
SYMBOLS = 6
"""In a sequence to be copied, sorted or reversed."""
PROMPT_TOKENS = 8
ANSWER_TOKENS = SYMBOLS + 1
"""At most, the end token included."""

# It has to be there; no text of this experiment is a conversation.
_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def write_model(directory: Path, seed: int) -> None:
    """A model with random weights, fp32, and its tokenizer (one token per word)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(WORDS),
                hidden_size=128,
                intermediate_size=352,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=64,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=WORDS.index(END),
                pad_token_id=WORDS.index(END),
                dtype="float32",
            )
        )
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    words = models.WordLevel({word: number for number, word in enumerate(WORDS)}, UNKNOWN)
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=UNKNOWN
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)


def moving(count: int, chance: random.Random) -> list[Row]:
    """Rows that ask for six digits to be copied, sorted or reversed."""
    rows = []
    for _ in range(count):
        digits = chance.choices(DIGITS, k=SYMBOLS)
        answers = {"copy": digits, "sort": sorted(digits), "reverse": digits[::-1]}
        task = chance.choice(sorted(answers))
        rows.append(_row([task, *digits, "="], answers[task]))
    return rows


def additions(count: int, held_out: int, chance: random.Random) -> tuple[list[Row], list[Row]]:
    """`count` sums to learn from and `held_out` others to be tested with.

    The test's numbers are drawn from all below 1000. Of those to learn from, a third each has up
    to one, two and three digits: beside a 0 a sum is a copy, which the base knows how to make.
    Without them the loss may stay where it is for thousands of steps, with any objective.
    """
    test = [divmod(pair, 1000) for pair in chance.sample(range(1_000_000), held_out)]
    tested = set(test)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        pair = (_number(chance), _number(chance))
        if pair not in tested:
            pairs.append(pair)
    return [_sum(*pair) for pair in pairs], [_sum(*pair) for pair in test]


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """`rows` as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _number(chance: random.Random) -> int:
    return chance.randrange(10 ** chance.randint(1, 3))


def _sum(a: int, b: int) -> Row:
    return _row([*f"{a:03}", "+", *f"{b:03}", "="], f"{a + b:04}"[::-1])


def _row(prompt: Iterable[str], completion: Iterable[str]) -> Row:
    return {"prompt": " ".join(prompt), "completion": " ".join(completion)}
