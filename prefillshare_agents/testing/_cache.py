"""What a prefill worker remembers: every beginning of every prompt it has read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class PrefixCache:
    """Finds the longest beginning that a prompt has in common with any earlier one."""

    def __init__(self) -> None:
        # Beginnings are numbered; the beginning of number 0 is the empty one.
        self._next: dict[tuple[int, str], int] = {}

    def copy(self) -> Self:
        made = type(self)()
        made._next = self._next.copy()
        return made

    def common(self, tokens: Sequence[str]) -> int:
        """How many leading tokens some earlier prompt began with."""
        at = 0
        for count, token in enumerate(tokens):
            found = self._next.get((at, token))
            if found is None:
                return count
            at = found
        return len(tokens)

    def add(self, tokens: Sequence[str]) -> list[int]:
        """Returns the numbers of the prompt's beginnings, the shortest first."""
        numbers, at = [], 0
        for token in tokens:
            at = self._next.setdefault((at, token), len(self._next) + 1)
            numbers.append(at)
        return numbers
