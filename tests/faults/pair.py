"""The mock pair without a router: a test does itself what a router does, or ought not to do."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from tests.faults.bench import vocabulary
from tests.mocks.mock_pair_decode import PairDecode
from tests.mocks.mock_pair_ledger import PairCluster
from tests.mocks.mock_pair_prefill import PairPrefill


@dataclass
class Pair:
    """One mock prefill worker and one mock decode worker of role alpha."""

    cluster: PairCluster
    prefill: PairPrefill
    decode: PairDecode
    http: aiohttp.ClientSession

    def prompt(self, text: str = "a question about the weather in Paris and then some #1") -> Any:
        """Token ids of a prompt; more than two blocks, not a whole number of them."""
        return self.cluster.words.encode("some words " * 12 + text)

    async def prefilled(self, ids: Sequence[int], request_id: str = "r") -> Any:
        """`kv_transfer_params` of a prefill; None if it was given up."""
        body = {
            "model": "base",
            "prompt": list(ids),
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        headers = {"X-Request-Id": request_id}
        url = f"{self.prefill.url}/v1/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            return (await response.json()).get("kv_transfer_params")

    async def decoded(
        self,
        params: Any,
        ids: Sequence[int],
        generated: Sequence[int] = (),
        *,
        request_id: str = "r",
        **fields: Any,
    ) -> tuple[int, Any]:
        """Status and answer of a decode request: JSON, or the events of a stream."""
        if generated:
            ours = params["prefillshare"] | {"generated_ids": list(generated)}
            params = params | {"prefillshare": ours}
        body = {
            "model": "alpha",
            "n": 1,
            "prompt": list(ids),
            "return_token_ids": True,
            "kv_transfer_params": params,
            **fields,
        }
        headers = {"X-Request-Id": request_id}
        url = f"{self.decode.url}/v1/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            text = await response.text()
            if response.content_type != "text/event-stream":
                return response.status, json.loads(text)
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        return 200, [json.loads(event) for event in events if event != "[DONE]"]

    async def release(self, request_id: str) -> None:
        """What a router does with a prefill that nobody will read."""
        url = f"{self.prefill.url}/prefillshare/release"
        async with self.http.post(url, json={"request_id": request_id}) as response:
            assert response.status == 204


@asynccontextmanager
async def pair(base_dir: Path, *, blocks: int = 33) -> AsyncIterator[Pair]:
    """Run a pair whose workers have so many blocks each."""
    cluster = PairCluster(vocabulary(base_dir), Random(0))
    prefill = PairPrefill(cluster, "prefill-0", blocks)
    decode = PairDecode(cluster, "alpha-0", blocks, role="alpha")
    decode.merging = 0.0
    await prefill.start()
    await decode.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Pair(cluster, prefill, decode, http)
    finally:
        await prefill.close()
        await decode.close()
