"""The oracle: what a call must have given its client, by the mock language model's own truth."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.client import Outcome
from tests.mocks.mock_pair_answers import logprob_of
from tests.mocks.mock_pair_language import Asked, Vocabulary, expected_tokens
from tests.mocks.mock_pair_text import Fields, parsed, text_of


@dataclass
class Choice:
    """One sequence, as a client has it, or as it should."""

    ids: list[int] = field(default_factory=list)
    fields: Fields = field(default_factory=Fields)
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    call_ids: dict[int, list[str]] = field(default_factory=dict)
    """Ids of each tool call, as often as one came."""
    roles: int = 0


@dataclass(frozen=True, slots=True)
class Truth:
    """An undisturbed answer to one request."""

    kind: str
    body: Mapping[str, Any]
    prompt_tokens: int
    choices: Sequence[Choice]

    @classmethod
    def of(
        cls, words: Vocabulary, kind: str, body: Mapping[str, Any], prompts: Sequence[Sequence[int]]
    ) -> "Truth":
        """Of a request whose prompts have these ids."""
        choices = []
        for ids in prompts:
            for number in range(body.get("n") or 1):
                asked = Asked.of(body, number)
                said, reason = expected_tokens(words, body["model"], ids, asked)
                found = parsed(text_of(words, said), asked.form if kind == "chat" else "text")
                called = kind == "chat" and bool(found.calls) and reason == "stop"
                choices.append(
                    Choice(
                        said,
                        found,
                        "tool_calls" if called else reason,
                        [logprob_of(token) for token in said] if body.get("logprobs") else None,
                    )
                )
        return cls(kind, body, sum(map(len, prompts)), choices)

    @property
    def usage(self) -> dict[str, int]:
        completion = sum(len(choice.ids) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }


@dataclass
class Verdict:
    """How a call ended, and what is wrong with that."""

    end: str = "?"
    """"answered", "left", "hung", or the error's code."""
    problems: list[str] = field(default_factory=list)
    choices: Sequence[Choice] = ()
    """Of an answer."""
    raw: str = ""
    """The first choice as the decoder wrote it."""


def judged(outcome: Outcome, truth: Truth | None) -> Verdict:
    """Compare what a client got with the truth, which is None where no prompt was prefilled."""
    verdict = Verdict()
    if outcome.hung:
        verdict.end = "hung"
        return verdict
    if outcome.crash is not None:
        verdict.problems.append(f"the application raised {outcome.crash!r}")
    try:
        if outcome.streamed:
            _judge_stream(outcome, truth, verdict)
        elif outcome.left:
            verdict.end = "left"
        else:
            _judge_whole(outcome, truth, verdict)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        verdict.problems.append(f"not OpenAI's format: {error!r} in {outcome.body[-300:]!r}")
    return verdict


def _judge_whole(outcome: Outcome, truth: Truth | None, verdict: Verdict) -> None:
    answer = outcome.json()
    if outcome.status != 200:
        _judge_error(answer, verdict)
        if outcome.status is None or outcome.status < 500:
            verdict.problems.append(f"status {outcome.status} for a right request: {answer}")
        return
    verdict.end = "answered"
    choices = [_whole_choice(choice) for choice in answer["choices"]]
    numbers = [choice["index"] for choice in answer["choices"]]
    if numbers != list(range(len(numbers))):
        verdict.problems.append(f"choices {numbers}")
    _judge_complete(choices, answer.get("usage"), answer.get("prefillshare"), truth, verdict)


def _judge_stream(outcome: Outcome, truth: Truth | None, verdict: Verdict) -> None:
    if outcome.left:
        # The last event may be cut: the client did not wait for it.
        outcome.body = outcome.body[: outcome.body.rfind(b"\n\n") + 2]
    events = outcome.events()
    seen: dict[int, Choice] = defaultdict(Choice)
    usage = report = error = None
    done = False
    for event in events:
        if done or error is not None:
            verdict.problems.append(f"an event behind the last one: {event}")
        elif event == "[DONE]":
            done = True
        elif "error" in event:
            error = event
        else:
            usage = event.get("usage") or usage
            report = event.get("prefillshare") or report
            for choice in event["choices"]:
                _add(seen[choice["index"]], choice, verdict)
    if error is not None:
        _judge_error(error, verdict)
    elif outcome.left:
        verdict.end = "left"
    elif done:
        verdict.end = "answered"
        if truth is not None and truth.body.get("stream_options") is None:
            if usage is not None:
                verdict.problems.append("usage that nobody asked for")
            usage = truth.usage
        choices = [seen[index] for index in sorted(seen)]
        _judge_complete(choices, usage, report, truth, verdict)
        return
    else:
        verdict.problems.append("the stream ended without [DONE] and without an error event")
    _judge_beginning(seen, truth, verdict)


