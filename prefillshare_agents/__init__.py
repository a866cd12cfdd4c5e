"""prefillshare_agents: agent graphs of specialised models over one shared prefill.

The SDK for a PrefillShare server. Importing it loads neither torch nor vLLM nor LangChain;
`prefillshare_agents.langgraph` needs the extra of that name. Names are
loaded when they are first used: openai alone takes half a second.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from ._async_session import AsyncSession
    from ._client import AsyncOpenAI, OpenAI
    from ._context import current_session
    from ._errors import (
        AnswerError,
        ContextWindowError,
        PrefillShareError,
        PrefixBreakError,
        PrefixBreakWarning,
        SessionLostWarning,
        TokenBudgetError,
    )
    from ._identity import SESSION_HEADER
    from ._records import CallRecord, PrefillAhead, RoleUsage, SessionTotals, SessionUsage
    from ._session import Session
    from ._stream import AsyncChatStream, ChatStream
    from ._transcript import Checkpoint

__all__ = [
    "SESSION_HEADER",
    "AnswerError",
    "AsyncChatStream",
    "AsyncOpenAI",
    "AsyncSession",
    "CallRecord",
    "ChatStream",
    "Checkpoint",
    "ContextWindowError",
    "OpenAI",
    "PrefillAhead",
    "PrefillShareError",
    "PrefixBreakError",
    "PrefixBreakWarning",
    "RoleUsage",
    "Session",
    "SessionLostWarning",
    "SessionTotals",
    "SessionUsage",
    "TokenBudgetError",
    "current_session",
]

_MODULES = {
    "AnswerError": "._errors",
    "AsyncChatStream": "._stream",
    "AsyncOpenAI": "._client",
    "AsyncSession": "._async_session",
    "CallRecord": "._records",
    "ChatStream": "._stream",
    "Checkpoint": "._transcript",
    "ContextWindowError": "._errors",
    "OpenAI": "._client",
    "PrefillAhead": "._records",
    "PrefillShareError": "._errors",
    "PrefixBreakError": "._errors",
    "PrefixBreakWarning": "._errors",
    "SessionLostWarning": "._errors",
    "RoleUsage": "._records",
    "SESSION_HEADER": "._identity",
    "Session": "._session",
    "SessionTotals": "._records",
    "SessionUsage": "._records",
    "TokenBudgetError": "._errors",
    "current_session": "._context",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
