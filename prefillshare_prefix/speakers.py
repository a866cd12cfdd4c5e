"""Who gave which answer, told behind a context that several roles write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any


def legend(messages: Sequence[Mapping[str, Any]]) -> str:
    """`Assistant messages so far: 1 planner, 2-3 critic.`, by the answers' `name`.

    Answers without a name are counted and left out; where none has one, the legend is empty.
    """
    names = [str(m.get("name") or "") for m in messages if m.get("role") == "assistant"]
    parts = []
    for name, run in groupby(enumerate(names, 1), key=lambda item: item[1]):
        numbers = [number for number, _ in run]
        if name:
            span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
            parts.append(f"{span} {name}")
    return f"Assistant messages so far: {', '.join(parts)}." if parts else ""
