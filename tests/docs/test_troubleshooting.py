"""The page of symptoms knows every error code, and quotes messages that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from prefillshare_server.router.errors import _ABORTS, Phase

from .blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SERVER = ROOT / "server" / "prefillshare_server"


def codes_in(source: Path) -> Iterator[str]:
    """The literal codes that a module gives to errors and refusals."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        named = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        refused = node.args[:1] if getattr(node.func, "id", "") == "Refusal" else []
        for value in [*named, *refused]:
            for part in ast.walk(value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def all_codes() -> set[str]:
    sources = [*(SERVER / "router").glob("*.py"), *(SERVER / "vllm_plugin").glob("*.py")]
    found = {code for source in sources for code in codes_in(source)}
    literal = {code for code in found if re.fullmatch(r"[a-z]+(_[a-z]+)+|conflict", code)}
    composed = {f"{phase}_timeout" for phase in get_args(Phase)}
    composed |= {f"{phase}_failed" for phase in ("prefill", "decode", "colocated")}
    aborts = {code for code, _ in _ABORTS.values()} | {"decode_aborted", "invalid_value"}
    return literal | composed | aborts


def test_every_error_code_of_the_router_is_on_the_page() -> None:
    codes = all_codes()
    assert {"model_not_found", "queue_timeout", "base_kv_missing", "internal_error"} <= codes
    assert sorted(code for code in codes if f"`{code}`" not in PAGE) == []


def test_the_page_has_no_code_that_the_router_does_not_have() -> None:
    listed = PAGE.partition("## All error codes")[2]
    shown = {code for row in listed.splitlines() for code in re.findall(r"`(\w+)`", row[:120])}
    assert {code for code in shown if code.endswith(("_failed", "_timeout", "_missing"))} <= (
        all_codes()
    )


def test_the_messages_on_the_page_are_those_of_the_program() -> None:
    folders = (SERVER, ROOT / "prefillshare_agents")
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)  # a message over several lines
    tables = [
        PAGE.partition(title)[2].partition("\n## ")[0]
        for title in ("## The cluster does not start", "## Errors of the SDK")
    ]
    symptoms = [row.split("|")[1] for table in tables for row in table.splitlines() if "|" in row]
    quoted = {text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom)}
    parts = {part.strip() for text in quoted for part in text.split("…")}
    assert len(parts) > 20
    assert sorted(part for part in parts if part not in source) == []
