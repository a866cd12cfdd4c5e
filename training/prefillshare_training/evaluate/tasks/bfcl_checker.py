"""The AST checker of `bfcl-eval`, without the SDKs of every model provider.

Its module imports the table of all models and so their clients; the checker only asks that table
whether a model writes `_` for the `.` in function names. A stand-in answers for the time of the
import. Install the wheel with ``--no-deps``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from prefillshare_server.errors import ConfigError, Problem

INSTALL = "pip install --no-deps bfcl-eval==2026.3.23"

_MODEL = "prefillshare"
_TABLE = "bfcl_eval.constants.model_config"
_CHECKER = "bfcl_eval.eval_checker.ast_eval.ast_checker"


def matches(
    functions: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]],
    possible: Sequence[Mapping[str, Any]],
    category: str,
) -> bool:
    """Whether calls ``[{name: arguments}]`` are among the possible answers, by BFCL's rules."""
    checker, python = _checker()
    try:
        verdict = checker(functions, calls, possible, python, category, _MODEL)
    # It is not written for values of any shape, such as a number where it expects an object,
    # or one that no float can hold.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError):
        return False
    return bool(verdict["valid"])


@cache
def _checker() -> tuple[Any, Any]:
    """The function and its name for Python. Raises ConfigError."""
    stand_in = ModuleType(_TABLE)
    stand_in.__dict__["MODEL_CONFIG_MAPPING"] = {_MODEL: SimpleNamespace(underscore_to_dot=True)}
    real = sys.modules.get(_TABLE)
    sys.modules[_TABLE] = stand_in
    try:
        module = importlib.import_module(_CHECKER)
        language = importlib.import_module("bfcl_eval.constants.enums").Language
    except ModuleNotFoundError as error:
        raise ConfigError(
            Problem("bfcl-eval", f"{error.name} is not installed", f"run: {INSTALL}")
        ) from None
    finally:
        # Whoever else imports the checker must not get it with the stand-in.
        sys.modules.pop(_CHECKER, None)
        del sys.modules[_TABLE]
        if real is not None:
            sys.modules[_TABLE] = real
    return module.ast_checker, language.PYTHON
