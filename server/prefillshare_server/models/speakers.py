"""Whose answers stand in a context that several roles write.

Many templates drop an assistant message's `name`, and one that prints it would put text into the
context that was not there when the answer was generated: the shared prefix would end. So names
never reach the template; a legend of them goes to the head, which the layout moves behind the
conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefillshare_prefix.speakers import legend
from prefillshare_server.models.messages import SYSTEM_ROLES, Message, require_text


def told_apart(messages: Sequence[Message]) -> list[Message]:
    """`messages` without assistants' names; if there are any, with a legend of who wrote what.

    The legend is one more leading system message. Raises ValueError like `require_text`.
    """
    speakers = legend(messages)
    if not speakers:
        return list(messages)
    require_text(messages)  # Here, where the positions are still the client's.
    bare = [_without_name(message) for message in messages]
    head = next((i for i, m in enumerate(bare) if m["role"] not in SYSTEM_ROLES), len(bare))
    return [*bare[:head], {"role": "system", "content": speakers}, *bare[head:]]


def _without_name(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {key: value for key, value in message.items() if key != "name"}
