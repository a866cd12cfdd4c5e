"""The generated pages have everything that there is, and what they say works."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from rich.text import Text

from prefillshare_server import config_sources
from prefillshare_server.config import Cluster
from prefillshare_server.router.metrics import Metrics
from scripts.docs.cluster_file import (
    EXAMPLE_ROLE,
    ROLE,
    Setting,
    cluster_file_page,
    environment_name,
    sections,
)
from scripts.docs.commands import commands, commands_page
from scripts.docs.doctests import fenced
from scripts.docs.hooks import without_marks
from scripts.docs.links import relinked
from scripts.docs.metrics import metrics_page
from scripts.docs.openapi import openapi_page

SETTINGS = [setting for section in sections() for setting in section.settings]


def name_of(setting: Setting) -> str:
    return ".".join(setting.path)


def fields(value: Any, path: tuple[str, ...] = ()) -> set[str]:
    """The paths of all values in a cluster file."""
    if isinstance(value, dict) and path[-1:] != ("args",):
        return set().union(*(fields(inner, (*path, name)) for name, inner in value.items()))
    return {".".join(path)}


def test_the_reference_has_every_field_of_the_cluster_file() -> None:
    cluster = Cluster.model_validate(
        {"base": {"model": "a"}, "roles": {ROLE.strip("<>"): {"model": "b"}}, "lora": {}}
    )
    dumped = cluster.model_dump(mode="json")
    dumped["roles"] = {ROLE: dumped["roles"].popitem()[1]}
    assert {name_of(setting) for setting in SETTINGS} == fields(dumped)


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_the_example_of_a_field_is_valid(setting: Setting) -> None:
    given: dict[str, Any] = yaml.safe_load(yaml.safe_dump(setting.example))
    given.setdefault("base", {}).setdefault("model", "a-base")
    role = given.setdefault("roles", {}).setdefault(EXAMPLE_ROLE, {})
    if not {"model", "adapter"} & role.keys():
        role["model"] = "a-decoder"
    value = Cluster.model_validate(given).model_dump(mode="json")
    for part in setting.path:
        value = value[EXAMPLE_ROLE if part == ROLE else part]
    assert value is not None


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_the_environment_variable_of_a_field_sets_it(setting: Setting) -> None:
    name = environment_name(setting.path)
    if name is None:
        assert setting.path == ("version",)
        return
    [read] = config_sources.from_environment({name: "1"})
    assert read.path[: len(setting.path)] == setting.path


def test_the_page_of_the_cluster_file_has_every_default() -> None:
    page = cluster_file_page()
    assert all(f"### `{name_of(setting)}`" in page for setting in SETTINGS)
    port = ["whole number", "at least 1, at most 65535", "`8000`", "`PREFILLSHARE_ROUTER__PORT`"]
    assert f"| {' | '.join(port)} |" in page


def test_the_page_of_the_commands_has_every_command_and_option() -> None:
    page = commands_page()
    found = commands()
    assert {each.name for each in found} > {"prefillshare serve", "prefillshare roles set"}
    for each in found:
        assert f"## {each.name}\n" in page
        options = [name for param in each.command.params for name in param.opts]
        assert [name for name in options if name.startswith("-") and name not in page] == []
    assert "[bold]" not in page
    assert {line for line in page.splitlines() if re.search(r"[{}]", line)} == set()


def test_the_page_of_the_commands_has_every_default() -> None:
    page = commands_page()
    missing = []
    for each in commands():
        section = page.partition(f"## {each.name}\n")[2].partition("\n## ")[0]
        for param in each.command.params:
            if param.default is None or param.default is False or not param.show_default:
                continue
            names = "|".join(re.escape(name) for name in param.opts)
            row = re.search(rf"^\| <?(?:code>)?`?(?:{names}).*$", section, re.MULTILINE)
            if row is None or not row[0].endswith(f"| `{param.default}` |"):
                missing.append((each.name, param.name, param.default, row and row[0]))
    assert missing == []


def test_nothing_on_the_page_of_the_commands_is_taken_for_html() -> None:
    page = re.sub(r"^```.*?^```|`[^`]*`|</?code>", "", commands_page(), flags=re.M | re.S)
    assert "&lt;SECTION&gt;" in page
    assert re.findall(r"[<>]|&(?!\w+;|#\d+;)", page) == []


def test_no_help_text_has_words_that_are_taken_for_markup() -> None:
    for each in commands():
        params = [getattr(param, "help", "") for param in each.command.params]
        for text in [each.command.help, *params]:
            meant = re.sub(r"\[/?(?:bold|dim)\]", "", text or "")
            assert Text.from_markup(text or "").plain == meant


def test_the_page_of_the_metrics_has_all_that_the_router_counts() -> None:
    rendered = Metrics().render().decode()
    counted = re.findall(r"^# HELP (\S+(?<!_created)) ", rendered, re.MULTILINE)
    assert len(counted) > 20
    assert [name for name in counted if f"`{name}`" not in metrics_page()] == []


def test_readers_do_not_see_what_is_for_the_tests() -> None:
    marked = '<!-- answers: {"critic": ["Yes."]} -->\n```python {skip="needs a GPU"}\nx = 1\n```\n'
    assert without_marks(marked) == "```python\nx = 1\n```\n"


def test_examples_in_docstrings_become_code() -> None:
    assert fenced("A session.\n\n>>> a = 1\n>>> a\n\nMore.") == (
        "A session.\n\n```python\na = 1\na\n```\n\nMore."
    )


def test_a_link_out_of_the_documentation_becomes_the_name_of_the_file() -> None:
    text = "[`router/call.py`](../server/prefillshare_server/router/call.py), [this](../Makefile)"
    assert relinked(text, "docs/a.md", "a.md") == "`router/call.py`, this (`Makefile`)"


def test_a_link_to_an_example_leads_to_its_page_on_the_site() -> None:
    text = "[ReAct](../../examples/react/README.md#run-it)"
    assert relinked(text, "docs/guides/a.md", "guides/a.md") == (
        "[ReAct](../examples/react.md#run-it)"
    )


def test_the_openapi_page_has_operations_parameters_and_schemas() -> None:
    answer = {"type": "object", "properties": {"counts": {"type": ["integer", "null"]}}}
    schema = {"$ref": "#/components/schemas/Answer"}
    operation = {
        "summary": "Ask",
        "parameters": [{"in": "header", "name": "X-Session-ID", "description": "Which one."}],
        "responses": {
            "200": {
                "description": "OK",
                "content": {"application/json": {"schema": schema}},
            }
        },
    }
    page = openapi_page(
        {"paths": {"/v1/ask": {"get": operation}}, "components": {"schemas": {"Answer": answer}}}
    )
    assert "## `GET /v1/ask`\n\nAsk.\n" in page
    assert "| `X-Session-ID` | header | Which one. |" in page
    assert "| 200 | OK | [Answer](#answer) |" in page
    assert "| `counts` | integer or null |  |" in page