def _judge_error(answer: Any, verdict: Verdict) -> None:
    error = answer["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        verdict.problems.append(f"not OpenAI's error body: {answer}")
    if not isinstance(error["code"], str) or error["code"] == "internal_error":
        verdict.problems.append(f"not a clear error: {answer}")
    verdict.end = str(error["code"])


def _judge_complete(
    choices: Sequence[Choice],
    usage: Any,
    report: Any,
    truth: Truth | None,
    verdict: Verdict,
) -> None:
    verdict.choices = choices
    if truth is None:
        verdict.problems.append("an answer although nothing was prefilled")
        return
    if len(choices) != len(truth.choices):
        verdict.problems.append(f"{len(choices)} choices instead of {len(truth.choices)}")
    for index, (got, true) in enumerate(zip(choices, truth.choices, strict=False)):
        shows_ids = truth.body.get("return_token_ids")
        for what, mine, theirs in (
            ("token ids", got.ids, true.ids if shows_ids else []),
            ("fields", got.fields, true.fields),
            ("finish reason", got.finish_reason, true.finish_reason),
            ("logprobs", got.logprobs, true.logprobs),
        ):
            if mine != theirs:
                verdict.problems.append(f"choice {index}: {what} {mine!r} instead of {theirs!r}")
        _judge_calls(got, verdict)
    counted = {key: (usage or {}).get(key) for key in truth.usage}
    if counted != truth.usage:
        verdict.problems.append(f"usage {counted} instead of {truth.usage}")
    if not isinstance(report, dict):
        verdict.problems.append("no report")
        return
    computed = report["decode_prompt_tokens_computed"] or 0
    if computed > len(truth.choices) + report.get("resumed", 0):
        verdict.problems.append(f"decoders computed {computed} prompt tokens")


def _judge_beginning(seen: Mapping[int, Choice], truth: Truth | None, verdict: Verdict) -> None:
    """What came before the end must be the beginning of the truth."""
    for index, got in seen.items():
        if truth is None:
            verdict.problems.append("parts of an answer although nothing was prefilled")
            return
        true = truth.choices[index]
        texts = [
            (got.fields.content, true.fields.content),
            (got.fields.reasoning, true.fields.reasoning),
            *(
                (mine[part], theirs[part])
                for mine, theirs in zip(got.fields.calls, true.fields.calls, strict=False)
                for part in (0, 1)
            ),
        ]
        right = all(theirs.startswith(mine) for mine, theirs in texts)
        right = right and len(got.fields.calls) <= len(true.fields.calls)
        if not right or got.ids != true.ids[: len(got.ids)]:
            verdict.problems.append(
                f"choice {index} broke off after something else: {got} instead of {true}"
            )
        _judge_calls(got, verdict)


def _judge_calls(got: Choice, verdict: Verdict) -> None:
    if got.roles > 1:
        verdict.problems.append(f"the role came {got.roles} times")
    for index, ids in got.call_ids.items():
        if len(ids) != 1 or not ids[0]:
            verdict.problems.append(f"tool call {index} has the ids {ids}")


def _whole_choice(choice: Mapping[str, Any]) -> Choice:
    got = Choice(list(choice.get("token_ids") or ()), finish_reason=choice["finish_reason"])
    got.logprobs = _values(choice.get("logprobs"))
    if "message" in choice:
        said = choice["message"]
        got.fields = Fields(said["content"] or "", said.get("reasoning") or "")
        for index, call in enumerate(said.get("tool_calls") or ()):
            got.fields.calls.append((call["function"]["name"], call["function"]["arguments"]))
            got.call_ids[index] = [call["id"]]
    else:
        got.fields = Fields(choice["text"])
    return got


def _add(got: Choice, choice: Mapping[str, Any], verdict: Verdict) -> None:
    if got.finish_reason is not None:
        verdict.problems.append(f"a chunk behind the finish reason: {choice}")
    got.ids += choice.get("token_ids") or ()
    got.finish_reason = choice.get("finish_reason")
    if (values := _values(choice.get("logprobs"))) is not None:
        got.logprobs = [*(got.logprobs or ()), *values]
    said = choice.get("delta") if "delta" in choice else {"content": choice["text"]}
    assert said is not None
    got.roles += "role" in said
    got.fields.content += said.get("content") or ""
    got.fields.reasoning += said.get("reasoning") or ""
    for call in said.get("tool_calls") or ():
        index, function = call["index"], call.get("function") or {}
        while len(got.fields.calls) <= index:
            got.fields.calls.append(("", ""))
        name, arguments = got.fields.calls[index]
        got.fields.calls[index] = (
            name + (function.get("name") or ""),
            arguments + (function.get("arguments") or ""),
        )
        got.call_ids.setdefault(index, []).extend([call["id"]] if call.get("id") else [])


def _values(logprobs: Any) -> list[float] | None:
    if logprobs is None:
        return None
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return list(logprobs["token_logprobs"])
