"""A prefix break is told once, with its cause, and a fork is none."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from prefillshare_prefix import Break, Cause, History
from prefillshare_server.config import LayoutSettings
from prefillshare_server.models import jinja_env
from prefillshare_server.models.layout import Layout
from prefillshare_server.router import breaks
from prefillshare_server.router.breaks import HEADER, PrefixBreak
from prefillshare_server.router.ledger import Ledger, Lost
from prefillshare_server.router.prompt import Prompts
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.turns import Turns
from tests.router.conftest import CHATML, Bench

SESSION = {"X-Session-ID": "s"}
RULES = "Answer in one sentence, and name the numbers that you used. " * 4

THOUGHTLESS = CHATML.replace(
    "message['content'] +",
    "(message['content'] if loop.last or loop.nextitem.role != 'user' "
    "else message['content'].split('</think>')[-1]) +",
)
"""As reasoning models have it: thoughts go once the next question is there."""

WITH_CLOCK = "{{ '<|im_start|>system\n' + strftime_now('%H:%M') + '<|im_end|>\n' }}" + CHATML


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


class Talk:
    """A session whose prompts are rendered, judged and remembered, without any worker."""

    def __init__(self, directory: Path, kind: Any = "context-first") -> None:
        layout = Layout.for_model(directory, LayoutSettings(kind=kind))
        self.prompts = Prompts(layout, Tokens(directory), max_model_len=100_000)
        words = "model" if self.prompts.head_first else "context_first"
        self.session = Session("s", Ledger(), Turns(), history=History(words))  # type: ignore[arg-type]

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> PrefixBreak | None:
        body = {"messages": list(messages), **fields}
        prompt = await self.prompts._chat(body, self.session)
        end = self.session.ledger.keep_context(
            prompt.kept, prompt.new_text, prompt.context_ids[prompt.kept_tokens :], "alpha"
        )
        breaks.keep(self.session, body, end, whole=self.prompts.head_first)
        return prompt.broken


def with_template(base_dir: Path, folder: Path, template: str) -> Path:
    directory = folder / "base"
    shutil.copytree(base_dir, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


async def test_a_context_that_goes_on_is_no_break(base_dir: Path) -> None:
    talk = Talk(base_dir)
    assert await talk.ask(user("a question")) is None
    assert await talk.ask(user("a question"), said("an answer"), user("more")) is None
    assert await talk.ask(user("a question")) is None


async def test_branches_are_no_break(base_dir: Path) -> None:
    """Also where the context they fork from was never sent alone."""
    talk = Talk(base_dir)
    start = [user("a question"), said("an answer")]
    for number in range(15):
        assert await talk.ask(*start, user(f"branch {number}")) is None
    assert await talk.ask(*start, user("branch 3"), said("yes"), user("and then")) is None


async def test_another_task_is_reported_and_no_loss(base_dir: Path) -> None:
    talk = Talk(base_dir)
    await talk.ask(user("a question about one"))
    found = await talk.ask(user("a question about two"))
    assert found is not None
    assert (found.why.cause, found.why.is_loss) == (Cause.UNRELATED, False)


async def test_roles_with_instructions_of_their_own_are_no_break(base_dir: Path) -> None:
    talk = Talk(base_dir)
    for head in ("Plan.", "Criticise.", "Plan."):
        system = {"role": "system", "content": head}
        assert await talk.ask(system, user("a question"), tools=[tool(head)]) is None


async def test_an_edit_in_the_middle_is_named_although_earlier_contexts_still_fit(
    base_dir: Path,
) -> None:
    talk = Talk(base_dir)
    start = [user("a question"), said("an answer")]
    await talk.ask(start[0])
    await talk.ask(*start, user("It is 10:41 now."))
    found = await talk.ask(*start, user("It is 10:42 now."), said("good"), user("more"))
    assert found is not None
    assert (found.why.cause, found.why.message_index) == (Cause.TIMESTAMP, 2)
    assert found.lost.lost_tokens > 0


async def test_the_message_is_counted_as_the_client_sent_it(base_dir: Path) -> None:
    talk = Talk(base_dir)
    system = {"role": "system", "content": "Plan."}
    await talk.ask(system, user("a question about 10:41"))
    found = await talk.ask(system, user("a question about 10:42"), said("an answer"))
    assert found is not None
    assert found.why.message_index == 1


async def test_reordered_tools_break_where_the_model_renders_them_first(base_dir: Path) -> None:
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
    talk = Talk(base_dir, "model")
    talk.prompts = Prompts(Layout(template, None), Tokens(base_dir), max_model_len=100_000)
    one, other = tool("add"), tool("search")
    await talk.ask(user("a question"), tools=[one, other])
    found = await talk.ask(user("a question"), said("yes"), user("more"), tools=[other, one])
    assert found is not None
    assert (found.why.cause, found.lost.token_index) == (Cause.TOOL_ORDER, found.lost.token_index)
    again = [user("a question"), said("yes"), user("more"), said("no"), user("and")]
    assert await talk.ask(*again, tools=[one, other]) is None


async def test_thoughts_that_the_template_drops_are_the_cause(
    base_dir: Path, tmp_path: Path
) -> None:
    talk = Talk(with_template(base_dir, tmp_path, THOUGHTLESS))
    thought = said("<think>numbers</think>an answer")
    result = {"role": "tool", "content": "42", "tool_call_id": "c"}
    await talk.ask(user("a question"))
    assert await talk.ask(user("a question"), thought, result) is None
    found = await talk.ask(user("a question"), thought, user("more"))
    assert found is not None
    assert found.why.cause is Cause.THINK_STRIPPED


async def test_a_change_that_the_layout_does_not_write_is_no_break(base_dir: Path) -> None:
    """Also where a branch keeps the ledger from saying that the text goes on."""
    talk = Talk(base_dir)
    start = [user("a question"), said("an answer")]
    for more in ([user("one")], [user("two")], [user("one"), said("yes"), user("more")]):
        await talk.ask(*start, *more)
    named = {**user("a question"), "name": "bob"}
    assert await talk.ask(named, start[1], user("one"), said("yes"), user("more")) is None
    found = await talk.ask(user("no question"), start[1], user("one"), said("yes"), user("more"))
    assert found is not None


async def test_a_clock_in_the_template_is_the_cause(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        minute_now = 41

        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 1, 1, 10, cls.minute_now)

    monkeypatch.setattr(jinja_env, "datetime", Clock)
    talk = Talk(with_template(base_dir, tmp_path, WITH_CLOCK))
    await talk.ask(user("a question"))
    assert await talk.ask(user("a question"), said("yes"), user("more")) is None
    Clock.minute_now = 42
    again = [user("a question"), said("yes"), user("more"), said("no"), user("and")]
    found = await talk.ask(*again)
    assert found is not None
    assert (found.why.cause, found.why.message_index) == (Cause.TIMESTAMP, None)


async def test_a_template_variable_that_changes_the_beginning_is_a_break(
    base_dir: Path, tmp_path: Path
) -> None:
    template = "{{ '<|im_start|>tool\n' + (style or 'plain') + '<|im_end|>\n' }}" + CHATML
    talk = Talk(with_template(base_dir, tmp_path, template))
    await talk.ask(user("a question"))
    kwargs = {"style": "other"}
    found = await talk.ask(
        user("a question"), said("yes"), user("more"), chat_template_kwargs=kwargs
    )
    assert found is not None
    assert found.why.cause is Cause.TEMPLATE


@pytest.mark.parametrize("letter", ["x", "é", "…", "😀", '"', "\n"])
def test_the_header_is_ascii_json_of_at_most_a_kilobyte(letter: str) -> None:
    why = Break(Cause.MESSAGE_EDITED, 2, letter * 3000, "a", "b")
    value = PrefixBreak(Lost(10, 20), why).header()
    assert len(value) <= 1024
    assert value.isascii()
    assert value.isprintable()
    told = json.loads(value)
    assert told["detail"].rstrip("…") in letter * 3000
    assert set(told) == {
        "cause",
        "message_index",
        "token_index",
        "lost_tokens",
        "detail",
        "fix",
    }


async def test_an_answer_and_its_header_say_the_same(bench: Bench) -> None:
    _, _, unbroken = await bench.chat(f"It is 10:41. {RULES}", headers=SESSION)
    assert HEADER not in unbroken
    _, answer, headers = await bench.chat(f"It is 10:42. {RULES}", headers=SESSION)
    found = answer["prefillshare"]["break"]
    told = json.loads(headers[HEADER])
    assert told == {name: found[name] for name in told}
    assert (found["cause"], found["message_index"]) == ("timestamp", 0)
    assert found["expected"] != found["found"]
    assert found["fix"]
    label = 'prefillshare_prefix_breaks_total{cause="timestamp",model="alpha"}'
    assert await bench.metric(label) == 1


async def test_a_stream_tells_it_before_the_first_token(bench: Bench) -> None:
    await bench.chat(f"It is 10:41. {RULES}", headers=SESSION)
    body = {"model": "beta", "messages": [user(f"It is 10:42. {RULES}")], "stream": True}
    url = f"{bench.url}/v1/chat/completions"
    async with bench.http.post(url, json=body, headers=SESSION) as response:
        assert json.loads(response.headers[HEADER])["cause"] == "timestamp"
        await response.read()


async def test_answers_that_branch_are_no_break(bench: Bench) -> None:
    """Two roles answer one context, and the conversation goes on from each of the two answers."""
    answers = []
    for role in ("alpha", "beta"):
        _, answer, _ = await bench.chat("a question", model=role, headers=SESSION)
        answers.append(answer["choices"][0]["message"])
    for answer in answers:
        messages = [user("a question"), answer, user("more")]
        body = {"model": "alpha", "messages": messages}
        _, told, _ = await bench.post("/v1/chat/completions", body, SESSION)
        assert told["prefillshare"]["break"] is None


async def test_a_sessions_calls_are_listed_with_what_each_cost(bench: Bench) -> None:
    long = "another question about numbers " * 8
    answers = [(await bench.chat(long, model=r, headers=SESSION))[1] for r in ("alpha", "beta")]
    answers.append((await bench.chat("the weather", headers=SESSION))[1])
    _, listed = await bench.get("/v1/sessions/s/calls")
    assert listed["object"] == "list"
    calls = listed["data"]
    assert [call["index"] for call in calls] == [0, 1, 2]
    assert [call["role"] for call in calls] == ["alpha", "beta", "alpha"]
    for call, answer in zip(calls, answers, strict=True):
        report = answer["prefillshare"]
        assert call["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert call["context_tokens"] < call["prompt_tokens"]
        for field in ("cached_tokens", "computed_tokens", "break"):
            assert call[field] == report[field]
    assert [call["break"] is None for call in calls] == [True, True, False]


async def test_only_the_latest_calls_are_listed(bench: Bench) -> None:
    await bench.chat(headers=SESSION)
    session = bench.router.sessions.get("s")
    assert session is not None
    for _ in range(300):
        session.calls.append(session.calls[0])
    assert len((await bench.get("/v1/sessions/s/calls"))[1]["data"]) == 256


async def test_calls_of_an_unknown_session_are_a_404(bench: Bench) -> None:
    status, body = await bench.get("/v1/sessions/nobody/calls")
    assert (status, body["error"]["code"]) == (404, "session_not_found")
