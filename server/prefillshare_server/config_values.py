"""Kinds of values that fields of the cluster file have, checked when it is read."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

ArgValue = str | int | float | bool | list[str]
ROLE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
ARG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")


def _check_args(value: object) -> object:
    """vLLM argument names with hyphens and no dashes in front, values vLLM's CLI can take."""
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping of vLLM arguments, for example {max-num-seqs: 8}")
    args: dict[str, ArgValue] = {}
    for key, item in value.items():
        # Environment variables cannot spell a hyphen, so underscores mean the same.
        name = str(key).replace("_", "-")
        if not ARG_NAME.fullmatch(name):
            raise ValueError(f"{key!r} is not an argument name; write it as {name.lstrip('-')!r}")
        if name in args:
            raise ValueError(f"{name!r} is given twice")
        is_list = isinstance(item, list) and all(isinstance(part, str) for part in item)
        if not is_list and not isinstance(item, str | int | float | bool):
            raise ValueError(
                f"{name!r} is {item!r}; write a string, a number, true, false or a list of strings"
            )
        args[name] = item
    return args


def _check_role_name(name: str) -> str:
    if not ROLE_NAME.fullmatch(name):
        raise ValueError(
            f"role name {name!r} must be lower-case letters, digits, '.', '_' or '-', "
            "starting with a letter or digit"
        )
    return name


Args = Annotated[
    dict[str, ArgValue], BeforeValidator(_check_args), Field(examples=[{"max-num-seqs": 8}])
]
RoleName = Annotated[str, AfterValidator(_check_role_name)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ModelRef = Annotated[str, Field(min_length=1)]
