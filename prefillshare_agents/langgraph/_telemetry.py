"""What a call cost, on the current OpenTelemetry span. Without OpenTelemetry, nothing happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from opentelemetry import trace
except ImportError:  # never required
    trace = None  # type: ignore[assignment]


def tell_span(call: Any, model: str, account: Mapping[str, Any]) -> None:
    """Set a finished call's attributes on the span around it: no text, no keys.

    `call` is its CallRecord, `account` the server's `prefillshare` object. The names are those of
    OpenTelemetry's conventions for generative AI; ours begin with `prefillshare.`. Where several
    calls share a span, the last one's attributes are seen.
    """
    if trace is None or not (span := trace.get_current_span()).is_recording():
        return
    broken = call.prefix_break or {}
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        "gen_ai.agent.name": call.role,
        "gen_ai.conversation.id": account.get("session"),
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
        "prefillshare.computed_tokens": call.computed_tokens,
        "prefillshare.handoff_bytes": call.handoff_bytes,
        "prefillshare.affinity": call.affinity,
        "prefillshare.prefill_worker": call.prefill_worker,
        "prefillshare.decode_worker": call.decode_worker,
        "prefillshare.break.cause": broken.get("cause"),
        "prefillshare.break.lost_tokens": broken.get("lost_tokens"),
    }
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})
