"""Whose answers stand in a context that several roles write.

Many templates drop an assistant message's `name`, and one that prints it would put text into the
context that was not there when the answer was generated: the shared prefix would end. So names
never reach the template; a legend of them goes to the head, which the layout moves behind the
conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from prefillshare_server.models.messages import SYSTEM_ROLES, Message, require_text


def told_apart(messages: Sequence[Message]) -> list[Message]:
    """`messages` without assistants' names; if there are any, with a legend of who wrote what.

    The legend is one more leading system message. Raises ValueError like `require_text`.
    """
    names = [str(m.get("name") or "") for m in messages if m.get("role") == "assistant"]
    if not any(names):
        return list(messages)
    require_text(messages)  # Here, where the positions are still the client's.
    bare = [_without_name(message) for message in messages]
    head = next((i for i, m in enumerate(bare) if m["role"] not in SYSTEM_ROLES), len(bare))
    return [*bare[:head], {"role": "system", "content": _legend(names)}, *bare[head:]]


def _without_name(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {key: value for key, value in message.items() if key != "name"}


def _legend(names: Sequence[str]) -> str:
    """`Assistant messages so far: 1 planner, 2-3 critic.`; those without a name are left out."""
    parts = []
    for name, run in groupby(enumerate(names, 1), key=lambda item: item[1]):
        numbers = [number for number, _ in run]
        if name:
            span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
            parts.append(f"{span} {name}")
    return f"Assistant messages so far: {', '.join(parts)}."
