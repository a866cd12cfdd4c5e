"""The reference of the cluster file, from the models that read it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from prefillshare_server.config import Cluster
from prefillshare_server.config_sources import ENV_PREFIX, ENV_TOP_LEVEL
from scripts.docs.markdown import code, fence, one_line, page, table

ROLE = "<role>"
"""Stands for the name of a role in a path."""
EXAMPLE_ROLE = "critic"

INTRODUCTION = """\
# Cluster file

A cluster is described in one YAML file. `prefillshare check FILE` says everything that is wrong
with it before anything starts, `prefillshare serve FILE` starts it, and `--print-config` shows what
is in effect. Unknown keys are errors. Only `base.model` and one role are required:

```yaml
version: 1
base: {model: smollm2-135m-instruct}
roles:
  planner: {model: smollm2-135m-instruct}
```

A setting is taken from the first of these that has it: the options of the command (`--port`, and
`--set FIELD=VALUE` for any field), the environment variable, the file, the default. Directories are
relative to the folder of the file.
"""

_TYPES = {"integer": "whole number", "number": "number", "string": "text", "object": "mapping"}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "multipleOf": "a multiple of {}",
    "minLength": "not empty",
    "minProperties": "at least {}",
    "pattern": "matches {}",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the file."""

    path: tuple[str, ...]
    type: str
    limits: str
    """Empty if every value of the type is valid."""
    default: str | None
    """As YAML; None where the field is required."""
    description: str
    example: dict[str, Any]
    """A part of a cluster file that sets the field."""
    environment: str | None
    """The variable that sets it, if one does."""


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of the file, and the settings that are no mappings themselves."""

    path: tuple[str, ...]
    description: str
    settings: tuple[Setting, ...]


def sections() -> list[Section]:
    """The whole file, the top level first."""
    schema = Cluster.model_json_schema()
    return list(_sections((), schema, schema["$defs"], schema["description"]))


def cluster_file_page() -> str:
    """The page."""
    return page(INTRODUCTION, *(block for each in sections() for block in _section_blocks(each)))


def _sections(
    path: tuple[str, ...],
    schema: Mapping[str, Any],
    parts: Mapping[str, Mapping[str, Any]],
    description: str,
) -> Iterator[Section]:
    settings: list[Setting] = []
    inner: list[Section] = []
    for name, field in schema["properties"].items():
        here = (*path, name)
        part = _part(field, parts)
        if part is None:
            settings.append(_setting(here, field, required=name in schema.get("required", ())))
            continue
        below = (*here, ROLE) if "additionalProperties" in field else here
        told = f"{part['description']} {field.get('description', '')}"
        inner += _sections(below, part, parts, told)
    yield Section(path, _described(description), tuple(settings))
    yield from inner


def _part(
    field: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The section that a field is, also where it may be null or has one for each role."""
    inner = field.get("additionalProperties")
    choices = [field, *field.get("anyOf", ()), *([inner] if isinstance(inner, dict) else ())]
    references = [each["$ref"] for each in choices if "$ref" in each]
    return parts[references[0].rpartition("/")[2]] if references else None


def _setting(path: tuple[str, ...], field: Mapping[str, Any], *, required: bool) -> Setting:
    kinds = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    default = field.get("default")
    if "examples" not in field and default is None:
        raise ValueError(f"{'.'.join(path)} in config.py: add examples=[…] to its Field")
    if not field.get("description"):
        raise ValueError(f"{'.'.join(path)} in config.py: add a description below it")
    return Setting(
        path=path,
        type=" or ".join(map(_type, kinds)),
        limits=", ".join(_limits(kinds[0])),
        default=None if required else _flow(default),
        description=_described(field["description"]),
        example=_nested(path, field["examples"][0] if "examples" in field else default),
        environment=environment_name(path),
    )


def _described(text: str) -> str:
    # The words are Python's, the file is YAML.
    return re.sub(r"\bNone\b", "`null`", one_line(text))


def _type(kind: Mapping[str, Any]) -> str:
    if kind.get("type") == "boolean":
        return "`true` or `false`"
    choices = kind.get("enum") or ([kind["const"]] if "const" in kind else [])
    return " or ".join(f"`{each}`" for each in choices) or _TYPES[kind["type"]]


def _limits(kind: Mapping[str, Any]) -> Iterator[str]:
    for name, words in _LIMITS.items():
        if name in kind:
            value = kind[name]
            yield words.format(code(value) if isinstance(value, str) else f"{value:g}")


def environment_name(path: tuple[str, ...]) -> str | None:
    """The environment variable of a field; None where there is none."""
    if len(path) == 1 and path[0] not in ENV_TOP_LEVEL:
        return None
    more = "__<ARGUMENT>" if path[-1] == "args" else ""
    return ENV_PREFIX + "__".join(path).upper() + more


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {EXAMPLE_ROLE if name == ROLE else name: value}
    assert isinstance(value, dict)
    return value


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _section_blocks(section: Section) -> Iterator[str]:
    yield f"## {code('.'.join(section.path))}" if section.path else "## The top level"
    yield section.description
    for setting in section.settings:
        name = ".".join(setting.path)
        yield f"### {code(name)}"
        yield setting.description
        yield table(
            ["type", "limits", "default", "environment variable"],
            [
                [
                    setting.type,
                    setting.limits or "–",
                    "required" if setting.default is None else code(setting.default),
                    code(setting.environment) if setting.environment else "–",
                ]
            ],
        )
        yield fence("yaml", yaml.safe_dump(setting.example, default_flow_style=None))
