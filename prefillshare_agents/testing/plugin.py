"""The pytest plugin: a fake server and a session on it, as fixtures.

Loaded by every pytest run of an environment with the SDK, so it imports nothing before a fixture
is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from prefillshare_agents import Session
    from prefillshare_agents.testing import FakeServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("prefillshare").addoption(
        "--prefillshare-min-shared",
        type=_ratio,
        metavar="RATIO",
        help="let every test fail whose calls of its prefillshare_server shared less than this "
        "(0 to 1) of what they could; tests with nothing to share are left alone",
    )


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:  # nan is refused as well
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "prefillshare(**settings): settings of this test's prefillshare_server, as FakeServer "
        'takes them, for example layout="model"',
    )


@pytest.fixture
def prefillshare_server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """A running `FakeServer`; its settings come from `@pytest.mark.prefillshare(...)`."""
    from prefillshare_agents.testing import FakeServer

    marker = request.node.get_closest_marker("prefillshare")
    with FakeServer(**(marker.kwargs if marker else {})) as server:
        yield server
    minimum = request.config.getoption("--prefillshare-min-shared")
    if minimum is not None and server.could_share:
        server.assert_shared(minimum)


@pytest.fixture
def prefillshare_session(prefillshare_server: FakeServer) -> Iterator[Session]:
    """A `prefillshare_agents.Session` on `prefillshare_server`."""
    from openai import OpenAI

    from prefillshare_agents import Session

    with OpenAI(base_url=prefillshare_server.url, api_key="local", max_retries=0) as client:
        yield Session(client=client)
