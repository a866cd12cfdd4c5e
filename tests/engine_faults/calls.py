"""Calls to the router whose every token id is known, streamed or not."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

Kind = Literal["chat", "completions"]

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class CallFailedError(Exception):
    """The call ended in an error that says what happened."""

    def __init__(self, status: int | None, code: str | None, message: str) -> None:
        super().__init__(f"{status or 'inside the stream'} {code}: {message}")
        self.status = status
        """None for an error event inside a stream."""
        self.code = code


class CutShortError(Exception):
    """The stream ended without an error and without [DONE], or the connection broke."""


@dataclass
class Answer:
    """What the client got."""

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    """The `prefillshare` object."""
    decode_worker: str = ""
    """The one the answer began on."""

    @property
    def message(self) -> dict[str, Any]:
        """As an assistant's turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def add(self, part: Mapping[str, Any]) -> None:
        """A chunk of a stream, or a whole answer."""
        self.usage = part.get("usage") or self.usage
        self.report = part.get("prefillshare") or self.report
        self.prompt_ids = part.get("prompt_token_ids") or self.prompt_ids
        for choice in part["choices"]:
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.text += said.get("content") or ""
            for index, call in enumerate(said.get("tool_calls") or ()):
                self._add_tool_call(call.get("index", index), call)

    def _add_tool_call(self, index: int, call: Mapping[str, Any]) -> None:
        if index == len(self.tool_calls):
            empty = {"name": "", "arguments": ""}
            self.tool_calls.append({"id": call["id"], "type": "function", "function": empty})
        function = self.tool_calls[index]["function"]
        for key in ("name", "arguments"):
            function[key] += call["function"].get(key) or ""


async def chunks(
    http: aiohttp.ClientSession,
    url: str,
    kind: Kind,
    body: Mapping[str, Any],
    session: str | None,
    answer: Answer,
) -> AsyncIterator[Answer]:
    """`answer` after each part of it that came; greedy, with token ids and usage.

    Raises CallFailedError, CutShortError.
    """
    options = {"include_usage": True} if body.get("stream") else None
    full = {"temperature": 0, "return_token_ids": True, "stream_options": options, **body}
    headers = {"X-Session-ID": session} if session else {}
    try:
        async with http.post(url + _PATHS[kind], json=full, headers=headers) as response:
            answer.decode_worker = response.headers.get("X-PrefillShare-Decode-Worker", "")
            if response.status != 200:
                error = (await response.json())["error"]
                raise CallFailedError(response.status, error["code"], error["message"])
            if not body.get("stream"):
                answer.add(await response.json())
                yield answer
                return
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                event = json.loads(line[6:])
                if error := event.get("error"):
                    raise CallFailedError(None, error["code"], error["message"])
                answer.add(event)
                yield answer
    except aiohttp.ClientError as error:
        raise CutShortError(repr(error)) from error
    raise CutShortError("the stream ended without [DONE]")


async def call(
    http: aiohttp.ClientSession,
    url: str,
    kind: Kind,
    body: Mapping[str, Any],
    session: str | None = None,
) -> Answer:
    """The whole answer. Raises CallFailedError, CutShortError."""
    answer = Answer()
    async for _ in chunks(http, url, kind, body, session, answer):
        pass
    return answer
