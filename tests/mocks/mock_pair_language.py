"""MOCK language model: what it says next is a function of every KV position it attends to.

KV is a list of `Tag`s, one per token. A tag names the weights that computed it and carries a hash
over the tags before it, so a position computed from wrong KV is wrong itself, as in a real model.
The model reads all tags: one that is missing, wrong or of other weights changes what it says.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer

BASE = "base"
END = "<|im_end|>"

_WORD = re.compile(r" ?[a-z]{2,}")


class Tag(NamedTuple):
    """KV of one token position."""

    weights: str
    """"base", a role, or "garbage"."""
    chain: int
    """Hash over this token and, through the tags in front of it, all tokens before."""


def tag_after(previous: Tag | None, weights: str, token: int) -> Tag:
    """KV of `token`, computed by `weights` over KV that ends in `previous`."""
    before = previous.chain if previous is not None else 0
    return Tag(weights, hash((before, _number(weights), token)))


@cache
def _number(name: str) -> int:
    # Unlike hash(), the same in every process.
    return zlib.crc32(name.encode())


def base_tags(ids: Sequence[int]) -> list[Tag]:
    """KV of a prompt as the base computes it."""
    return extended([], BASE, ids)


def extended(tags: Sequence[Tag], weights: str, ids: Sequence[int]) -> list[Tag]:
    """`tags`, and those of the `ids` that follow, computed by `weights`."""
    grown = list(tags)
    for token in ids:
        grown.append(tag_after(grown[-1] if grown else None, weights, token))
    return grown


class Vocabulary:
    """Bytes of each token, and the tokens the model may say."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        of_char = {char: byte for byte, char in _byte_chars().items()}
        self._bytes: dict[int, bytes] = {}
        for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
            if all(char in of_char for char in text):
                self._bytes[token] = bytes(of_char[char] for char in text)
        # Special tokens spell no text.
        for token in tokenizer.get_added_tokens_decoder():
            self._bytes[token] = b""
        end = tokenizer.token_to_id(END)
        assert end is not None, f"the mock language model needs the token {END}"
        self.end = int(end)
        self.words = sorted(
            token for token, raw in self._bytes.items() if _WORD.fullmatch(raw.decode("latin-1"))
        )
        self.byte = {raw[0]: token for token, raw in self._bytes.items() if len(raw) == 1}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens written out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes:
        """What the token adds to a text; nothing for a special token."""
        return self._bytes[token]


Slot = tuple[int, ...]
"""Tokens that may stand at one position of an answer; the model picks one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request shapes the answer."""

    form: str
    """"text", "tools", "json" or "reason"."""
    tools: tuple[str, ...]
    seed: int
    """0 for greedy sampling."""
    max_tokens: int | None

    @classmethod
    def of(cls, body: Mapping[str, Any], choice: int = 0) -> "Asked":
        """From a request's body. `choice` is the one of n that is meant, for a seed of its own."""
        tools = tuple(tool["function"]["name"] for tool in body.get("tools") or ())
        form = "text"
        if tools and body.get("tool_choice") != "none":
            form = "tools"
        elif (body.get("response_format") or {}).get("type") == "json_object":
            form = "json"
        elif (body.get("chat_template_kwargs") or {}).get("enable_thinking"):
            form = "reason"
        seed = body.get("seed") if body.get("temperature") else None
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        return cls(form, tools, 0 if seed is None else seed + choice + 1, limit)


class Writer:
    """Says one token after the other. `tags` is the KV of the prompt, x_L included."""

    def __init__(self, words: Vocabulary, role: str, asked: Asked, tags: Sequence[Tag]) -> None:
        self.ids: list[int] = []
        self._role = role
        self._asked = asked
        self._tags = list(tags)
        self._chains = [tag.chain for tag in tags]
        self._plan = _plan(words, asked, self._look("plan"))

    @property
    def finish_reason(self) -> str | None:
        """Why the answer is complete; None while it is not."""
        if len(self.ids) == len(self._plan):
            return "stop"
        if self._asked.max_tokens is not None and len(self.ids) >= self._asked.max_tokens:
            return "length"
        return None

    def append(self, token: int) -> None:
        """Run `token` as one that was generated before, whoever did that."""
        tag = tag_after(self._tags[-1], self._role, token)
        self._tags.append(tag)
        self._chains.append(tag.chain)
        self.ids.append(token)

    def next(self) -> int:
        """Generate and run one more token. Only while `finish_reason` is None."""
        menu = self._plan[len(self.ids)]
        token = menu[self._look("token") % len(menu)]
        self.append(token)
        return token

    @property
    def tags(self) -> Sequence[Tag]:
        """KV of prompt and answer so far."""
        return self._tags

    def _look(self, purpose: str) -> int:
        seen = (_number(self._role + purpose), self._asked.seed, *self._chains)
        return hash(seen) >> 3


def expected_tokens(
    words: Vocabulary, role: str, prompt_ids: Sequence[int], asked: Asked
) -> tuple[list[int], str]:
    """The truth: ids and finish reason of an undisturbed answer over KV of the base."""
    tags = extended(base_tags(prompt_ids[:-1]), role, prompt_ids[-1:])
    writer = Writer(words, role, asked, tags)
    while writer.finish_reason is None:
        writer.next()
    return writer.ids, writer.finish_reason


def _plan(words: Vocabulary, asked: Asked, look: int) -> list[Slot]:
    """The shape of an answer, end token included."""

    def fixed(text: str) -> list[Slot]:
        return [(token,) for token in words.encode(text)]

    def free(units: int, bits: int) -> list[Slot]:
        """Words, and characters of two and four bytes, one token per byte."""
        slots: list[Slot] = []
        for _ in range(units):
            bits, kind = divmod(bits, 5)
            if kind == 0:
                slots += [(words.byte[0xC3],), _continuations(words)]
            elif kind == 1:
                lead = [(words.byte[byte],) for byte in (0xF0, 0x9F, 0x98)]
                slots += [*lead, _continuations(words)]
            else:
                slots.append(tuple(words.words))
        return slots

    units, bits = look % 9 + 2, look // 9
    end: list[Slot] = [(words.end,)]
    if asked.form == "json":
        return [*fixed('{"answer": "'), *free(units, bits), *fixed('"}'), *end]
    if asked.form == "reason":
        thought, answer = free(units // 2 + 1, bits), free(units, bits // 7)
        return [*fixed("<think>"), *thought, *fixed("</think>"), *answer, *end]
    if asked.form == "text" or look % 4 == 0:
        return [*free(2 * units, bits), *end]
    calls: list[Slot] = []
    for number in range(1 + look % 3 // 2):
        name = asked.tools[(look + number) % len(asked.tools)]
        opening = f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "'
        calls += [*fixed(opening), *free(units, bits + number), *fixed('"}}\n</tool_call>\n')]
    return [*calls, *end]


def _continuations(words: Vocabulary) -> Slot:
    return tuple(words.byte[byte] for byte in range(0xA0, 0xC0))


def _byte_chars() -> dict[int, str]:
    """The printable character by which byte-level tokenizers write each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }
