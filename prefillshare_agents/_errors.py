"""What this package raises and warns of, beside openai's own errors."""

from __future__ import annotations

from typing import Any

import openai


class PrefillShareError(openai.OpenAIError):
    """Base of this package's errors, so that `except openai.OpenAIError` covers them too."""


class PrefixBreakError(PrefillShareError, ValueError):
    """A context does not extend its session's, and `on_prefix_break="raise"` forbids that."""


class PrefixBreakWarning(UserWarning):
    """A context does not extend its session's: what comes after the break is prefilled again."""


class SessionLostWarning(UserWarning):
    """A call went out without the session that it may have been meant for."""


class ContextWindowError(PrefillShareError, ValueError):
    """The call's prompt and answer cannot fit the context window; it was not sent."""


class TokenBudgetError(PrefillShareError, ValueError):
    """The call could go over the session's `token_budget`; it was not sent."""


class AnswerError(PrefillShareError, ValueError):
    """A model's answer cannot join the context, for example two tool calls of one id."""

    def __init__(self, text: str, answer: dict[str, Any]) -> None:
        super().__init__(text)
        self.answer = answer
        """The message as the model gave it. The call is counted."""
