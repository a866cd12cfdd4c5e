"""prefillshare_agents: agent graphs of specialised models over one shared prefill.

The SDK for a PrefillShare server. Importing it loads neither torch nor vLLM nor LangChain;
`prefillshare_agents.langgraph` needs the extra of that name.
"""

from ._client import AsyncOpenAI, OpenAI
from ._context import current_session
from ._identity import SESSION_HEADER
from ._records import CallRecord, RoleUsage, SessionTotals, SessionUsage
from ._session import AsyncSession, Session
from ._stream import AsyncChatStream, ChatStream

__all__ = [
    "SESSION_HEADER",
    "AsyncChatStream",
    "AsyncOpenAI",
    "AsyncSession",
    "CallRecord",
    "ChatStream",
    "OpenAI",
    "RoleUsage",
    "Session",
    "SessionTotals",
    "SessionUsage",
    "current_session",
]
