"""The server that the pages' programs talk to: the one place that says which it is."""

from __future__ import annotations

from typing import Any

from prefillshare_agents.testing import FakeServer


class DocsServer(FakeServer):
    """The fake server that the SDK has for its users' tests."""

    def script_roles(self, answers: dict[str, list[Any]]) -> None:
        for role, some in answers.items():
            self.script(role, some)
