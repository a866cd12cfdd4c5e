"""First requests of a started cluster.

They make every decode worker shake hands with every prefill worker and compile what vLLM compiles
on first use (logprobs on CPU: seconds), so that the first user does not wait for it.
"""

from typing import Any
from uuid import uuid4

import aiohttp

from prefillshare_server.router.leases import Leases
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers

ANSWER_S = 120
"""A machine that starts many workers at once compiles for long; a handshake that hangs waits for
ever."""


async def warm_up_pair(
    prefill: WorkerEndpoint,
    decode: WorkerEndpoint,
    http: aiohttp.ClientSession,
    *,
    answer_s: float = ANSWER_S,
) -> None:
    """One call through both workers. Raises aiohttp.ClientError when either refuses it.

    Each of the two may take `answer_s`. They are the same one where an engine does both.
    """
    # One whole block to hand off and a token in the next; the ids exist in every vocabulary.
    prompt = [1 + index % 200 for index in range(prefill.block_size + 2)]
    call = _Call(http, f"warmup-{uuid4().hex}", {"prompt": prompt, "temperature": 0}, answer_s)
    if prefill.phase == "colocated":
        await call.complete(decode, max_tokens=2, logprobs=1)
        return
    try:
        answer = await call.complete(
            prefill,
            max_tokens=1,
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        )
        params = answer["kv_transfer_params"]
        await call.complete(decode, max_tokens=2, logprobs=1, kv_transfer_params=params)
    except aiohttp.ClientError:
        await _give_back(prefill, decode, call.request_id)
        raise


async def _give_back(prefill: WorkerEndpoint, decode: WorkerEndpoint, request_id: str) -> None:
    """End the lease of a failed call, unless the decode worker may still be reading."""
    async with Workers() as workers:
        leases = Leases(workers)
        leases.release_unless_read(decode, prefill, request_id)
        await leases.close()


class _Call:
    """One warm-up call."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        request_id: str,
        common: dict[str, Any],
        answer_s: float,
    ) -> None:
        self._http = http
        self.request_id = request_id
        self._common = common
        self._answer_s = answer_s

    async def complete(self, worker: WorkerEndpoint, **body: Any) -> dict[str, Any]:
        request = self._http.post(
            f"{worker.url}/v1/completions",
            json={"model": worker.model, **self._common, **body},
            headers={"X-Request-Id": self.request_id},
            timeout=aiohttp.ClientTimeout(total=self._answer_s),
        )
        try:
            async with request as response:
                if response.status != 200:
                    text = await response.text()
                    raise aiohttp.ClientError(
                        f"{worker.id} answered the warm-up request with {response.status}: {text}"
                    )
                answer: dict[str, Any] = await response.json()
                return answer
        except TimeoutError:
            raise aiohttp.ClientError(
                f"{worker.id} did not answer the warm-up request within {self._answer_s:g} s"
            ) from None
