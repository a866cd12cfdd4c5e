"""HTTP to the workers: one pooled client, errors of the network as errors of the call."""

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
from pydantic_core import from_json, to_json

from prefillshare_server.router.errors import (
    Phase,
    WorkerRefused,
    WorkerUnreachable,
    timed_out,
)
from prefillshare_server.router.topology import WorkerEndpoint

KEEP_ALIVE_S = 3
"""Below the workers' own 5 s, so that an idle connection is never closed under a new request."""

CONNECT_S = 5


class Workers:
    """Sends requests to workers. Leaving the `async with` block closes all connections."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            # Each wait has its own limit, set where it is waited for.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        worker: WorkerEndpoint,
        path: str,
        *,
        phase: Phase,
        body: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send and give the response with its body unread; closing early aborts the request.

        Raises WorkerRefused for a status of 400 and above, WorkerUnreachable if the connection
        fails or breaks, also inside the block.
        """
        assert self._session is not None, "Workers must be entered before use"
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if request_id is not None:
            headers["X-Request-Id"] = request_id
        try:
            async with self._session.request(
                method,
                worker.url + path,
                data=None if body is None else to_json(body),
                headers=headers,
            ) as response:
                if response.status >= 400:
                    raise WorkerRefused(worker.id, response.status, _error(await response.read()))
                yield response
        except aiohttp.ClientError as error:
            unconnected = isinstance(error, aiohttp.ClientConnectorError)
            # Other reasons not to connect lie in the network, or here.
            refused = (
                isinstance(error, aiohttp.ClientConnectorError)
                and error.os_error.errno == errno.ECONNREFUSED
            )
            reason = error or type(error).__name__
            raise WorkerUnreachable(
                worker.id, phase, reason, sent=not unconnected, refused=refused
            ) from error

    async def json(
        self,
        method: str,
        worker: WorkerEndpoint,
        path: str,
        *,
        phase: Phase,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Any:
        """Send and return the whole JSON answer. Raises RouterError(504) after `timeout_s`."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.request(
                    method, worker, path, phase=phase, body=body, request_id=request_id
                ) as response,
            ):
                return from_json(await response.read())
        except TimeoutError:
            raise timed_out(phase, worker.id, timeout_s) from None
        except ValueError as error:
            raise WorkerUnreachable(worker.id, phase, f"its answer is not JSON: {error}") from None


def _error(raw: bytes) -> Mapping[str, Any]:
    try:
        answer = from_json(raw)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
