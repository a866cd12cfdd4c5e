"""Where settings come from: the cluster file, the environment, command-line overrides.

Everything is merged into one raw mapping before it is validated, and every overridden
field remembers its source, so that an error can name it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pathlib import Path

ENV_PREFIX = "PREFILLSHARE_"
ENV_TOP_LEVEL = frozenset({"allow_untrained", "dtype", "max_model_len", "mode"})
"""Top-level scalars that may be set without ``__``; other plain names, such as
``PREFILLSHARE_HOME``, belong to other parts of the program."""


@dataclass(frozen=True)
class Setting:
    """One field set from outside the file."""

    path: tuple[str, ...]
    value: Any
    source: str


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; two roles would become one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is already set on line {seen[key]}",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


def read_file(path: Path) -> dict[str, Any]:
    """The cluster file as a raw mapping. Raises ConfigError when it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            Problem(str(path), f"cannot read the cluster file ({reason})", "check the path")
        ) from None
    try:
        raw = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(Problem(where, f"not valid YAML: {what}", "correct that line")) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            Problem(
                str(path),
                f"expected a mapping, got {type(raw).__name__}",
                "start with `base: {model: …}` and `roles: {…}`",
            )
        )
    return raw


def from_environment(environ: Mapping[str, str] = os.environ) -> list[Setting]:
    """Settings from ``PREFILLSHARE_<SECTION>__<FIELD>``; values are read as YAML scalars."""
    settings = []
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        path = tuple(part.lower() for part in name.removeprefix(ENV_PREFIX).split("__"))
        if len(path) > 1 or path[0] in ENV_TOP_LEVEL:
            settings.append(Setting(path, parse_value(text, name), f"environment {name}"))
    return settings


def from_overrides(overrides: Mapping[str, Any], roles: Mapping[str, Any]) -> list[Setting]:
    """Settings from dotted paths such as ``router.port``; `roles` may have dots in their names."""
    return [
        Setting(_split(key, roles), value, f"override {key}") for key, value in overrides.items()
    ]


def parse_value(text: str, where: str) -> Any:
    """`text` as YAML, so that numbers, booleans, lists and null mean what they mean in the file."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(
            Problem(where, f"{text!r} is not a valid value", "write it as in the cluster file")
        ) from None


def merge(raw: Mapping[str, Any], settings: list[Setting], file: str) -> dict[str, Any]:
    """A copy of `raw` with `settings` applied in order (the later one wins)."""
    merged: dict[str, Any] = _copy(raw)
    for setting in settings:
        target = merged
        for depth, part in enumerate(setting.path[:-1], start=1):
            inner = target.get(part)
            if inner is None:
                inner = target[part] = {}
            if not isinstance(inner, dict):
                raise ConfigError(
                    Problem(
                        f"{file}: {'.'.join(setting.path)} ({setting.source})",
                        f"{'.'.join(setting.path[:depth])} is {inner!r}, not a section",
                        "remove the override or correct the file",
                    )
                )
            target = inner
        target[setting.path[-1]] = setting.value
    return merged


def _split(key: str, roles: Mapping[str, Any]) -> tuple[str, ...]:
    """Path of a dotted key. Names of roles and of vLLM arguments keep their dots."""
    for role in sorted((str(name) for name in roles), key=len, reverse=True):
        if key.startswith(f"roles.{role}."):
            return ("roles", role, *_split_args(key.removeprefix(f"roles.{role}.")))
    return _split_args(key)


def _split_args(key: str) -> tuple[str, ...]:
    parts = key.split(".")
    if "args" in parts[:-1]:
        at = parts.index("args") + 1
        return (*parts[:at], ".".join(parts[at:]))
    return tuple(parts)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return value
