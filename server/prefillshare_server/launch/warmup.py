"""First requests of a started cluster.

They make every decode worker shake hands with every prefill worker and compile what vLLM compiles
on first use (logprobs on CPU: seconds), so that the first user does not wait for it.
"""

from typing import Any
from uuid import uuid4

import aiohttp

from prefillshare_server.router.topology import WorkerEndpoint

ANSWER_S = 120
"""A machine that starts many workers at once compiles for long; a handshake that hangs waits for
ever."""


async def warm_up_pair(
    prefill: WorkerEndpoint, decode: WorkerEndpoint, http: aiohttp.ClientSession
) -> None:
    """One call through both workers. Raises aiohttp.ClientError when either refuses it."""
    # One whole block to hand off and a token in the next; the ids exist in every vocabulary.
    prompt = [1 + index % 200 for index in range(prefill.block_size + 2)]
    common: dict[str, Any] = {"prompt": prompt, "temperature": 0}
    answer = await _complete(
        prefill,
        {
            **common,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        },
        http,
    )
    await _complete(
        decode,
        {
            **common,
            "max_tokens": 2,
            "logprobs": 1,
            "kv_transfer_params": answer["kv_transfer_params"],
        },
        http,
    )


async def _complete(
    worker: WorkerEndpoint, body: dict[str, Any], http: aiohttp.ClientSession
) -> dict[str, Any]:
    request = http.post(
        f"{worker.url}/v1/completions",
        json={"model": worker.model, **body},
        headers={"X-Request-Id": f"warmup-{uuid4().hex}"},
        timeout=aiohttp.ClientTimeout(total=ANSWER_S),
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
            f"{worker.id} did not answer the warm-up request within {ANSWER_S} s"
        ) from None
