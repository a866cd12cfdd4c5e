"""A request as prompt tokens: by the base's own template and tokenizer, or as an estimate."""

from __future__ import annotations

import json
import re
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from prefillshare_prefix import Layout
from prefillshare_prefix.messages import Message, Request, read_request
from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pathlib import Path

    from prefillshare_server.config import LayoutSettings
    from prefillshare_server.models import layout as layouts
    from prefillshare_server.router.tokens import Tokens

ID_BYTES = array("I").itemsize


class Written(NamedTuple):
    """A prompt."""

    context: str
    """The text that the next call's prompt should begin with."""
    ids: bytes
    """All token ids of the prompt, `ID_BYTES` each: bytes compare fast."""
    context_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.ids) // ID_BYTES


class Writer(Protocol):
    """Writes prompts in both layouts."""

    estimated: bool

    def write(self, body: Mapping[str, Any], layout: Layout) -> Written:
        """Raises ValueError, naming the field, for what cannot be rendered."""
        ...


class Estimate:
    """Plain ChatML, with everything that some template writes; about a token for 4 letters.

    Two prompts have the same beginning here exactly where their messages are the same.
    """

    estimated = True

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def write(self, body: Mapping[str, Any], layout: Layout) -> Written:
        request = read_request(body, layout)
        head = _head(request)
        context = "".join(map(_chatml, request.context))
        opener = "<|im_start|>assistant\n"
        if layout == "model":
            context, tail = head + context, opener
        else:
            tail = head + opener
        ids = self._tokens(context)
        count = len(ids)
        ids.extend(self._tokens(tail))
        return Written(context, ids.tobytes(), count)

    def _tokens(self, text: str) -> array[int]:
        ids = self._ids
        return array("I", (ids.setdefault(piece, len(ids)) for piece in _PIECE.findall(text)))


# About what tokenizers make of English and of JSON; CJK letters stand alone.
_PIECE = re.compile(
    r"<\|im_\w+\|>|[ ]?[A-Za-z_]{1,7}|[ ]?\d{1,3}|\s+|[ ]?[^\w\s]{1,2}|.", re.DOTALL
)


def _head(request: Request) -> str:
    text = "\n\n".join(message.text for message in request.system)
    if request.tools:
        text += "\n\n# Tools\n" + "\n".join(request.tools)
    return f"<|im_start|>system\n{text}<|im_end|>\n" if text else ""


def _chatml(message: Message) -> str:
    parts = [f"<think>\n{message.reasoning}\n</think>\n"] if message.reasoning else []
    parts.append(message.text)
    parts += [
        f"\n<tool_call {call.id}>\n"
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.calls
    ]
    speaker = " ".join(filter(None, (message.role, message.name, message.call_id)))
    return f"<|im_start|>{speaker}\n{''.join(parts)}<|im_end|>\n"


class Exact:
    """The layout and the tokenizer of a checkpoint, as the router uses them."""

    estimated = False

    def __init__(self, directory: Path, settings: LayoutSettings | None) -> None:
        """Raises ConfigError for a directory without template or tokenizer."""
        from prefillshare_server.config import LayoutSettings
        from prefillshare_server.models.layout import Layout
        from prefillshare_server.router.tokens import Tokens

        plain = LayoutSettings(kind="model")
        first = settings if settings and settings.kind == "context-first" else LayoutSettings()
        self._tokens: Tokens = Tokens(directory)
        self._layouts: dict[str, Callable[[], layouts.Layout]] = {
            "model": lambda: Layout.for_model(directory, plain),
            "context_first": lambda: Layout.for_model(directory, first),
        }
        self._ready: dict[str, layouts.Layout] = {}
        # Contexts mostly go on from a recent one, and only what is new is tokenised.
        self._recent: deque[tuple[str, array[int]]] = deque(maxlen=16)

    def write(self, body: Mapping[str, Any], layout: Layout) -> Written:
        from prefillshare_server.models.speakers import told_apart
        from prefillshare_server.router.messages import prepared

        if layout not in self._ready:
            self._ready[layout] = self._layouts[layout]()
        kwargs = body.get("chat_template_kwargs")
        messages = prepared(body["messages"], None)
        if layout == "context_first" and all(isinstance(each, Mapping) for each in messages):
            messages = told_apart(messages)
        context, full = self._ready[layout].render(
            messages,
            body.get("tools") or None,
            template_kwargs=kwargs if isinstance(kwargs, Mapping) else None,
        )
        ids = self._context_ids(context)
        count = len(ids)
        whole = ids + array("I", self._tokens.encode_now(full[len(context) :]))
        return Written(context, whole.tobytes(), count)

    def _context_ids(self, text: str) -> array[int]:
        best, known = 0, array("I")
        for earlier, ids in self._recent:
            at = len(earlier)
            if best < at and text.startswith(earlier) and self._tokens.splits_at(text, at):
                best, known = at, ids
        ids = known + array("I", self._tokens.encode_now(text[best:]))
        self._recent.append((text, ids))
        return ids


def exact(base: str | None, cluster: Path | None) -> tuple[Exact, str | None]:
    """The writer of a base, or of a cluster file, and the kind of layout that file sets.

    Raises ConfigError for a base that is not there, and where the extra `lint` is not installed.
    """
    try:
        from prefillshare_server.config import Cluster
        from prefillshare_server.models import store

        if cluster is None:
            return Exact(store.resolve(base or ""), None), None
        settings = Cluster.load(cluster, {})
        directory = store.resolve(base or settings.base.model)
        return Exact(directory, settings.layout), settings.layout.kind
    except ModuleNotFoundError as missing:
        raise ConfigError(
            Problem(
                "--cluster" if cluster else "--base",
                f"needs {missing.name}, which is not installed",
                "install the extra `lint`, or leave the option out for an estimate",
            )
        ) from None
