from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from prefillshare_agents.testing import FakeServer

Ask = Callable[..., Any]


@pytest.fixture
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="local", max_retries=0) as plain:
        yield plain


@pytest.fixture
def ask(client: openai.OpenAI) -> Ask:
    """One chat call: `ask("planner", messages, session="s1", **options)`; returns the answer."""

    def call(
        role: str = "planner",
        messages: Any = ({"role": "user", "content": "hello"},),
        session: str | None = "s1",
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> Any:
        named = {} if session is None else {"X-Session-ID": session}
        return client.chat.completions.create(
            model=role,
            messages=list(messages),
            extra_headers={**named, **(headers or {})},
            **options,
        )

    return call
