"""Runs of graphs and chains keep the session of the block that they began in.

A stream begins when it is first read. One that is read behind the block it was made in is taken to
be that block's, if nothing was called inside. `invoke` and `batch` begin where they stand, and are
never taken for it.

Their nodes run in threads and tasks that are started while the stream is read, in whatever context
its reader has then. So a run is marked at its beginning, by a callback handler that does nothing:
LangChain hands it down to all that runs inside.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from .. import _context
from .._blocks import Block

_AT_ONCE = {"invoke", "ainvoke", "batch", "abatch", "batch_as_completed", "abatch_as_completed"}
_RUNNERS = {"langgraph", "langchain", "langchain_core"}


class _InBlock(BaseCallbackHandler):
    ignore_llm = ignore_retry = ignore_chain = ignore_agent = True
    ignore_retriever = ignore_chat_model = ignore_custom_event = True

    def __init__(self, block: Block | None) -> None:
        self.block = block


_outside = _InBlock(None)
"""Marks runs that began behind a block, and are not of it."""


class _Hook:
    """Asked by LangChain at the beginning of every run, in place of a context variable."""

    def get(self) -> _InBlock | None:
        block = _context.current_block()
        if block is None and var_child_runnable_config.get() is None:
            if _context.is_behind_block() and _began_at_once():
                return _outside
            block = _context.left_block()
        if block is None or block.session is None:
            return None
        if block.tag is None:
            block.tag = _InBlock(block)  # The same for all runs, for LangChain adds none twice.
        tag: _InBlock = block.tag
        return tag


def may_have_left() -> bool:
    """Return whether a node or step calls whose run may be a stream made in a block before."""
    return var_child_runnable_config.get() is not None and _tag_of_run() is not _outside


def _block_of_run() -> Block | None:
    tag = _tag_of_run()
    return tag.block if tag is not None else None


def _tag_of_run() -> _InBlock | None:
    callbacks: Any = (var_child_runnable_config.get() or {}).get("callbacks")
    handlers = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())
    return next((tag for tag in reversed(handlers) if isinstance(tag, _InBlock)), None)


def _began_at_once() -> bool:
    """Whether the run that begins is one of `invoke` or `batch`, not a stream that is read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name in _AT_ONCE and module in _RUNNERS:
            return True
        frame = frame.f_back
    return False


_hook: Any = _Hook()
register_configure_hook(_hook, inheritable=True)
_context.block_of_run = _block_of_run
