"""Leases of a prefill worker that end because nobody will read them.

vLLM ends a lease when a decode worker says that it has read it, or when its time is up. The router
knows earlier that a call is over. It names the call by its X-Request-Id, at any time: the prefill
may be yet to come, under way, leased, read or forgotten.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from prefillshare_server.vllm_plugin.calls import Remembered, router_request_id

CAPACITY = 4096
"""Released calls remembered; by the time one is forgotten, nothing of it is on its way."""


class Releases:
    """Scheduler part: what was released, and what the worker part is still to be told."""

    def __init__(self) -> None:
        self._calls = Remembered(CAPACITY)
        self._leases: set[str] = set()

    def release(self, request_id: str, scheduler: Any) -> list[Any]:
        """End all of the call X-Request-Id `request_id` that vLLM's `scheduler` knows.

        Returns the requests that had not ended, which somebody may still wait for. The blocks of
        an open lease are free after the engine's next step.
        """
        from vllm.v1.request import RequestStatus

        self._calls.put(request_id)
        unfinished: list[str] = []
        for request in scheduler.requests.values():
            if _call(request.request_id) == request_id:
                if request.is_finished():
                    self._leases.add(request.request_id)
                else:
                    unfinished.append(request.request_id)
        aborted: list[Any] = scheduler.finish_requests(unfinished, RequestStatus.FINISHED_ABORTED)
        return aborted

    def released(self, engine_request_id: str) -> bool:
        """Whether the call was released before its prefill ended, so that it gets no lease."""
        return _call(engine_request_id) in self._calls

    def pass_on(self, metadata: NixlConnectorMetadata) -> None:
        """Tell the worker part, with what the scheduler sends it for the next step."""
        metadata.prefillshare_released, self._leases = self._leases, set()


def _call(engine_request_id: str) -> str:
    return router_request_id(engine_request_id, in_engine=True)


class HandoffWorker(NixlPullConnectorWorker):
    """Worker part of the connector: moves KV like vLLM's, and forgets released leases."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._released = Remembered(CAPACITY)
        """Leases that ended here while a decode worker may yet report having read them."""
        self._ending: set[str] = set()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        super().start_load_kv(metadata)
        for request_id in metadata.prefillshare_released:
            if request_id in self._reqs_to_process and request_id not in self._released:
                self._reqs_to_send.pop(request_id, None)
                self._ending.add(request_id)
                # It stays among the known requests, or a late report would be logged as an error.
                if (forgotten := self._released.put(request_id)) is not None:
                    self._reqs_to_process.discard(forgotten)

    def _get_new_notifs(self) -> set[str]:
        """Requests whose lease ended: read, or released. Each is returned once."""
        ended: set[str] = super()._get_new_notifs()
        for request_id in ended & self._released.keys():
            ended.remove(request_id)
            del self._released[request_id]
        ended |= self._ending
        self._ending.clear()
        return ended
