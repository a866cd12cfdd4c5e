"""What the client gets: the decode workers' answers as one, without the cluster's internals."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.fanout import Answer
from prefillshare_server.router.handoff import Handoff

_INTERNAL = ("kv_transfer_params", "ec_transfer_params")
_TOKEN_IDS = ("prompt_token_ids", "token_ids")
_REASONING = ("reasoning", "reasoning_content")


class WholeReply:
    """One JSON answer."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._answers: dict[int, Answer] = {}

    def take(self, handoff: Handoff, answer: Answer) -> Sequence[Answer]:
        """Take in one sequence's answer; nothing can be sent before all are there."""
        self._answers[handoff.reader.index] = answer
        return ()

    def finish(self, usage: Mapping[str, Any], report: Mapping[str, Any]) -> Sequence[Answer]:
        """The client's answer."""
        answers = [self._answers[index] for index in sorted(self._answers)]
        choices = []
        for index, answer in enumerate(answers):
            [choice] = answer["choices"]
            choices.append(_shown(choice, self._ask) | {"index": index})
        whole = _shown(answers[0], self._ask) | {
            "id": self._ask.answer_id,
            "model": self._ask.role,
            "choices": choices,
            "usage": usage,
        }
        return [{**whole, "prefillshare": report}]


class StreamReply:
    """Chunks, passed on as they come; the last one carries the report."""

    def __init__(self, ask: Ask, sequences: int) -> None:
        self._ask = ask
        self._unfinished = sequences
        self._created = int(time.time())
        self._held: Answer | None = None
        """The chunk that ends the last sequence, if no usage chunk will follow it."""
        self._end: Answer = {}
        """What a decode worker sent with its usage."""

    def take(self, handoff: Handoff, answer: Answer) -> Sequence[Answer]:
        """What can be sent now."""
        if not answer.get("choices"):
            self._end = answer
            return ()
        choice = _shown(answer["choices"][0], self._ask)
        if not self._ask.return_token_ids and _says_nothing(choice):
            return ()
        chunk = self._named(answer)
        chunk["choices"] = [choice | {"index": handoff.reader.index}]
        if choice.get("finish_reason") is not None:
            self._unfinished -= 1
            if not self._unfinished and not self._ask.include_usage:
                self._held = chunk
                return ()
        return (chunk,)

    def finish(self, usage: Mapping[str, Any], report: Mapping[str, Any]) -> Sequence[Answer]:
        """The last chunk: the usage, or the one that was held back."""
        last = self._held or {**self._named(self._end), "choices": [], "usage": usage}
        return [{**last, "prefillshare": report}]

    def _named(self, answer: Answer) -> Answer:
        kind = "chat.completion.chunk" if self._ask.kind == "chat" else "text_completion"
        return (
            {"object": kind}
            | _shown(answer, self._ask)
            | {
                "id": self._ask.answer_id,
                "created": self._created,
                "model": self._ask.role,
            }
        )


def _shown(part: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """A copy without what the client did not ask for."""
    hidden = _INTERNAL if ask.return_token_ids else _INTERNAL + _TOKEN_IDS
    shown = {key: value for key, value in part.items() if key not in hidden}
    if ask.body.get("include_reasoning") is False:
        for name in {"message", "delta"} & shown.keys():
            said = shown[name].items()
            shown[name] = {key: value for key, value in said if key not in _REASONING}
    return shown


def _says_nothing(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk exists only for its token ids, which the router asked for and not the client.

    Happens while a tool or reasoning parser waits for more text.
    """
    if choice.get("finish_reason") is not None or choice.get("logprobs") is not None:
        return False
    if "delta" in choice:
        return not any(value is not None for value in choice["delta"].values())
    return False
