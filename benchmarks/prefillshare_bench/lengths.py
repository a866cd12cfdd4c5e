"""How long a workload's prompts are on a base: what `max_model_len` has to be."""

from __future__ import annotations

from prefillshare_bench.traces import RecordedCall, Workload
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.lint.rendering import Exact
from prefillshare_server.models import store


def longest(workload: Workload, base: str) -> int:
    """Most tokens that a prompt and its answer have.

    Recorded requests are written by the base's own template, in the router's layout and in that of
    stock vLLM, and counted by its tokenizer. Raises ConfigError for one that cannot be written, and
    where there is no such base.
    """
    drawn = workload.longest()
    if drawn is not None:
        return drawn
    writer = Exact(store.resolve(base), None)
    most = 0
    for session in workload.sessions:
        for index, call in enumerate(session.calls):
            assert isinstance(call, RecordedCall)
            try:
                written = [
                    writer.write(call.request, layout).tokens
                    for layout in ("model", "context_first")
                ]
            except ValueError as error:
                where = f"workload {workload.name}, session {session.id}, call {index}"
                remedy = "leave the request out, or mend it"
                raise ConfigError(Problem(where, str(error), remedy)) from None
            most = max(most, *(tokens + call.answer for tokens in written))
    return most
