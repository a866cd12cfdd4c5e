"""The same conversation works through every client: plain openai, ours, LangChain's, ours."""

from collections.abc import Callable

import pytest

from tests.conversation import CLIENTS, hold_conversation
from tests.served import Served

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", CLIENTS)
def test_a_conversation_of_two_roles(
    name: str, served: Served, new_session: Callable[[], str]
) -> None:
    with CLIENTS[name](f"{served.url}/v1", new_session()) as client:
        hold_conversation(client, ("planner", "solver"))
