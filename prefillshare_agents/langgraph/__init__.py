"""LangGraph integration: a chat model and graph nodes that share one prefill per session.

Needs the extra `prefillshare-agents[langgraph]`.
"""

from ._chat import ChatPrefillShare
from ._team import Team

__all__ = ["ChatPrefillShare", "Team"]
