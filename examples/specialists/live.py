"""The specialists' success on a running cluster: the same prompts to a role and to the base."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from examples.react.roles import ROLES
from examples.specialists.generate import Row, held_out
from examples.specialists.score import correct

BASE_ROLE = "untrained"
"""The cluster's role whose decoder is the base itself."""

MAX_TOKENS = 80
"""Room for the longest right answer, twice."""


@dataclass(frozen=True)
class Success:
    """How many of `n` held-out items were done right."""

    n: int
    base: int | None
    """None when the cluster has no role `BASE_ROLE`."""
    specialist: int


def measure(base_url: str, items: int) -> dict[str, Success]:
    """The success of each role on its first `items` held-out rows, answered freely.

    A role and the base are asked the same prompts one after the other: the base's KV is then
    there already. Raises openai.OpenAIError when the cluster does not answer.
    """
    return asyncio.run(_measure(base_url, items))


async def _measure(base_url: str, items: int) -> dict[str, Success]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="local") as client:
        served = {model.id async for model in client.models.list()}
        found = {}
        for role in ROLES:
            rows = held_out(role)[:items]
            specialist = await _right(client, role, rows)
            base = await _right(client, BASE_ROLE, rows) if BASE_ROLE in served else None
            found[role] = Success(len(rows), base, specialist)
        return found


async def _right(client: openai.AsyncOpenAI, model: str, rows: Sequence[Row]) -> int:
    answers = await asyncio.gather(*(_answer(client, model, row) for row in rows))
    return sum(
        correct(row.role, answer, row.answer) for row, answer in zip(rows, answers, strict=True)
    )


async def _answer(client: openai.AsyncOpenAI, model: str, row: Row) -> str:
    # With "none" the tools stand in the prompt all the same, but what the model writes is neither
    # guided nor parsed.
    tools: dict[str, Any] = {"tools": row.tools, "tool_choice": "none"} if row.tools else {}
    done = await client.chat.completions.create(
        model=model,
        messages=row.prompt,  # type: ignore[arg-type]  # plain dictionaries
        max_tokens=MAX_TOKENS,
        temperature=0,
        **tools,
    )
    return done.choices[0].message.content or ""
