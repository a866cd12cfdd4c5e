"""Turns pydantic's validation errors into lines that name field, value and remedy."""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from prefillshare_server.errors import Problem, suggestion

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from prefillshare_server.config_sources import Setting


class _Place(NamedTuple):
    """What a location in the file refers to."""

    model: type[BaseModel] | None
    """The section the location lies in."""
    field: FieldInfo | None


def explain(
    error: ValidationError, model: type[BaseModel], file: str, settings: list[Setting]
) -> list[Problem]:
    """One Problem per validation error of `model`, read from `file` and `settings`."""
    return [_problem(details, model, file, settings) for details in error.errors()]


def _problem(
    details: ErrorDetails, model: type[BaseModel], file: str, settings: list[Setting]
) -> Problem:
    path = [str(part) for part in details["loc"] if part != "[key]"]
    source = _source(path, settings)
    where = f"{file}: {'.'.join(path)}" if path else file
    if source:
        where += f" ({source})"
    place = _locate(path, model)
    what, remedy = _message(details, path, place)
    return Problem(where, what, remedy)


def _message(details: ErrorDetails, path: list[str], place: _Place) -> tuple[str, str]:
    kind, value = details["type"], details["input"]
    context: dict[str, Any] = details.get("ctx", {})
    if kind == "extra_forbidden":
        known = place.model.model_fields if place.model else {}
        return f"unknown key {path[-1]!r}", suggestion(path[-1], known)
    if kind == "missing":
        return "required but not set", f"add `{path[-1]}: …`"
    if kind == "value_error":
        # Our own validators say value and remedy in one sentence.
        what, _, remedy = str(context["error"]).partition("; ")
        return what, remedy or "correct it"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        example = f"`{path[-1]}: {{…}}`" if path else "a mapping"
        return f"{value!r} is not a section", f"write {example}"
    if kind == "too_short":
        return f"{value!r} is empty", "name at least one"
    expected = details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    expected = expected.partition(", unable to parse")[0]
    return f"{value!r} is not valid", f"expected {expected}{_default(place)}"


def _default(place: _Place) -> str:
    if place.field is None or place.field.is_required():
        return ""
    return f" (default {place.field.default!r})"


def _source(path: list[str], settings: list[Setting]) -> str | None:
    """The last setting from outside the file that touches `path`."""
    for setting in reversed(settings):
        shared = min(len(setting.path), len(path))
        if shared and list(setting.path[:shared]) == path[:shared]:
            return setting.source
    return None


def _locate(path: list[str], model: type[BaseModel]) -> _Place:
    """Walk `path` down the sections; the name of a role stands for its section."""
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for index, part in enumerate(path):
        if section is None:
            # Inside a mapping of sections: this part is a role's name.
            section = _section_type(field)
            continue
        field = section.model_fields.get(part)
        if field is None or index == len(path) - 1:
            return _Place(section, field)
        section = _as_section(field.annotation)
    return _Place(section, field)


def _section_type(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section that the values of a mapping field are."""
    arguments: tuple[object, ...] = getattr(field.annotation if field else None, "__args__", ())
    sections = [section for section in map(_as_section, arguments) if section]
    return sections[0] if sections else None


def _as_section(annotation: object) -> type[BaseModel] | None:
    """The section that a field is, also where it may be None."""
    for kind in get_args(annotation) if isinstance(annotation, UnionType) else (annotation,):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
