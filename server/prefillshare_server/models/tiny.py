"""A family of random Llama models, small enough to start real engines on in tests.

All share one geometry and one tokenizer but for the two that exist to be refused. The
weights are large enough that the models disagree clearly, and that attending to the base's
KV instead of one's own changes a decoder's answer: an exactness test can then fail.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_POSITION_EMBEDDINGS = 4096
# Large enough for clear differences, small enough that rounding errors stay below 1e-3.
INITIALIZER_RANGE = 0.05

# SmolLM2-Instruct's template: a default system message, no notion of tools.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a tiny model.<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Member(NamedTuple):
    """What distinguishes one model of the family."""

    seed: int
    num_kv_heads: int = 2
    first_token: int = 0
    """Rotates the vocabulary: byte b has id ``(b + first_token) % 256``."""


FAMILY = {
    "tiny-base": Member(seed=1),
    "tiny-a": Member(seed=2),
    "tiny-b": Member(seed=3),
    "tiny-c": Member(seed=4),
    "tiny-other-geometry": Member(seed=5, num_kv_heads=4),
    "tiny-other-tokenizer": Member(seed=6, first_token=7),
}


def write(name: str, directory: Path, progress: Callable[[str], None]) -> None:
    """Write member `name` of the family into `directory` as a Hugging Face checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    member = FAMILY[name]
    progress(f"draw {name} from seed {member.seed}")
    tokenizer = _tokenizer(member.first_token)
    end, _, end_of_turn = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=member.num_kv_heads,
        head_dim=32,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=end,
        dtype="float32",
    )
    # The caller's random state is its own.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(member.seed)
        model = LlamaForCausalLM(config).to(torch.float32)
        _speak_printable(model, _unprintable(tokenizer))
    with _no_progress_bars():
        model.save_pretrained(directory)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        model_max_length=MAX_POSITION_EMBEDDINGS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _tokenizer(first_token: int) -> Tokenizer:
    """A byte-level tokenizer without merges: one token per UTF-8 byte, plus the specials."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: (i + first_token) % 256 for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _speak_printable(model: LlamaForCausalLM, unprintable: list[int]) -> None:
    """Make the model all but certain to answer in printable characters.

    Llama has no output bias, so one channel of the residual stream becomes a constant: all
    embeddings have the same value there and no layer writes to it. The output head reads it.
    """
    channel = 0
    model.model.embed_tokens.weight.data[:, channel] = 0.3
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[channel] = 0
        layer.mlp.down_proj.weight.data[channel] = 0
    model.lm_head.weight.data[:, channel] = 0
    model.lm_head.weight.data[unprintable] = 0
    model.lm_head.weight.data[unprintable, channel] = -10


def _unprintable(tokenizer: Tokenizer) -> list[int]:
    """Ids of special tokens, blanks, control characters and parts of longer UTF-8 sequences."""
    printable = {tokenizer.token_to_id(char) for char in map(chr, range(ord("!"), ord("~") + 1))}
    return [index for index in range(tokenizer.get_vocab_size()) if index not in printable]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A bar for 3 MB of weights would only hide the caller's own progress."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
