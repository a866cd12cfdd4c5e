"""docs/langchain_standard.md lists what the two suites skip, and nothing else."""

import re
from pathlib import Path

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from .conftest import OUTCOMES

pytestmark = pytest.mark.langchain_standard

TABLE = Path(__file__).parents[2] / "docs" / "langchain_standard.md"
ROW = re.compile(
    r"^\| (unit|integration) \| `(\w+)` \| (skipped|xfailed) \| (.{20,}) \|$", re.MULTILINE
)
SUITES = {"unit": ChatModelUnitTests, "integration": ChatModelIntegrationTests}
ROWS = {(suite, test): outcome for suite, test, outcome, _ in ROW.findall(TABLE.read_text())}


def test_every_row_names_a_test_of_the_suite() -> None:
    assert ROWS
    assert [test for suite, test in ROWS if not hasattr(SUITES[suite], test)] == []


def test_the_table_and_the_suites_say_the_same() -> None:
    """Of the tests that ran in this session; this file is the last of its folder."""
    ran = {}
    for node, outcome in OUTCOMES.items():
        found = re.search(r"/test_(unit|integration)\.py::\w+::(\w+)", node)
        assert found is not None, node
        ran[found[1], found[2]] = outcome
    left_out = {key: outcome for key, outcome in ran.items() if outcome in ("skipped", "xfailed")}
    assert left_out == {key: outcome for key, outcome in ROWS.items() if key in ran}
