"""The client's messages, in the form in which they are rendered again and again alike."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefillshare_server.router.turns import Turns


def prepared(messages: Sequence[Any], turns: Turns | None) -> list[Any]:
    """Messages with plain text content, and tool calls as they were generated (see turns.py).

    What is no message, or not text, is left for the layout to refuse.
    """
    return [
        _prepared(message, turns) if isinstance(message, Mapping) else message
        for message in messages
    ]


def _prepared(message: Mapping[str, Any], turns: Turns | None) -> Mapping[str, Any]:
    plain = {**message, "content": _joined(message.get("content"))}
    # Templates know the field by either name; clients send back the one they were given.
    reasoning = plain.get("reasoning", plain.get("reasoning_content"))
    if reasoning is not None:
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return turns.restored(plain) if turns is not None else plain


def _joined(content: Any) -> Any:
    """Text parts joined by line breaks, as vLLM does; anything else unchanged."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if _is_text(part)]
    return "\n".join(texts) if len(texts) == len(content) else content


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    )
