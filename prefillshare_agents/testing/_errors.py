"""Error answers of the fake server, in the real router's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class ApiError(Exception):
    """Ends a request with an OpenAI error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = "invalid_value",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unknown_role(name: str, roles: Iterable[str]) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r} does not exist; roles of this cluster: {', '.join(sorted(roles))}",
        param="model",
        code="model_not_found",
    )


def base_is_not_a_role(name: str, roles: Iterable[str]) -> ApiError:
    return bad_request(
        f"{name!r} is the base: it prefills for the roles and does not answer itself; "
        f"roles of this cluster: {', '.join(sorted(roles))}",
        "model",
        code="model_not_callable",
    )


def context_too_long(prompt_tokens: int, new_tokens: int, limit: int, param: str) -> ApiError:
    return bad_request(
        f"the prompt has {prompt_tokens} tokens and at least {new_tokens} more were asked for, "
        f"but the context of this cluster holds {limit} tokens; shorten the messages or ask for "
        "fewer tokens",
        param,
        code="context_length_exceeded",
    )


def unknown_session(session_id: str) -> ApiError:
    return ApiError(
        404,
        f"no session {session_id!r}; it was never used, has ended or was idle for too long",
        code="session_not_found",
    )


def no_such_path(method: str, path: str) -> ApiError:
    return ApiError(404, f"{method} {path}: Not Found", code="not_found")


def wrong_method(method: str, path: str, allowed: Iterable[str]) -> ApiError:
    return ApiError(
        405,
        f"{method} {path}: Method Not Allowed",
        code="method_not_allowed",
        headers={"Allow": ", ".join(sorted(allowed))},
    )
