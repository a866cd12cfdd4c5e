"""The base's tokenizer: the only place where text becomes token ids."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from prefillshare_server.errors import ConfigError, Problem

_IN_LINE_CHARS = 4096
"""Longer texts are tokenised in a thread: at 1–2 MB/s they would hold up every other call."""


class Tokens:
    """Encodes and decodes as the base does. Safe to share; encoding releases the GIL."""

    def __init__(self, base_dir: Path) -> None:
        path = base_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                Problem(
                    str(base_dir),
                    "the base has no tokenizer.json",
                    "convert the tokenizer to the fast format (save_pretrained does it)",
                )
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        # Truncation and padding are settings of training runs that some checkpoints keep.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # A token that swallows blanks on its left would reach over the border.
        self._openers = tuple(
            token.content
            for token in added.values()
            if token.content
            and token.special
            and not (token.lstrip or token.single_word or token.normalized)
        )
        self._encode_short = lru_cache(maxsize=256)(self._encode)

    def _encode(self, text: str, add_special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def encode_now(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as such."""
        # Instructions, tools and generation prompts come back in every call of a role.
        short = len(text) <= _IN_LINE_CHARS
        return list((self._encode_short if short else self._encode)(text, add_special))

    async def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """The same without holding up the event loop."""
        if len(text) <= _IN_LINE_CHARS:
            return self.encode_now(text, add_special=add_special)
        return await asyncio.to_thread(self.encode_now, text, add_special=add_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id; empty for one that it has none for."""
        return [self._tokenizer.id_to_token(i) or "" for i in ids]

    def splits_at(self, text: str, position: int) -> bool:
        """Whether tokenising `text` in two parts at `position` gives the ids of the whole.

        True where a special token begins: tokenizers cut the text there before anything else.
        """
        return position == len(text) or text.startswith(self._openers, position)
