"""The reference of the HTTP interface, from the router's own OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scripts.docs.markdown import code, page, table

_SCHEMA = "#/components/schemas/"

INTRODUCTION = """\
# OpenAPI document

What the router answers to `GET /openapi.json`, also [as a file](openapi.json). The
[HTTP contract](../http.md) says the same in sentences.
"""


def openapi_page(found: Mapping[str, Any]) -> str:
    """The page of a document: its operations, then its schemas."""
    blocks = [INTRODUCTION]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if isinstance(operation, Mapping) and "responses" in operation:
                shared = operations.get("parameters", ())
                blocks += _operation(f"{method.upper()} {path}", operation, shared)
    for name, schema in found.get("components", {}).get("schemas", {}).items():
        blocks += [f"## {name}", schema.get("description", ""), _fields(schema)]
    return page(*blocks)


def _operation(name: str, operation: Mapping[str, Any], shared: Any) -> Iterator[str]:
    yield f"## {code(name)}"
    yield f"{operation.get('summary', '')}."
    yield operation.get("description", "")
    rows = [
        [code(each["name"]), each["in"], each.get("description", "–")]
        for each in (*shared, *operation.get("parameters", ()))
    ]
    if rows:
        yield table(["parameter", "in", "what it is"], rows)
    for body in operation.get("requestBody", {}).get("content", {}).values():
        yield f"Body: {_type(body.get('schema', {}))}"
    answers = [
        [status, answer.get("description", ""), _body(answer)]
        for status, answer in operation["responses"].items()
    ]
    yield table(["status", "when", "body"], answers)


def _body(answer: Mapping[str, Any]) -> str:
    return ", ".join(
        kind if kind != "application/json" else _type(body.get("schema", {}))
        for kind, body in answer.get("content", {}).items()
    )


def _fields(schema: Mapping[str, Any]) -> str:
    rows = list(_rows(schema, ""))
    return table(["field", "type", "what it is"], rows) if rows else ""


def _rows(schema: Mapping[str, Any], above: str) -> Iterator[list[str]]:
    """A row for each field, those of inner objects by their path."""
    for name, field in schema.get("properties", {}).items():
        yield [code(f"{above}{name}"), _type(field), field.get("description", "")]
        inner, mark = (field.get("items", {}), "[].") if "items" in field else (field, ".")
        yield from _rows(inner, f"{above}{name}{mark}")


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMA)
        return f"[{name}](#{name.lower()})"
    if "enum" in schema or "const" in schema:
        return " or ".join(code(str(each)) for each in schema.get("enum", [schema.get("const")]))
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(map(_type, choices))
    kinds = schema.get("type", "any")
    if kinds == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return kinds if isinstance(kinds, str) else " or ".join(kinds)
