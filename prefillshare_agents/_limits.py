"""Stopping a call that cannot fit, before it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, Literal

from ._errors import ContextWindowError, TokenBudgetError

ContextWindow = int | Literal["auto"] | None

_TOKENS_PER_MESSAGE = 16
"""Room for what templates write around a message."""
_SURE_TO_FIT = 1024
"""Tokens that any served model has room for, while its context window is not known yet."""


class Budget:
    """Prompt and completion tokens that a session and its forks may use together."""

    def __init__(self, limit: int | None, spent: int = 0) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"token_budget is {limit}; give at least 1, or None for no end")
        self.limit = limit
        self._spent = spent
        self._reserved = 0
        # Re-entrant: a stream that is dropped gives its tokens back from the garbage collector.
        self._lock = threading.RLock()

    @property
    def left(self) -> int:
        """Tokens that no call has used or may still use. Only for a budget with a limit."""
        assert self.limit is not None
        return self.limit - self._spent - self._reserved

    def reserve(self, role: str, tokens: int) -> Hold:
        """Set `tokens` aside for a call. Raises TokenBudgetError if there are not so many."""
        with self._lock:
            if self.limit is not None and tokens > self.left:
                raise TokenBudgetError(
                    f"role {role!r}: the call can take {tokens:,} tokens, {self._spent:,} are "
                    f"spent and {self._reserved:,} set aside for running calls, token_budget is "
                    f"{self.limit:,}: raise it, lower max_tokens"
                    f"{' (also of the running calls)' if self._reserved else ''}, "
                    "or end the session"
                )
            self._reserved += tokens
            return Hold(self, tokens)

    def spend(self, tokens: int, aside: int = 0) -> None:
        """Count what a call has used, in place of what was set aside for it."""
        with self._lock:
            self._spent += tokens
            self._reserved -= aside


class Hold:
    """Tokens of a budget that are set aside for one call, until it is over."""

    def __init__(self, budget: Budget, tokens: int) -> None:
        self._budget = budget
        self._tokens = tokens

    def spend(self, tokens: int) -> None:
        """Count what the call has used, and give back the rest."""
        # At one blow: between the two, another call could be given what is used already.
        aside, self._tokens = self._tokens, 0
        self._budget.spend(tokens, aside)

    def release(self) -> None:
        """Give back all of it. Does nothing if the call was counted, or this was done."""
        self.spend(0)


class Room:
    """The context window of a session's calls, and how long each request may be."""

    def __init__(self, context_window: ContextWindow) -> None:
        if isinstance(context_window, str) and context_window != "auto":
            raise ValueError(
                f"context_window is {context_window!r}; give 'auto', a number of tokens or None"
            )
        if isinstance(context_window, int) and context_window < 1:
            raise ValueError(f"context_window is {context_window}; give at least 1 token")
        self._checks_window = context_window is not None
        self._window = context_window if isinstance(context_window, int) else None
        self.countable = True
        """False once the server turned out to count no tokens."""

    def needs_count(self, request: Mapping[str, Any], budget: Budget) -> bool:
        """Whether the server has to count the tokens of `request` before it is sent.

        A token stands for at least one byte, so most calls are known to fit without counting.
        """
        most = most_tokens(request) + wanted(request) * answers(request)
        window = self._window if self._window is not None else _SURE_TO_FIT
        if budget.limit is not None and (most > budget.left or not _says_how_many(request)):
            return self.countable
        return self.countable and self._checks_window and most > window

    def counted(self, max_model_len: object) -> None:
        """Take note of the server's own limit, unless a smaller one was given."""
        if isinstance(max_model_len, int) and max_model_len > 0:
            self._window = min(self._window or max_model_len, max_model_len)

    def require(self, role: str, request: Mapping[str, Any], prompt: int) -> None:
        """Raise ContextWindowError if `prompt` tokens and the answer do not fit together."""
        answer = wanted(request)
        if self._checks_window and self._window and prompt + answer > self._window:
            raise ContextWindowError(
                f"role {role!r}: the call has {prompt:,} prompt tokens and wants {answer:,} more, "
                f"the context window is {self._window:,}: lower max_tokens, go back with "
                "restore(checkpoint), or go on in a new session with a summary of this one"
            )

    def capped(self, request: Mapping[str, Any], budget: Budget, prompt: int) -> dict[str, Any]:
        """Return `request` with room for its answers within budget and window.

        One that says itself how much it wants stays as it is.
        """
        if _says_how_many(request):
            return dict(request)
        most = (budget.left - prompt) // answers(request)
        if self._window is not None:
            # What the window has no room for is not set aside either: other calls may need it.
            most = min(most, self._window - prompt)
        return {**request, "max_completion_tokens": max(most, 1)}


def most_tokens(request: Mapping[str, Any]) -> int:
    """Return a number of prompt tokens that `request` cannot exceed."""
    messages = request["messages"]
    text = json.dumps([messages, request.get("tools")], ensure_ascii=False, default=str)
    return len(text.encode()) + _TOKENS_PER_MESSAGE * len(messages)


def wanted(request: Mapping[str, Any]) -> int:
    """Return how many tokens `request` wants in an answer; at least one."""
    for name in ("max_completion_tokens", "max_tokens"):
        if isinstance(request.get(name), int):
            return int(request[name])
    return 1


def answers(request: Mapping[str, Any]) -> int:
    """Return how many answers `request` wants."""
    number = request.get("n")
    return number if isinstance(number, int) and number > 0 else 1


def _says_how_many(request: Mapping[str, Any]) -> bool:
    return any(isinstance(request.get(n), int) for n in ("max_completion_tokens", "max_tokens"))
