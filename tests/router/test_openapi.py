"""The OpenAPI document describes this application: no more and no less."""

import re
from typing import Any

import pytest
from openapi_spec_validator import validate
from starlette.routing import Route

from prefillshare_server.router.openapi import document
from tests.router.conftest import Bench


def described() -> set[tuple[str, str]]:
    return {(path, method) for path, item in document()["paths"].items() for method in item}


async def test_every_endpoint_is_described_and_nothing_else(bench: Bench) -> None:
    served = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in bench.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == described()


def test_the_document_is_valid() -> None:
    validate(document())


async def test_it_is_served(bench: Bench) -> None:
    status, told = await bench.get("/openapi.json")
    assert (status, told) == (200, document())


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = document()["components"]["schemas"][name]
    return found


async def test_answers_have_the_fields_that_are_described(bench: Bench) -> None:
    headers = {"X-Session-ID": "s"}
    await bench.chat(headers=headers)
    _, broken, of_break = await bench.chat("the weather", headers=headers)
    report = broken["prefillshare"]
    assert report.keys() == schema("Report")["properties"].keys()
    assert report["break"].keys() == schema("Break")["properties"].keys()
    path = document()["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["headers"]
    ours = {name for name in of_break if name.lower().startswith("x-")}
    assert {name.lower() for name in ours} == {name.lower() for name in path}
    _, early, _ = await bench.post(
        "/v1/sessions/s/prefill", {"messages": [{"role": "user", "content": "a"}]}
    )
    assert early.keys() == schema("Prefill")["properties"].keys()


@pytest.mark.parametrize(
    ("path", "name", "listed"),
    [
        ("/v1/sessions/s", "Session", False),
        ("/v1/sessions/s/calls", "Calls", True),
        ("/v1/workers", "Worker", True),
        ("/v1/roles", "Role", True),
        ("/v1/models", "Model", True),
        ("/v1/models/alpha", "Model", False),
        ("/health", "Health", False),
    ],
)
async def test_lists_have_the_fields_that_are_described(
    bench: Bench, path: str, name: str, listed: bool
) -> None:
    await bench.chat(headers={"X-Session-ID": "s"})
    _, told = await bench.get(path)
    fields = schema(name)["properties"]
    if listed:
        told = told["data"][0]
        fields = fields["data"]["items"]["properties"] if "data" in fields else fields
    assert told.keys() == fields.keys()
