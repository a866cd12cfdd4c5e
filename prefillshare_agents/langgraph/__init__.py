"""LangGraph integration: chat models, nodes and agents that share one prefill per session.

Needs the extra `prefillshare-agents[langgraph]`.
"""

import typing


def _explained(missing: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error with its remedy, if what is missing comes with the extra."""
    if (missing.name or "").partition(".")[0] not in {
        "langchain",
        "langchain_core",
        "langchain_openai",
        "langgraph",
    }:
        return missing
    return ModuleNotFoundError(
        f"prefillshare_agents.langgraph needs {missing.name}, which is not installed: install the "
        "extra `langgraph`",
        name=missing.name,
    )


try:
    from ._bind import BoundGraph, bind, session_config
    from ._chat import ChatPrefillShare
    from ._retry import worth_retrying
    from ._team import Team
except ModuleNotFoundError as _missing:
    raise _explained(_missing) from None

if typing.TYPE_CHECKING:
    from ._middleware import PrefillShareMiddleware

__all__ = [
    "BoundGraph",
    "ChatPrefillShare",
    "PrefillShareMiddleware",
    "Team",
    "bind",
    "session_config",
    "worth_retrying",
]


def __getattr__(name: str) -> typing.Any:
    # Models and nodes work without LangChain's agents, whose package need not be there.
    if name == "PrefillShareMiddleware":
        try:
            from ._middleware import PrefillShareMiddleware
        except ModuleNotFoundError as missing:
            raise _explained(missing) from None

        return PrefillShareMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
