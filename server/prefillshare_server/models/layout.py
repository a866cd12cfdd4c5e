"""How a conversation becomes prompt text: rendered once per call, by the router alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint, jinja_env
from prefillshare_server.models import messages as chat
from prefillshare_server.models.context_first import TailRole, context_first

if TYPE_CHECKING:
    from pathlib import Path

    from prefillshare_server.config import LayoutSettings

__all__ = ["Layout", "Rendered", "context_first"]

_ASK = {"role": "user", "content": "a question"}
_ANSWER = {"role": "assistant", "content": "an answer"}
_PROBE = "prefillshare-probe"


class Rendered(NamedTuple):
    """One call's prompt. ``full.startswith(context)`` always holds.

    Special tokens such as BOS are in the text: tokenize without adding any.
    """

    context: str
    """The conversation: the same for every role, and the start of the next call's prompt."""
    full: str
    """The context, the role's instructions and tools, and the generation prompt."""


@dataclass(frozen=True)
class Layout:
    """A compiled way of writing prompts; pure, and safe to share between threads."""

    template: str
    """Jinja source, valid under transformers and vLLM as well."""
    tail_role: TailRole | None = "system"
    """None when the model's own layout is used and nothing moves."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """``bos_token`` and so on, for templates that write them."""

    @classmethod
    def for_model(cls, directory: Path, settings: LayoutSettings) -> Layout:
        """The layout over the template of the checkpoint in `directory`.

        Raises ConfigError when it has no template, a broken one, or one that cannot take the
        tail.
        """
        template = checkpoint.chat_template(directory)
        if template is None:
            raise ConfigError(
                Problem(
                    str(directory),
                    "has no chat template",
                    "use an instruction-tuned model, or add a chat_template.jinja",
                )
            )
        _require_valid_jinja(template, directory)
        tokens = checkpoint.special_tokens(directory)
        if settings.kind == "model":
            return cls(template, None, tokens)
        wrapped = context_first(
            template, tail_role=settings.tail_role, shared_head=settings.shared_head
        )
        layout = cls(wrapped, settings.tail_role, tokens)
        layout._require_working_tail(directory)
        return layout

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the template."""
        return hashlib.sha256(self.template.encode()).hexdigest()[:16]

    def render(
        self,
        messages: Sequence[chat.Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Prompt text of a conversation in OpenAI's format, up to the assistant's next turn.

        Mutates nothing. Raises ValueError, naming the field, for messages that are malformed,
        not text, or refused by the template.
        """
        extra = dict(template_kwargs or {})
        if reserved := extra.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise ValueError(f"chat_template_kwargs: {sorted(reserved)[0]!r} cannot be set here")
        history = self._history(messages)
        full = self._apply(history, tools, extra, ask=True)
        context = self._context(history, tools, extra)
        if not full.startswith(context):
            # Some templates write the last message of a conversation differently.
            context = _common_prefix(context, full)
        return Rendered(context, full)

    def answer(
        self,
        messages: Sequence[chat.Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The last message, an assistant's, as its author writes it after the generation prompt.

        That is its text and tool calls, the end of the turn, and whatever follows. It may differ
        from what later prompts make of it: some templates drop thoughts from earlier turns.
        Raises ValueError like `render`.
        """
        *asked, answer = self._history(messages)
        if self.tail_role is not None:
            asked, tools = chat.without_head(asked), None
        # Templates may refuse an answer to nothing, or open it otherwise.
        found = self._behind_opener(asked, answer, tools) if asked else None
        found = found if found is not None else self._behind_opener([_ASK], answer, tools)
        if found is None:
            raise ValueError("the chat template writes this answer nowhere behind its opener")
        return found

    def _behind_opener(
        self,
        asked: list[chat.Message],
        answer: chat.Message,
        tools: Sequence[chat.Message] | None,
    ) -> str | None:
        written = self._apply([*asked, answer], tools, {}, ask=False)
        opened = self._apply(asked, tools, {}, ask=True)
        if not written.startswith(opened):
            # A generation prompt may hold more than the turn that it opens, an empty thought say.
            probe = {"role": "assistant", "content": _PROBE}
            opened, found, _ = self._apply([*asked, probe], tools, {}, ask=False).partition(_PROBE)
            if not found or not written.startswith(opened):
                return None
        return written[len(opened) :]

    def _history(self, messages: Sequence[chat.Message]) -> list[chat.Message]:
        """Checked `messages`, as the template needs them."""
        chat.require_text(messages)
        if self._needs_parsed_arguments:
            return [chat.with_parsed_arguments(message) for message in messages]
        return list(messages)

    def _context(
        self,
        history: list[chat.Message],
        tools: Sequence[chat.Message] | None,
        extra: dict[str, Any],
    ) -> str:
        if self.tail_role is None:
            return self._apply(history, tools, extra, ask=False)
        conversation = chat.without_head(history)
        if not conversation:
            return ""
        joins = self.tail_role == "user" and conversation[-1]["role"] in ("user", "tool")
        if self._tail_block is not None and not joins:
            # Rendered with a tail behind it, as in the real prompt, and the tail cut off.
            probe = {"role": self.tail_role, "content": _PROBE}
            text = self._apply([*conversation, probe], None, extra, ask=False)
            if text.endswith(self._tail_block):
                return text.removesuffix(self._tail_block)
        return self._apply(conversation, None, extra, ask=False)

    @cached_property
    def _tail_block(self) -> str | None:
        """The text of a final probe message; None when the template takes no two in a row."""
        probe = {"role": self.tail_role, "content": _PROBE}
        try:
            once = self._apply([_ASK, _ANSWER, probe], None, {}, ask=False)
            twice = self._apply([_ASK, _ANSWER, probe, probe], None, {}, ask=False)
        except ValueError:
            return None
        block = twice.removeprefix(once)
        return block if twice.startswith(once) and once.endswith(block) else None

    @cached_property
    def _needs_parsed_arguments(self) -> bool:
        """Whether the template would quote a tool call's arguments when they are a string."""
        arguments = '{"key": "value"}'
        function = {"name": "f", "arguments": arguments}
        call = {"id": "000000000", "type": "function", "function": function}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return arguments not in self._apply([_ASK, calling], None, {}, ask=False)
        except ValueError:
            return True

    def _apply(
        self,
        messages: Sequence[chat.Message],
        tools: Sequence[chat.Message] | None,
        extra: Mapping[str, Any],
        *,
        ask: bool,
    ) -> str:
        variables = {
            **self.special_tokens,
            **extra,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": ask,
        }
        return jinja_env.render(self.template, variables)

    def _require_working_tail(self, directory: Path) -> None:
        other = "user" if self.tail_role == "system" else "system"
        for conversation in ([_ASK], [_ASK, _ANSWER]):
            head = {"role": "system", "content": _PROBE}
            try:
                context, full = self.render([head, *conversation])
            except ValueError as error:
                reason = str(error)
            else:
                if _PROBE in full.removeprefix(context) and conversation[-1]["content"] in context:
                    continue
                reason = "instructions after the conversation do not appear in the prompt"
            raise ConfigError(
                Problem(
                    f"{directory}: chat template does not work with layout.tail_role "
                    f"{self.tail_role!r}",
                    reason,
                    f"set layout.tail_role: {other}, or layout.kind: model to share nothing",
                )
            )


def _require_valid_jinja(template: str, directory: Path) -> None:
    try:
        jinja_env.compile_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            Problem(
                f"{directory}: chat template",
                f"is not valid Jinja (line {error.lineno}: {error.message})",
                "correct it, or copy it again",
            )
        ) from None


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    length = next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[:length]
