"""One conversation that every supported client must be able to hold.

`hold_conversation(client)` runs against any server that speaks the router's contract; `CLIENTS`
has the clients by name. Two roles answer in turn, streamed and not, and the server's own account
of each call must show one session that goes on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import openai
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import prefillshare_agents as ps
from prefillshare_agents.langgraph import ChatPrefillShare

# Long enough to fill several KV blocks of any usual size before the first answer.
QUESTION = (
    "A library lends books for three weeks. Ada borrowed nine books on a Monday and brought four "
    "of them back on the Friday of the same week. On the next Tuesday she borrowed two more, and "
    "a friend handed in one of her books for her on the day after. Every book that is late costs "
    "twenty cents for each day. Nobody else uses her card, and the library is closed on Sundays. "
    "How many books does Ada have at home at the end of that second week?"
)
FOLLOW_UP = "Now say it in one short sentence."
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
INSTRUCTIONS = {True: "You answer in a few words.", False: "You check the answer before yours."}


@dataclass(frozen=True)
class Turn:
    """An answer and what the server says about the call that made it."""

    text: str
    session: str
    prefill_worker: str
    decode_worker: str
    affinity: str
    cached_tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, text: str | None, account: dict[str, Any], prompt_tokens: int) -> Turn:
        named = {name: account[name] for name in cls.__annotations__ if name in account}
        return cls(text=text or "", prompt_tokens=prompt_tokens, **named)


class Client(Protocol):
    """Something that holds one conversation: it keeps the messages and one session."""

    def ask(self, role: str, message: str | None, *, instructions: str, stream: bool) -> Turn:
        """Add a user message (if any), let `role` answer, keep the answer."""


def hold_conversation(client: Client, roles: tuple[str, str]) -> None:
    """Run the conversation; raises AssertionError where the session is not continuous."""
    first, second = roles
    # Unlike any earlier conversation, whose KV the prefill worker may still hold.
    question = f"Question {uuid.uuid4().hex[:8]}. {QUESTION}"
    turns = [
        client.ask(first, question, instructions=INSTRUCTIONS[True], stream=False),
        client.ask(second, None, instructions=INSTRUCTIONS[False], stream=True),
        client.ask(first, FOLLOW_UP, instructions=INSTRUCTIONS[True], stream=True),
        client.ask(second, None, instructions=INSTRUCTIONS[False], stream=False),
    ]
    assert all(turn.text for turn in turns), turns
    assert [turn.affinity for turn in turns] == ["new", "hit", "hit", "hit"], turns
    assert len({turn.session for turn in turns}) == 1, turns
    assert len({turn.prefill_worker for turn in turns}) == 1, turns
    assert turns[0].decode_worker != turns[1].decode_worker, turns
    assert turns[0].decode_worker == turns[2].decode_worker, turns
    cached = [turn.cached_tokens for turn in turns]
    assert cached[0] < cached[1] < turns[1].prompt_tokens, turns
    assert cached[1] <= cached[2] <= cached[3], turns


@dataclass
class _Completions:
    """The conversation over an OpenAI client, for plain and for tagged clients."""

    client: openai.OpenAI
    messages: list[Any]

    def ask(self, role: str, message: str | None, *, instructions: str, stream: bool) -> Turn:
        if message is not None:
            self.messages.append({"role": "user", "content": message})
        request = [{"role": "system", "content": instructions}, *self.messages]
        if stream:
            turn = _read(
                self.client.chat.completions.create(
                    model=role,
                    messages=request,
                    stream=True,
                    stream_options={"include_usage": True},
                    **SETTINGS,
                )
            )
        else:
            turn = _turn(
                self.client.chat.completions.create(model=role, messages=request, **SETTINGS)
            )
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn


@dataclass
class _AsyncCompletions:
    client: openai.AsyncOpenAI
    runner: asyncio.Runner
    messages: list[Any]

    def ask(self, role: str, message: str | None, *, instructions: str, stream: bool) -> Turn:
        if message is not None:
            self.messages.append({"role": "user", "content": message})
        request = [{"role": "system", "content": instructions}, *self.messages]
        turn = self.runner.run(self._ask(role, request, stream))
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    async def _ask(self, role: str, request: list[Any], stream: bool) -> Turn:
        create = self.client.chat.completions.create
        if not stream:
            return _turn(await create(model=role, messages=request, **SETTINGS))
        chunks = await create(
            model=role,
            messages=request,
            stream=True,
            stream_options={"include_usage": True},
            **SETTINGS,
        )
        return _read([chunk async for chunk in chunks])


@dataclass
class _Session:
    session: ps.Session

    def ask(self, role: str, message: str | None, *, instructions: str, stream: bool) -> Turn:
        if message is not None:
            self.session.append({"role": "user", "content": message})
        if stream:
            return _read(
                self.session.chat(role, instructions=instructions, stream=True, **SETTINGS)
            )
        return _turn(self.session.chat(role, instructions=instructions, **SETTINGS))


@dataclass
class _LangChain:
    """The conversation over a LangChain chat model made anew for each role."""

    model: Callable[[str], ChatOpenAI]
    account: Callable[[AIMessage], dict[str, Any]]
    messages: list[BaseMessage]

    def ask(self, role: str, message: str | None, *, instructions: str, stream: bool) -> Turn:
        if message is not None:
            self.messages.append(HumanMessage(message))
        request = [SystemMessage(instructions), *self.messages]
        model = self.model(role)
        if stream:
            chunks = list(model.stream(request))
            answer: AIMessage = sum(chunks[1:], chunks[0])
        else:
            answer = model.invoke(request)
        self.messages.append(AIMessage(answer.text))
        assert answer.usage_metadata is not None
        return Turn.of(answer.text, self.account(answer), answer.usage_metadata["input_tokens"])


def _turn(completion: Any) -> Turn:
    account = completion.model_extra["prefillshare"]
    assert completion.usage.prompt_tokens_details.cached_tokens == account["cached_tokens"]
    text = completion.choices[0].message.content
    return Turn.of(text, account, completion.usage.prompt_tokens)


def _read(chunks: Any) -> Turn:
    text, last = "", None
    for last in chunks:
        text += "".join(choice.delta.content or "" for choice in last.choices)
    assert last is not None, "an empty stream"
    return Turn.of(text, last.model_extra["prefillshare"], last.usage.prompt_tokens)


def _from_headers(answer: AIMessage) -> dict[str, Any]:
    """ChatOpenAI drops unknown body fields; the response headers say the same."""
    headers = answer.response_metadata["headers"]
    account = {
        name: headers[f"x-prefillshare-{name.replace('_', '-')}"]
        for name in ("session", "prefill_worker", "decode_worker", "affinity")
    }
    return {**account, "cached_tokens": int(headers["x-prefillshare-cached-tokens"])}


@contextmanager
def _openai(url: str, session: str) -> Iterator[Client]:
    headers = {"X-Session-ID": session}
    with openai.OpenAI(base_url=url, api_key="local", default_headers=headers) as client:
        yield _Completions(client, [])


@contextmanager
def _our_openai(url: str, session: str) -> Iterator[Client]:
    with ps.OpenAI(base_url=url, api_key="local", session=session) as client:
        yield _Completions(client, [])


@contextmanager
def _our_async_openai(url: str, session: str) -> Iterator[Client]:
    with asyncio.Runner() as runner:
        client = ps.AsyncOpenAI(base_url=url, api_key="local", session=session)
        yield _AsyncCompletions(client, runner, [])
        runner.run(client.close())


@contextmanager
def _our_session(url: str, session: str) -> Iterator[Client]:
    own = ps.Session(session, base_url=url)
    yield _Session(own)
    own.close()


@contextmanager
def _chat_openai(url: str, session: str) -> Iterator[Client]:
    def model(role: str) -> ChatOpenAI:
        return ChatOpenAI(
            model=role,
            base_url=url,
            api_key=SecretStr("local"),
            default_headers={"X-Session-ID": session},
            include_response_headers=True,
            stream_usage=True,
            **SETTINGS,
        )

    yield _LangChain(model, _from_headers, [])


@contextmanager
def _chat_prefillshare(url: str, session: str) -> Iterator[Client]:
    def model(role: str) -> ChatOpenAI:
        return ChatPrefillShare(model=role, base_url=url, session=session, **SETTINGS)

    yield _LangChain(model, lambda answer: answer.response_metadata["prefillshare"], [])


CLIENTS: dict[str, Callable[[str, str], AbstractContextManager[Client]]] = {
    "openai.OpenAI": _openai,
    "prefillshare_agents.OpenAI": _our_openai,
    "prefillshare_agents.AsyncOpenAI": _our_async_openai,
    "prefillshare_agents.Session": _our_session,
    "langchain_openai.ChatOpenAI": _chat_openai,
    "prefillshare_agents.langgraph.ChatPrefillShare": _chat_prefillshare,
}
"""Name → context manager factory (base URL ending in /v1, fresh session id) → `Client`."""
