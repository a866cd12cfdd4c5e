"""What the fake server answers, and in which order."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ._errors import ApiError

if TYPE_CHECKING:
    from ._request import Request


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that is an error. Clients may retry it at once (`retry-after-ms: 1`)."""

    status: int
    code: str | None = None
    message: str = "a scripted failure"
    param: str | None = None
    retry: bool | None = None
    """Sent as `x-should-retry`; None leaves it to the client."""

    def error(self) -> ApiError:
        headers = {"retry-after-ms": "1"}
        if self.retry is not None:
            headers["x-should-retry"] = str(self.retry).lower()
        return ApiError(
            self.status, self.message, code=self.code, param=self.param, headers=headers
        )


Answer: TypeAlias = str | Mapping[str, Any] | int | Failure | Callable[["Request"], Any]
"""A text; an assistant message, optionally with its `finish_reason`; an HTTP status or a
`Failure`; or a function that is given the request and returns one of these."""


def tool_call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """An answer that calls one tool. The call's id is given when it is answered."""
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


class Script:
    """Answers by role. Used under the server's lock."""

    def __init__(self) -> None:
        self._planned: dict[str | None, deque[Answer]] = {}
        self._always: dict[str | None, Callable[[Request], Answer]] = {}
        self._tool_calls = 0

    def add(self, role: str | None, answers: Answer | Iterable[Answer]) -> None:
        if callable(answers):
            self._always[role] = answers
            return
        if isinstance(answers, str | Mapping | int | Failure):
            answers = [answers]
        self._planned.setdefault(role, deque()).extend(answers)

    def take(self, role: str) -> Answer | None:
        """The next answer of `role`, or of any role; None if there is none left."""
        for name in (role, None):
            if self._planned.get(name):
                return self._planned[name].popleft()
            if name in self._always:
                return self._always[name]
        return None

    @property
    def unused(self) -> dict[str | None, int]:
        """How many answers are left, by role."""
        return {role: len(left) for role, left in self._planned.items() if left}

    def tool_call_id(self) -> str:
        self._tool_calls += 1
        return f"chatcmpl-tool-{self._tool_calls}"


def resolved(answer: Answer, request: Request) -> Mapping[str, Any]:
    """The message that `answer` stands for; raises the ApiError of a failure."""
    while callable(answer):
        answer = answer(request)
    if isinstance(answer, int):
        answer = Failure(answer)
    if isinstance(answer, Failure):
        raise answer.error()
    if isinstance(answer, str):
        return {"content": answer}
    if isinstance(answer, Mapping):
        return answer
    raise TypeError(f"{answer!r} is no answer; give a text, a message, a status or a function")


def with_whole_tool_calls(
    message: Mapping[str, Any], new_id: Callable[[], str]
) -> Mapping[str, Any]:
    """`message` with tool calls in OpenAI's form, as a server sends them."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if not calls:
        return message
    return {**message, "tool_calls": [_whole(call, new_id) for call in calls]}


def _whole(call: Mapping[str, Any], new_id: Callable[[], str]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {
        "id": call.get("id") or new_id(),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
