"""From a request to token ids: rendered and tokenised once, for the base and the decoder alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from prefillshare_server.models import messages as chat
from prefillshare_server.models.layout import Layout
from prefillshare_server.models.speakers import told_apart
from prefillshare_server.router.ask import Ask
from prefillshare_server.router.breaks import PrefixBreak, judged
from prefillshare_server.router.errors import bad_request, context_too_long
from prefillshare_server.router.handoff import Prompt
from prefillshare_server.router.ledger import Match
from prefillshare_server.router.messages import prepared
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.tokens import Tokens

_ASK = {"role": "user", "content": "a question"}
_ANSWER = "prefillshare-answer"


class Draft(NamedTuple):
    """A rendered prompt. Its ids are those of `match`, of `new_text` and of `tail`, in a row."""

    match: Match
    """The start of the context, which the session has ids for."""
    new_text: str
    """The rest of the context."""
    tail: str
    """What only this call needs: always tokenised apart, so it can never move the context."""
    context: str
    """The whole context."""


def draft(
    layout: Layout,
    tokens: Tokens,
    session: Session | None,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Draft:
    """Render a conversation and cut it where it is tokenised. Changes nothing.

    Training renders by it too. Raises ValueError, naming the field, for what cannot be rendered.
    """
    written = _written(layout, session, messages)
    context, full = layout.render(written, tools, template_kwargs=template_kwargs)
    match = session.ledger.match(context, tokens.splits_at) if session else Match()
    return Draft(match, context[match.chars :], full[len(context) :], context)


def _written(layout: Layout, session: Session | None, messages: Sequence[Any]) -> Sequence[Any]:
    """The messages as the layout is to render them."""
    written = prepared(messages, session.turns if session else None)
    if layout.tail_role is not None and all(isinstance(m, Mapping) for m in written):
        return told_apart(written)
    return written


def opener(layout: Layout) -> str:
    """What the layout writes between a conversation and an assistant's answer to it."""
    asked = layout.render([_ASK]).context
    answered = layout.render([_ASK, {"role": "assistant", "content": _ANSWER}]).context
    written, found, _ = answered.removeprefix(asked).partition(_ANSWER)
    # A template may write earlier turns otherwise than the latest: then no answer is ever found
    # again, and every turn is tokenised as text.
    return written if found and answered.startswith(asked) else ""


