"""Runs of graphs and chains keep the session of the block that they began in.

A stream begins when it is first read. One that is read behind the block it was made in is taken to
be that block's, if nothing was called inside.

Their nodes run in threads and tasks that are started while the stream is read, in whatever context
its reader has then. So a run is marked at its beginning, by a callback handler that does nothing:
LangChain hands it down to all that runs inside.
"""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from .. import _context
from .._blocks import Block


class _InBlock(BaseCallbackHandler):
    ignore_llm = ignore_retry = ignore_chain = ignore_agent = True
    ignore_retriever = ignore_chat_model = ignore_custom_event = True

    def __init__(self, block: Block) -> None:
        self.block = block


class _Hook:
    """Asked by LangChain at the beginning of every run, in place of a context variable."""

    def get(self) -> _InBlock | None:
        block = _context.current_block()
        if block is None and var_child_runnable_config.get() is None:
            block = _context.left_block()
        if block is None or block.session is None:
            return None
        if block.tag is None:
            block.tag = _InBlock(block)  # The same for all runs, for LangChain adds none twice.
        tag: _InBlock = block.tag
        return tag


def in_run() -> bool:
    """Return whether a graph's node or a chain's step calls."""
    return var_child_runnable_config.get() is not None


def _block_of_run() -> Block | None:
    callbacks: Any = (var_child_runnable_config.get() or {}).get("callbacks")
    handlers = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())
    tags = (handler for handler in reversed(handlers) if isinstance(handler, _InBlock))
    return next((tag.block for tag in tags), None)


_hook: Any = _Hook()
register_configure_hook(_hook, inheritable=True)
_context.block_of_run = _block_of_run
