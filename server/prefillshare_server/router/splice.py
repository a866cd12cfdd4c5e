"""One uninterrupted answer out of several attempts.

A decode worker that resumes an answer begins it anew: it replays what was generated before and goes
on. What the client has already is taken out here. Text is compared as a whole rather than chunk by
chunk, since under load vLLM puts several tokens into one chunk, and its tool and reasoning parsers
then cut elsewhere.
"""

from collections.abc import Mapping
from typing import Any

from prefillshare_server.router.errors import resume_mismatch
from prefillshare_server.router.fanout import Answer

_COMPLETION_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class StreamSplice:
    """Of one streamed sequence."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Generated so far and known to the client."""
        self._sent: dict[tuple[str, ...], str] = {}
        """Text of each field the client has, by its path in a delta."""
        self._replayed: dict[tuple[str, ...], str] = {}
        """Text of each field in this attempt."""
        self._position = 0
        """Tokens of this attempt."""
        self._resumed = False

    def restart(self, partial: Answer | None) -> None:
        """The attempt ended early; another one follows. `partial` is not used for a stream."""
        self._resumed = bool(self._sent or self.ids)
        self._replayed = {}
        self._position = 0

    def take(self, chunk: Answer) -> Answer | None:
        """What of `chunk` is new to the client; None if nothing is. Does not change `chunk`.

        Raises RouterError(502) if the attempt contradicts what the client has.
        """
        if not chunk.get("choices"):
            return chunk
        [choice] = chunk["choices"]
        ids = choice.get("token_ids") or []
        known = max(0, len(self.ids) - self._position)
        if ids[:known] != self.ids[self._position : self._position + len(ids)]:
            raise resume_mismatch("token ids")
        fresh = ids[known:]
        self._position += len(ids)
        self.ids += fresh
        if "delta" in choice:
            said: dict[str, Any] = {"delta": self._new_delta(choice["delta"])}
        else:
            said = {"text": self._new_text(("text",), choice.get("text") or "")}
        if not self._resumed:
            return chunk
        if choice.get("finish_reason") is not None:
            self._require_whole()
        if not fresh and not any(said.values()) and choice.get("finish_reason") is None:
            return None
        spliced = choice | said | {"token_ids": fresh}
        spliced["logprobs"] = _last_logprobs(choice.get("logprobs"), len(fresh))
        spliced.pop("prompt_token_ids", None)
        rest = {key: value for key, value in chunk.items() if key != "prompt_token_ids"}
        return {**rest, "choices": [spliced]}

    def _require_whole(self) -> None:
        """An attempt that ends before it is where the client is was another answer."""
        if self._position < len(self.ids):
            raise resume_mismatch("fewer tokens")
        for path, sent in self._sent.items():
            if len(self._replayed.get(path, "")) < len(sent):
                raise resume_mismatch(".".join(path))

    def _new_delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        new: dict[str, Any] = {}
        for key, value in delta.items():
            if key == "tool_calls":
                if calls := [call for each in value or () if (call := self._new_call(each))]:
                    new[key] = calls
            elif key == "role":
                if self._new_text((key,), value or "") or not self._resumed:
                    new[key] = value
            elif isinstance(value, str):
                if text := self._new_text((key,), value):
                    new[key] = text
            elif value is not None and not self._resumed:
                new[key] = value
        return new

    def _new_call(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        """What of a tool call is new. Its id is the one the client got first: vLLM's are random."""
        index = str(call.get("index", 0))
        function = call.get("function") or {}
        begun = ("tool_calls", index, "name") in self._sent
        name = self._new_text(("tool_calls", index, "name"), function.get("name") or "")
        arguments = self._new_text(
            ("tool_calls", index, "arguments"), function.get("arguments") or ""
        )
        if not begun:
            return dict(call)
        if not name and not arguments:
            return None
        said = {"name": name} if name else {}
        return {"index": call.get("index", 0), "function": {**said, "arguments": arguments}}

    def _new_text(self, path: tuple[str, ...], text: str) -> str:
        """The part of `text` that goes beyond what the client has of the field at `path`."""
        replayed = self._replayed[path] = self._replayed.get(path, "") + text
        sent = self._sent.get(path, "")
        if sent.startswith(replayed):
            self._sent[path] = sent
            return ""
        if not replayed.startswith(sent):
            raise resume_mismatch(".".join(path))
        self._sent[path] = replayed
        return replayed[len(sent) :]


class WholeSplice:
    """Of one sequence that is answered as a whole: attempts that ended early bring ids only."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: Mapping[str, Any] | None = None
        """Of `ids`."""

    def restart(self, partial: Answer | None) -> None:
        """The attempt ended early, with `partial` as its answer if it gave one."""
        if partial is None:
            return
        choice = self._spliced(partial)["choices"][0]
        self.ids, self._logprobs = list(choice.get("token_ids") or ()), choice.get("logprobs")

    def take(self, answer: Answer) -> Answer:
        """`answer` with the logprobs of replayed tokens, for which a worker has placeholders.

        Raises RouterError(502) if the attempt contradicts the ones before.
        """
        return self._spliced(answer)

    def _spliced(self, answer: Answer) -> Answer:
        [choice] = answer["choices"]
        known = len(self.ids)
        if list(choice.get("token_ids") or ())[:known] != self.ids:
            raise resume_mismatch("token ids")
        logprobs = choice.get("logprobs")
        if not known or logprobs is None:
            return answer
        joined = _joined(self._logprobs or {}, logprobs, known)
        return {**answer, "choices": [{**choice, "logprobs": joined}]}


def _joined(before: Mapping[str, Any], now: Mapping[str, Any], known: int) -> dict[str, Any]:
    """`now` with its first `known` entries taken from `before`."""
    joined = dict(now)
    for key in ("content", *_COMPLETION_LOGPROBS):
        if isinstance(now.get(key), list) and isinstance(before.get(key), list):
            joined[key] = [*before[key][:known], *now[key][known:]]
    return joined


def _last_logprobs(logprobs: Mapping[str, Any] | None, count: int) -> dict[str, Any] | None:
    """Logprobs of the last `count` tokens of a chunk."""
    if logprobs is None or not count:
        return None
    last = dict(logprobs)
    for key in ("content", *_COMPLETION_LOGPROBS):
        if isinstance(last.get(key), list):
            last[key] = last[key][-count:]
    return last
