"""How the fake server counts what calls share, and how it explains what they do not."""

from typing import Any

import pytest

from prefillshare_agents.testing import FakeServer

from .conftest import Ask

TASK = {"role": "user", "content": "How far is the moon from the earth, and how do we know?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def told(text: str, *messages: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}, *messages]


GROWN = [TASK, said("Measure it with light.")]
TOOL: Any = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def run_team(ask: Ask) -> None:
    """Four agents, each with instructions of its own, in one conversation."""
    talk = [TASK]
    for role in ("planner", "researcher", "critic", "writer"):
        tools = [TOOL] if role == "researcher" else []
        options: Any = {"tools": tools} if tools else {}
        ask(role, told(f"You are the {role}. Do only what a {role} does.", *talk), **options)
        talk.append(said(f"What the {role} had to say about it."))


def test_agents_of_one_conversation_share_all_of_it(server: FakeServer, ask: Ask) -> None:
    run_team(ask)

    assert server.shared_ratio() == 1.0
    server.assert_shared(1.0)


@pytest.mark.parametrize("server", [{"layout": "model"}], indirect=True)
def test_the_control_with_the_system_message_first_shares_nothing(
    server: FakeServer, ask: Ask
) -> None:
    run_team(ask)

    assert server.shared_ratio() == 0.0
    with pytest.raises(AssertionError, match="role_prompt_first: Each role's own instructions"):
        server.assert_shared()


def test_the_prompt_puts_the_conversation_first(server: FakeServer, ask: Ask) -> None:
    ask("critic", told("Be strict.", TASK), tools=[TOOL])

    context, tail = server.rendered(0).split("<|im_start|>system\n")
    assert context == f"<|im_start|>user\n{TASK['content']}<|im_end|>\n"
    assert tail.startswith("Be strict.\n\n# Tools")
    assert tail.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("server", [{"layout": "model"}], indirect=True)
def test_the_control_puts_the_system_message_first(server: FakeServer, ask: Ask) -> None:
    ask("critic", told("Be strict.", TASK))

    assert server.rendered(0).startswith(
        "<|im_start|>system\nBe strict.<|im_end|>\n<|im_start|>user"
    )


def test_a_call_finds_the_prompts_before_it_cached(server: FakeServer, ask: Ask) -> None:
    first = ask("planner", told("Plan.", TASK)).usage
    second = ask("critic", told("Judge.", *GROWN)).usage

    assert first.prompt_tokens_details.cached_tokens == 0
    # The context of the first call, and the tag that opens what comes behind it.
    assert second.prompt_tokens_details.cached_tokens == server.shared(1) == 21


@pytest.mark.parametrize("server", [{"block_size": 16}], indirect=True)
def test_only_whole_blocks_are_found_cached(server: FakeServer, ask: Ask) -> None:
    prompt = ask("planner", GROWN).usage.prompt_tokens

    assert prompt == 33
    assert ask("critic", GROWN).usage.prompt_tokens_details.cached_tokens == 32


def test_another_session_finds_the_same_prefix_cached_but_does_not_count_as_sharing(
    server: FakeServer, ask: Ask
) -> None:
    ask()
    other = ask(session="s2")

    assert other.usage.prompt_tokens_details.cached_tokens > 0
    assert server.shared(1) == 0


def test_an_edited_message_is_named_with_the_text_around_it(server: FakeServer, ask: Ask) -> None:
    ask("planner", [{"role": "user", "content": "It is 10:41. How far is the moon?"}])
    clock = [{"role": "user", "content": "It is 10:42. How far is the moon?"}, said("Far.")]
    ask("critic", told("Judge.", *clock))

    assert server.shared_ratio() < 0.5
    with pytest.raises(AssertionError) as raised:
        server.assert_shared()
    message = str(raised.value)
    assert "call 1 (role 'critic', session 's1') shared 7 of 17 context tokens" in message
    assert "with call 0" in message
    assert "timestamp: A date or time in earlier text" in message
    assert "messages[1].content: " in message
    assert "10:41" in message
    assert "10:42" in message
    assert "fix: Take the time once" in message


def test_trimmed_history_is_named(server: FakeServer, ask: Ask) -> None:
    talk = [TASK, said("one"), TASK, said("two"), TASK]
    ask("planner", talk)
    ask("planner", talk[2:])

    with pytest.raises(AssertionError, match="history_trimmed"):
        server.assert_shared()


def test_branches_of_one_conversation_are_no_loss(server: FakeServer, ask: Ask) -> None:
    ask("planner", GROWN)
    for branch in ("left", "right"):
        ask("writer", [*GROWN, {"role": "user", "content": f"Take the {branch} way."}])

    assert server.shared_ratio() == 1.0


def test_what_is_new_in_a_call_cannot_be_shared_and_does_not_count(
    server: FakeServer, ask: Ask
) -> None:
    ask("planner", [TASK])
    ask("critic", [TASK, said("new " * 1000)])

    assert server.shared_ratio() == 1.0
    assert server.shared_ratio(of="prompt") < 0.05


def test_calls_without_a_session_have_nothing_to_share(server: FakeServer, ask: Ask) -> None:
    for _ in range(3):
        ask(session=None)

    with pytest.raises(AssertionError, match="3 calls were answered, 3 of them without a session"):
        server.assert_shared()


def test_calls_that_each_have_a_session_of_their_own_have_nothing_to_share(
    server: FakeServer, ask: Ask
) -> None:
    for name in ("s1", "s2"):
        ask(session=name)

    with pytest.raises(AssertionError, match="the others in 2 sessions"):
        server.assert_shared()


def test_a_call_that_lost_its_session_counts(server: FakeServer, ask: Ask) -> None:
    ask("planner", GROWN)
    ask("critic", GROWN)
    ask("writer", GROWN, session=None)

    assert server.shared_ratio() == 0.5
    with pytest.raises(AssertionError, match="it repeats an earlier call and carries no session"):
        server.assert_shared()


def test_an_independent_call_without_a_session_does_not_count(server: FakeServer, ask: Ask) -> None:
    ask("planner", GROWN)
    ask("critic", GROWN)
    ask("titles", [{"role": "user", "content": "Give it a title."}], session=None)

    server.assert_shared(1.0)


def test_a_child_shares_with_its_parent(server: FakeServer, ask: Ask) -> None:
    ask("planner", GROWN)
    ask("critic", GROWN, session="child", headers={"X-Parent-Session-ID": "s1"})

    assert server.shared(1) > 0
    server.assert_shared(1.0)


def test_roles_that_are_kept_apart_share_nothing(server: FakeServer, ask: Ask) -> None:
    for role in ("planner", "critic", "critic"):
        ask(role, GROWN, headers={"X-PrefillShare-Mode": "isolate"})

    assert server.shared_ratio() == 0.5
    assert [call["cached_tokens"] for call in server.calls("s1")] == [0, 0, 32]
    with pytest.raises(AssertionError, match="isolate keeps the roles apart"):
        server.assert_shared()


def test_a_session_that_ended_has_nothing_to_share_any_more(server: FakeServer, ask: Ask) -> None:
    ask("planner", GROWN, headers={"X-Session-Final": "true"})
    ask("critic", GROWN)

    assert server.sessions["s1"]["calls"] == 1
    assert server.shared(1) == 0


def test_an_order_of_what_cannot_be_is_refused(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="'everything'"):
        server.shared_ratio(of="everything")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'sideways'"):
        FakeServer(layout="sideways")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\['planner'\]"):
        FakeServer("planner")
