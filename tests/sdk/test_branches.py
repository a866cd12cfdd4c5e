"""Forks, merges, checkpoints and saved sessions."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from prefillshare_agents import AsyncSession, Session
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}
MORE: Any = {"role": "user", "content": "And the sun?"}


@pytest.fixture
def session(server: FakeServer) -> Iterator[Session]:
    made = Session("trunk", base_url=server.url, messages=[TASK])
    made.chat("planner")
    yield made
    made.close()


def texts(session: Session | AsyncSession) -> list[Any]:
    return [message["content"] for message in session.messages]


def test_a_fork_starts_with_the_context_and_goes_its_own_way(session: Session) -> None:
    branch = session.fork("branch")
    branch.append(MORE)

    assert texts(branch) == [*texts(session), MORE["content"]]
    assert branch.id == "branch"
    assert branch.parent_id == "trunk"
    assert branch.calls == ()


def test_a_fork_starts_where_its_parent_is_prefilled(session: Session, server: FakeServer) -> None:
    branch = session.fork()
    branch.append(MORE)
    branch.chat("critic")

    [call] = branch.calls
    assert server.chats[-1].header("x-parent-session-id") == "trunk"
    assert server.chats[-1].session == branch.id
    assert call.cached_tokens == session.calls[0].prompt_tokens


def test_calls_inside_the_block_of_a_fork_name_the_parent_too(
    session: Session, server: FakeServer
) -> None:
    from prefillshare_agents import OpenAI

    with OpenAI(base_url=server.url, api_key="k") as client, session.fork("branch"):
        client.chat.completions.create(model="critic", messages=[TASK])

    assert server.chats[-1].sessions == ["branch"]
    assert server.chats[-1].header("x-parent-session-id") == "trunk"


def test_merging_takes_over_the_last_answer_and_the_calls(
    session: Session, server: FakeServer
) -> None:
    branch = session.fork()
    branch.append(MORE)
    server.script("150 million km")
    branch.chat("critic")
    session.merge(branch)

    assert session.messages[-1] == {"role": "user", "content": "150 million km"}
    assert [call.role for call in session.calls] == ["planner", "critic"]
    with pytest.raises(RuntimeError, match="closed"):
        branch.chat("critic")
    assert branch.id not in server.sessions


def test_a_summary_of_ones_own_can_be_merged(session: Session) -> None:
    session.merge(session.fork(), {"role": "user", "content": "Both are far.", "name": "notes"})

    assert session.messages[-1]["content"] == "Both are far."


def test_what_cannot_be_merged_is_refused_and_changes_nothing(session: Session) -> None:
    before = session.messages
    stranger = Session()
    with pytest.raises(ValueError, match="not a fork of 'trunk'"):
        session.merge(stranger, "x")
    empty = Session("empty", messages=[TASK]).fork()
    with pytest.raises(ValueError, match="give summary="):
        Session("empty").merge(empty)

    assert session.messages == before


def test_forks_of_forks_work_and_know_their_own_parent(session: Session) -> None:
    child = session.fork("child")
    grandchild = child.fork("grandchild")
    grandchild.chat("critic")

    assert grandchild.parent_id == "child"


def test_a_fork_says_that_its_client_went_with_its_parent(server: FakeServer) -> None:
    parent = Session("p", base_url=server.url, messages=[TASK])
    branch = parent.fork()
    parent.close()

    with pytest.raises(RuntimeError, match="'p' is closed"):
        branch.chat("critic")


def test_restoring_takes_back_what_came_after_the_checkpoint(session: Session) -> None:
    place = session.checkpoint()
    session.append(MORE)
    session.chat("critic")
    session.restore(place)

    assert len(session.messages) == 2
    assert session.usage.calls == 2
    session.append(MORE)
    assert session.messages[-1] == MORE


def test_restoring_opens_the_tool_calls_again_that_were_open(server: FakeServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    session = Session(messages=[TASK, {"role": "assistant", "content": None, "tool_calls": [call]}])
    place = session.checkpoint()
    result: Any = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    session.append(result)
    session.restore(place)
    session.append(result)

    assert session.messages[-1] == result


def test_a_checkpoint_of_another_session_is_refused(session: Session) -> None:
    with pytest.raises(ValueError, match="one of session 'other'"):
        session.restore(Session("other").checkpoint())


def test_a_checkpoint_that_was_taken_back_is_refused(session: Session) -> None:
    early = session.checkpoint()
    session.append(MORE)
    late = session.checkpoint()
    session.restore(early)
    with pytest.raises(ValueError, match="no longer has the 3 messages"):
        session.restore(late)


def test_a_place_that_was_taken_back_is_not_found_by_its_number(session: Session) -> None:
    early = session.checkpoint()
    session.append(MORE)
    late = session.checkpoint()
    session.restore(early)
    session.append({"role": "user", "content": "Something else."}, MORE)
    with pytest.raises(ValueError, match="taken back"):
        session.restore(late)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_what_was_taken_back_does_not_join(
    stream: bool, session: Session, server: FakeServer
) -> None:
    place = session.checkpoint()
    session.append(MORE)
    if stream:
        chunks: Any = session.chat("critic", stream=True)
        next(chunks)
        session.restore(place)
        list(chunks)
    else:
        gate = threading.Event()
        server.delay(gate)
        thread = threading.Thread(target=session.chat, args=("critic",))
        thread.start()
        server.wait_for_chats(2, 60)
        session.restore(place)
        gate.set()
        thread.join()

    assert len(session.messages) == 2
    assert [call.role for call in session.calls] == ["planner", "critic"]


def test_a_merge_that_failed_at_the_end_is_finished_without_counting_twice(
    session: Session, server: FakeServer
) -> None:
    branch = session.fork()
    branch.chat("critic")
    server.fail(400)
    with pytest.raises(openai.BadRequestError):
        session.merge(branch)
    session.merge(branch)
    session.merge(branch)

    assert len(session.messages) == 3
    assert session.usage.calls == 2
    assert branch.id not in server.sessions


def test_a_fork_needs_an_id_of_its_own(session: Session) -> None:
    with pytest.raises(ValueError, match="id of its parent"):
        session.fork("trunk")


def test_a_saved_session_keeps_its_options(tmp_path: Path) -> None:
    Session(messages=[TASK], speakers=False, token_budget=5).save(tmp_path / "s.json")
    loaded = Session.load(tmp_path / "s.json", token_budget=7)
    loaded.save(tmp_path / "t.json")

    options = json.loads((tmp_path / "t.json").read_text())["options"]
    assert (options["speakers"], options["token_budget"]) == (False, 7)


def test_a_saved_session_goes_on_in_another_process(
    session: Session, server: FakeServer, tmp_path: Path
) -> None:
    session.save(tmp_path / "s.json")
    resumed = Session.load(tmp_path / "s.json", base_url=server.url)
    resumed.append(MORE)
    resumed.chat("critic")

    assert resumed.id == "trunk"
    assert resumed.messages[:2] == session.messages
    assert [call.role for call in resumed.calls] == ["planner", "critic"]
    assert resumed.calls[0] == session.calls[0]
    assert resumed.calls[1].affinity == "hit"
    resumed.close()


def test_a_saved_fork_and_its_mode_are_kept(tmp_path: Path) -> None:
    branch = Session("p", messages=[TASK], mode="isolate").fork("c")
    branch.save(tmp_path / "s.json")
    loaded = Session.load(tmp_path / "s.json")

    assert (loaded.parent_id, loaded.mode) == ("p", "isolate")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "JSON"), ('{"id": "x"}', "messages"), ("[]", "the file")],
)
def test_a_file_that_is_no_session_is_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=rf"s\.json: .*{reason}"):
        Session.load(tmp_path / "s.json")


def test_a_file_is_written_whole_or_not_at_all(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.save(tmp_path / "s.json")
    before = (tmp_path / "s.json").read_text()
    session.append(MORE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        session.save(tmp_path / "s.json")

    assert (tmp_path / "s.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]
    assert json.loads(before)["format"] == "prefillshare-session-1"


def test_a_session_says_how_it_can_be_kept_where_it_cannot_be_copied(session: Session) -> None:
    import copy

    with pytest.raises(TypeError, match=r"save\(path\)"):
        copy.deepcopy(session)


def test_a_fork_in_isolation_is_isolated_too(server: FakeServer) -> None:
    session = Session("i", base_url=server.url, messages=[TASK], mode="isolate")
    session.fork("j").chat("planner")
    session.close()

    assert server.chats[0].header("x-prefillshare-mode") == "isolate"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode is 'off'"):
        Session(mode="off")  # type: ignore[arg-type]


async def test_the_async_session_does_the_same(server: FakeServer, tmp_path: Path) -> None:
    session = AsyncSession("trunk", base_url=server.url, messages=[TASK])
    await session.chat("planner")
    place = session.checkpoint()
    branch = session.fork()
    branch.append(MORE)
    server.script("150 million km")
    await branch.chat("critic")
    await session.merge(branch)
    await session.save(tmp_path / "s.json")
    resumed = await AsyncSession.load(tmp_path / "s.json", base_url=server.url)
    session.restore(place)
    await session.close()
    await resumed.close()

    assert texts(resumed)[-1] == "150 million km"
    assert len(texts(session)) == 2
    assert server.chats[-1].header("x-parent-session-id") == "trunk"
