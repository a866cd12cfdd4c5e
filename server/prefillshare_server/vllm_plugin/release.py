"""Giving back a handoff that no request will read, once.

vLLM gives the handoff back when it rejects a request, but not for every way of rejecting, so the
router asks for it whenever a decode worker refused. A prefill worker that is told twice warns of
invalid KV blocks.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

CAPACITY = 4096
"""Handoffs remembered; by the time one is forgotten, both ways have long been gone through."""

Notify = Callable[..., Awaitable[None]]


def once_per_handoff(notify: Notify, capacity: int = CAPACITY) -> Notify:
    """`AsyncLLM.notify_kv_transfer_request_rejected` that passes each handoff on only once."""
    given_back: OrderedDict[str, None] = OrderedDict()

    async def notify_once(
        request_id: str, kv_transfer_params: dict[str, Any], **options: Any
    ) -> None:
        handoff = str(kv_transfer_params.get("remote_request_id"))
        if handoff in given_back:
            return
        given_back[handoff] = None
        while len(given_back) > capacity:
            given_back.popitem(last=False)
        await notify(request_id, kv_transfer_params, **options)

    return notify_once
