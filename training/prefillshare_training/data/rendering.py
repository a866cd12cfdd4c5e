"""From conversations to token ids, by the router's own code: what is trained is what is served.

A conversation is played as if it were served turn by turn in one session, and each of its answers
had been generated with exactly the ids that are its target here. So a session's ledger splices the
same ids into later prompts as it will when the specialist runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint
from prefillshare_server.models.layout import Layout
from prefillshare_server.router.ledger import Ledger
from prefillshare_server.router.messages import prepared
from prefillshare_server.router.prompt import Draft, draft, opener
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.tally import Tally
from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.turns import Turns
from prefillshare_training.samples import Sample, Turn

if TYPE_CHECKING:
    from pathlib import Path

    from prefillshare_server.config import LayoutSettings

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class Renderer:
    """Writes samples and prompts in the layout of a cluster. Holds no state between calls."""

    def __init__(self, layout: Layout, tokens: Tokens, *, eos_id: int, stop_ids: frozenset[int]):
        self.stop_ids = stop_ids
        """Ids that end an answer when it is generated; `eos_id` is one of them."""
        self.fingerprint = layout.fingerprint
        """Of the layout."""
        self._layout = layout
        self._tokens = tokens
        self._eos_id = eos_id
        text = opener(layout)
        self._opener = (text, self.encode(text))

    @classmethod
    def for_base(cls, base_dir: Path, layout: LayoutSettings) -> Renderer:
        """The renderer of a cluster with this base and these settings.

        Raises ConfigError when the checkpoint has no fast tokenizer, no template that can take the
        layout, or no token that ends a turn.
        """
        tokens = Tokens(base_dir)
        compiled = Layout.for_model(base_dir, layout)
        stop_ids = checkpoint.stop_ids(base_dir)
        eos = checkpoint.special_tokens(base_dir).get("eos_token")
        eos_ids = tokens.encode_now(eos) if eos else sorted(stop_ids)[:1]
        if len(eos_ids) != 1:
            raise ConfigError(
                Problem(
                    f"{base_dir}: eos_token",
                    f"{eos!r} is no single token" if eos else "there is none",
                    "name the token that ends a turn in tokenizer_config.json",
                )
            )
        return cls(compiled, tokens, eos_id=eos_ids[0], stop_ids=stop_ids | {*eos_ids})

    def conversation(
        self, messages: Sequence[Message], tools: Tools | None = None, *, given: int = 0
    ) -> Sample:
        """The assistant's turns of a conversation in OpenAI's format, each with its prompt.

        The first `given` messages are context only, and so is an assistant message that opens the
        conversation: no call asks for it. Raises ValueError, naming the field, for what the router
        could not serve.
        """
        _require_lists(messages, tools)
        session = Session("", Ledger(), Turns())
        turns: list[Turn] = []
        for index, message in enumerate(messages):
            if not (index and isinstance(message, Mapping) and message.get("role") == "assistant"):
                continue
            last = index + 1 == len(messages)
            try:
                turn = self._play(session, messages[: index + 1], tools, remember=not last)
            except ValueError as error:
                raise _located(error, f"messages[{index}]") from None
            if index >= given:
                turns.append(turn)
        if not turns:
            raise ValueError("messages: no assistant message answers another one")
        return Sample(tuple(turns))

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Ids of the prompt that the router makes of a chat request without a session.

        Earlier answers are text here: nobody knows how they were generated. Raises ValueError,
        naming the field, for what the router would refuse.
        """
        _require_lists(messages, tools)
        try:
            drafted = draft(self._layout, self._tokens, None, messages, tools)
        except ValueError as error:
            raise _located(error, "messages") from None
        return self.encode(drafted.new_text) + self.encode(drafted.tail)

    def text(self, prompt: str, completion: str) -> Sample:
        """A completion of raw text, without template; the end of sequence is appended to it.

        The prompt's ids are those of a completions request: with the special tokens that the
        tokenizer puts in front. Raises ValueError, naming the field.
        """
        ids = self.encode(completion)
        if not ids or ids == [self._eos_id]:
            raise ValueError("completion: is empty; there is nothing to learn")
        prompt_ids = self._tokens.encode_now(prompt, add_special=True)
        if not prompt_ids:
            raise ValueError("prompt: is empty; at least one token is needed")
        try:
            return Sample((Turn(tuple(prompt_ids), self._ended(ids)),))
        except ValueError as error:
            raise ValueError(f"completion: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone, nothing put in front of it; special tokens in it count as such."""
        return self._tokens.encode_now(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self._tokens.decode(ids)

    def _play(
        self, session: Session, messages: Sequence[Message], tools: Tools | None, *, remember: bool
    ) -> Turn:
        """One call of the session: what was asked, and that the last message was generated."""
        drafted = draft(self._layout, self._tokens, session, messages[:-1], tools)
        new_ids = self.encode(drafted.new_text)
        prompt_ids = (*drafted.match.ids, *new_ids, *self.encode(drafted.tail))
        history = prepared(messages, session.turns)
        where = f"messages[{len(messages) - 1}]"
        answer = self._layout.answer(history, tools)
        for call in history[-1].get("tool_calls") or ():
            if call["function"]["name"] not in answer:
                raise ValueError(
                    f"{where}.tool_calls: the chat template writes no tool calls; use the "
                    "context-first layout"
                )
        try:
            completion_ids = self._ended(self.encode(answer))
        except _EndsEarly as error:
            raise ValueError(f"{where}.content: {error}") from None
        if remember:
            self._remember(session, drafted, new_ids, messages[-1], completion_ids)
        return Turn(prompt_ids, completion_ids)

    def _remember(
        self,
        session: Session,
        drafted: Draft,
        new_ids: Sequence[int],
        message: Message,
        completion_ids: Sequence[int],
    ) -> None:
        """What the router's account writes into the session once the call is over."""
        end = session.ledger.keep_context(drafted.match.end, drafted.new_text, new_ids, "")
        tally = Tally()
        tally.add(
            {
                "choices": [
                    {
                        "token_ids": completion_ids,
                        "finish_reason": "stop",
                        "message": self._seen(message, completion_ids),
                    }
                ]
            }
        )
        session.keep_answer(end, self._opener, tally, self._tokens)

    def _seen(self, message: Message, completion_ids: Sequence[int]) -> dict[str, Any]:
        """The answer as the client got it, and as `message` sends it back."""
        [plain] = prepared([message], None)
        calls = [_call(call) for call in plain.get("tool_calls") or ()]
        content = plain.get("content")
        if not calls and not plain.get("reasoning"):
            special = self._tokens.special_ids
            content = self.decode([i for i in completion_ids if i not in special])
        return {"content": content, "tool_calls": calls}

    def _ended(self, ids: Sequence[int]) -> tuple[int, ...]:
        """`ids` up to the token that ends the turn; without one, the end of sequence is added."""
        end = next((place for place, i in enumerate(ids) if i in self.stop_ids), None)
        if end is None:
            return (*ids, self._eos_id)
        if self.decode(ids[end + 1 :]).strip():
            raise _EndsEarly(
                f"{self.decode(ids[end : end + 1])!r} in the text would end the answer there; "
                "take it out"
            )
        return tuple(ids[: end + 1])


class _EndsEarly(ValueError):
    """Text behind a token that ends generation: it could never be generated."""


def _require_lists(messages: object, tools: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError("messages: must be a list of messages")
    if tools is None:
        return
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools: must be a list of tools")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call as vLLM answers it: the arguments as JSON text."""
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}


def _located(error: ValueError, where: str) -> ValueError:
    """`error` with a field in front; the layout names one itself where it knows better."""
    message = str(error)
    return ValueError(message if message.startswith("messages") else f"{where}: {message}")
