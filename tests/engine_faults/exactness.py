"""Whether an answer is the one that the paper's computation gives, token by token."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xgrammar
from transformers import AutoConfig, AutoTokenizer

from tests.reference import base_cache_gaps

NEAR_TIE = 1e-3
"""Two tokens whose log-probabilities are that close may change places with the rounding errors of
another batch or another kernel."""

Grammar = Mapping[str, Any]
"""What an answer was held to: a JSON schema, or one of xgrammar's structural tags."""


class Reference:
    """Plain Hugging Face models in fp32, in this process."""

    def __init__(self, base_dir: Path, decoders: Mapping[str, Path]) -> None:
        self._base_dir = base_dir
        self._decoders = decoders
        # The models are tiny, and threads that wait for each other suffer from busy workers.
        torch.set_num_threads(1)

    def first_wrong(
        self,
        role: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        grammar: Grammar | None = None,
    ) -> int | None:
        """Index of the first token that is not the likeliest one after those before it, if any."""
        gaps = self._gaps(role, prompt_ids, output_ids, grammar)
        return next((index for index, gap in enumerate(gaps) if gap > NEAR_TIE), None)

    def same(
        self,
        role: str,
        prompt_ids: Sequence[int],
        one: Sequence[int],
        other: Sequence[int],
        grammar: Grammar | None = None,
    ) -> bool:
        """Whether two answers are equal up to a near tie, behind which both are still exact."""
        if one == other:
            return True
        at = next(
            (i for i, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1), -1
        )
        if at < 0:
            return False
        return all(self.first_wrong(role, prompt_ids, ids, grammar) is None for ids in (one, other))

    def _gaps(
        self,
        role: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        grammar: Grammar | None,
    ) -> list[float]:
        allowed = None
        if grammar is not None:
            allowed = _allowed(self._base_dir, json.dumps(grammar), output_ids)
        gaps: list[float] = base_cache_gaps(
            self._base_dir, self._decoders[role], prompt_ids, output_ids, allowed
        )
        return gaps


@lru_cache(maxsize=64)
def _compiled(model_dir: Path, grammar: str) -> Any:
    """As a worker compiles it that has `disable_any_whitespace` set."""
    tokens = xgrammar.TokenizerInfo.from_huggingface(
        AutoTokenizer.from_pretrained(model_dir), vocab_size=_vocabulary(model_dir)
    )
    compiler = xgrammar.GrammarCompiler(tokens)
    if json.loads(grammar)["type"] == "structural_tag":
        return compiler.compile_structural_tag(grammar)
    return compiler.compile_json_schema(grammar, any_whitespace=False, separators=(",", ":"))


@lru_cache(maxsize=8)
def _vocabulary(model_dir: Path) -> int:
    return int(AutoConfig.from_pretrained(model_dir).vocab_size)


def _allowed(model_dir: Path, grammar: str, output_ids: Sequence[int]) -> list[list[bool]]:
    """Which tokens the grammar leaves before each of `output_ids`."""
    matcher = xgrammar.GrammarMatcher(_compiled(model_dir, grammar))
    vocabulary = _vocabulary(model_dir)
    words = xgrammar.allocate_token_bitmask(1, vocabulary)
    rows = []
    for token in output_ids:
        matcher.fill_next_token_bitmask(words)
        bits = [int(word) & 0xFFFFFFFF for word in words[0]]
        rows.append([bool(bits[i // 32] >> (i % 32) & 1) for i in range(vocabulary)])
        matcher.accept_token(token)
    return rows