class Prompts:
    """Renders and tokenises. Reads the session's ledger and never changes it."""

    def __init__(self, layout: Layout, tokens: Tokens, *, max_model_len: int) -> None:
        self._layout = layout
        self._tokens = tokens
        self._max_model_len = max_model_len
        self._opener_text = opener(layout)

    @property
    def head_first(self) -> bool:
        """Whether the leading system message and tools stand before the conversation."""
        return self._layout.tail_role is None

    async def tokens(self, ask: Ask, session: Session | None) -> list[Prompt]:
        """The prompts of a request: one, or one for each prompt of a completions request.

        Raises RouterError(400) for what cannot be rendered, tokenised or fitted in.
        """
        prompts = await self.rendered(ask, session)
        for prompt in prompts:
            self._require_room(ask, prompt)
        return prompts

    async def rendered(self, ask: Ask, session: Session | None) -> list[Prompt]:
        """The same, however long they are."""
        if ask.kind == "chat":
            return [await self._chat(ask.body, session)]
        return [await self._completion(ask, given) for given in _given(ask.body)]

    async def context(self, body: Mapping[str, Any], session: Session) -> Prompt:
        """What every role's call with these messages will begin with, and no tail.

        Raises RouterError(400) as `tokens` does.
        """
        prompt = await self._chat(body, session, tail=False)
        self._require_tokens(prompt, 1, "messages", "messages")
        return prompt

    async def _chat(
        self, body: Mapping[str, Any], session: Session | None, *, tail: bool = True
    ) -> Prompt:
        messages, tools = body.get("messages"), body.get("tools")
        if not isinstance(messages, list):
            raise bad_request("messages must be a list of messages", "messages")
        if tools is not None and not isinstance(tools, list):
            raise bad_request("tools must be a list of tools", "tools")
        kwargs = _template_kwargs(body)
        try:
            drafted = draft(self._layout, self._tokens, session, messages, tools, kwargs)
        except ValueError as error:
            raise bad_request(str(error), _field(str(error))) from None
        prompt = await self._prompt(drafted if tail else drafted._replace(tail=""))
        # A child knows its parent's contexts and need not go on with one of them.
        if session is None or not session.grown or drafted.match.extends:
            return prompt
        why = judged(
            session,
            body,
            drafted.context,
            whole=self.head_first,
            render=partial(self._beginning, session, messages, tools, kwargs),
        )
        if why is None:
            return prompt
        return replace(prompt, broken=PrefixBreak(session.ledger.lost(prompt.context_ids), why))

    def _beginning(
        self,
        session: Session,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        count: int,
    ) -> str:
        """Text of the first `count` messages of a context; none where they make no prompt."""
        head = len(messages) - len(chat.without_head(messages))
        history = _written(self._layout, session, messages[: head + count])
        try:
            return self._layout.render(history, tools, template_kwargs=kwargs).context
        except ValueError:
            return ""

    async def _prompt(self, drafted: Draft) -> Prompt:
        match = drafted.match
        context_ids = [*match.ids, *await self._tokens.encode(drafted.new_text)]
        tail_ids = await self._tokens.encode(drafted.tail)
        return Prompt(
            ids=context_ids + tail_ids,
            context_tokens=len(context_ids),
            kept=match.end,
            new_text=drafted.new_text,
            opener=(self._opener_text, await self._tokens.encode(self._opener_text)),
        )

    async def _completion(self, ask: Ask, given: str | list[int]) -> Prompt:
        if isinstance(given, str):
            special = ask.body.get("add_special_tokens", True)
            ids = await self._tokens.encode(given, add_special=bool(special))
        else:
            ids = given
        return Prompt(ids=ids, context_tokens=len(ids))

    def _require_room(self, ask: Ask, prompt: Prompt) -> None:
        field = "messages" if ask.kind == "chat" else "prompt"
        self._require_tokens(prompt, max(ask.max_tokens or 1, 1), field, ask.max_tokens_field)

    def _require_tokens(self, prompt: Prompt, wanted: int, field: str, wanted_field: str) -> None:
        if not prompt.ids:
            raise bad_request("the prompt is empty; at least one token is needed", field)
        if len(prompt.ids) + wanted > self._max_model_len:
            raise context_too_long(
                len(prompt.ids),
                wanted,
                self._max_model_len,
                field if len(prompt.ids) >= self._max_model_len else wanted_field,
            )


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables of a request, as vLLM derives them."""
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs")
    variables = dict(given or {})
    for name in ("documents", "reasoning_effort"):
        if body.get(name) is not None:
            variables[name] = body[name]
    if body.get("reasoning_effort") is not None:
        variables.setdefault("enable_thinking", body["reasoning_effort"] != "none")
    return variables


def _given(body: Mapping[str, Any]) -> list[Any]:
    """The prompts of a completions request, each a text or a list of ids."""
    given: Any = body.get("prompt")
    prompts = given if isinstance(given, list) and not _is_ids(given) else [given]
    if prompts and all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        return prompts
    raise bad_request(
        "prompt must be a text, a list of token ids, or a non-empty list of these", "prompt"
    )


def _is_ids(value: Any) -> bool:
    # bool is an int as well; no token id is meant by it.
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)


def _field(message: str) -> str | None:
    """The field a layout's error names in front: `messages[1].content: …`."""
    name, colon, _ = message.partition(":")
    return name if colon and name.startswith(("messages", "chat_template_kwargs")) else None
