"""Greedy generation by a running server: the same prompts, as token ids over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import openai

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_training.evaluate.engine import Answer

if TYPE_CHECKING:
    from prefillshare_training.evaluate.engine import Progress

TIMEOUT_S = 600.0
RETRIES = 5
"""Of calls that a busy server turns away."""
_NO_KEY = "local"


class Served:
    """A role of a server, asked like `Engine`: completions without a session, so in any order."""

    def __init__(self, url: str, role: str, *, concurrency: int = 8) -> None:
        """Ask the server for its roles. Raises ConfigError if it or the role is not there."""
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.role = role
        self._concurrency = concurrency
        self.context_length = self._context_length()
        """The most tokens of a prompt and its answer together."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        progress: Progress | None = None,
    ) -> list[Answer]:
        """As `Engine.generate`. Raises ConfigError when the server refuses or is gone."""
        return asyncio.run(self._generate(prompts, max_tokens, sorted(stop_ids), progress))

    async def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop_ids: list[int],
        progress: Progress | None,
    ) -> list[Answer]:
        room = asyncio.Semaphore(self._concurrency)
        answers: dict[int, Answer] = {}

        async def ask(client: openai.AsyncOpenAI, number: int) -> None:
            prompt = list(prompts[number])
            budget = min(max_tokens, self.context_length - len(prompt))
            async with room:
                answers[number] = await self._ask(client, prompt, budget, stop_ids)
            if progress is not None:
                progress(number, answers[number])

        try:
            async with self._client() as client, asyncio.TaskGroup() as tasks:
                for number in range(len(prompts)):
                    tasks.create_task(ask(client, number))
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise self._failed(first) if isinstance(first, openai.OpenAIError) else first from None
        return [answers[number] for number in range(len(prompts))]

    async def _ask(
        self, client: openai.AsyncOpenAI, prompt: list[int], budget: int, stop_ids: list[int]
    ) -> Answer:
        response = await client.completions.create(
            model=self.role,
            prompt=prompt,
            temperature=0,
            max_tokens=budget,
            logprobs=0,
            extra_body={
                "return_token_ids": True,
                "stop_token_ids": stop_ids,
                # A checkpoint's generation_config.json may ask for another.
                "repetition_penalty": 1.0,
            },
        )
        [choice] = response.choices
        if choice.finish_reason not in ("stop", "length"):
            raise ConfigError(
                Problem(
                    self.url,
                    f"broke an answer off ({choice.finish_reason})",
                    "look at its log and run the command again; finished items are kept",
                )
            )
        extra: dict[str, Any] = choice.model_extra or {}
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        return Answer(
            tuple(extra["token_ids"]),
            tuple(value or 0.0 for value in logprobs or ()),
            choice.finish_reason,
        )

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=_NO_KEY,
            timeout=TIMEOUT_S,
            max_retries=RETRIES,
        )

    def _context_length(self) -> int:
        try:
            with openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=_NO_KEY, timeout=30, max_retries=0
            ) as client:
                cards = {card.id: card.model_extra or {} for card in client.models.list()}
        except openai.OpenAIError as error:
            raise self._failed(error) from None
        roles = [
            name
            for name, card in cards.items()
            if card.get("prefillshare", {}).get("callable") is not False
        ]
        if self.role not in roles:
            raise ConfigError(
                Problem(
                    f"--role {self.role}",
                    f"{self.url} serves no such role",
                    f"name one of: {', '.join(sorted(roles))}",
                )
            )
        return int(cards[self.role].get("max_model_len") or 2**31)

    def _failed(self, error: BaseException) -> ConfigError:
        if isinstance(error, openai.APIStatusError):
            return ConfigError(
                Problem(
                    self.url,
                    f"answered {error.status_code}: {error.message}",
                    "mend what it names and run the command again; finished items are kept",
                )
            )
        return ConfigError(
            Problem(
                self.url,
                f"cannot be reached ({error})",
                "start it with prefillshare serve, or correct --server",
            )
        )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
