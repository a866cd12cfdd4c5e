"""From a command's options to its settings, the same way for `train` and `eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from prefillshare_server.errors import ConfigError, Problem

_Settings = TypeVar("_Settings", bound=BaseModel)


def settings_from(
    model: type[_Settings], options: Mapping[str, Any], *, command: str, **others: Any
) -> _Settings:
    """The options that are fields of `model`, the layout's, and `others`, as settings.

    Raises ConfigError that names each option that is wrong.
    """
    given = {key: value for key, value in options.items() if key in model.model_fields}
    layout = {
        "kind": options["layout_kind"],
        "tail_role": options["tail_role"],
        "shared_head": options["shared_head"],
    }
    try:
        return model(**{**given, "layout": layout, **others})
    except ValidationError as error:
        raise ConfigError(
            *(
                Problem(
                    _option(each["loc"]),
                    f"{each['input']!r}: {each['msg'].lower()}",
                    f"see prefillshare {command} --help",
                )
                for each in error.errors()
            )
        ) from None


def _option(place: tuple[int | str, ...]) -> str:
    """The option behind a field, for example --layout behind layout.kind."""
    names = [part for part in place if isinstance(part, str)]
    if names[:1] == ["layout"] and len(names) > 1:
        names = ["layout"] if names[1] == "kind" else names[1:]
    return "--" + "-".join(names).replace("_", "-")
