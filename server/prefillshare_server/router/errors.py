"""Errors a client can see: always an OpenAI-style body, always naming what to do."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Phase = Literal["prefill", "decode", "first_token", "idle_stream"]


class RouterError(Exception):
    """Ends a call. `code` is stable and meant for programs, `message` for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        code: str | None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The response body: `{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class WorkerRefused(RouterError):
    """A worker answered with an error status; message, field and status stay the worker's own."""

    def __init__(self, worker: str, status: int, answer: Mapping[str, Any]) -> None:
        error = answer.get("error")
        details: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
        # vLLM puts exception names and HTTP statuses where OpenAI has words of its own.
        code = details.get("code")
        client_error = status < 500
        super().__init__(
            status,
            str(details.get("message") or f"worker {worker} answered with HTTP status {status}"),
            type="invalid_request_error" if client_error else "server_error",
            code=code if isinstance(code, str) else "invalid_value" if client_error else None,
            param=details.get("param"),
        )


class WorkerBrokeOff(WorkerRefused):
    """A worker put an error into a stream it had begun."""


class WorkerUnreachable(RouterError):
    """A worker refused the connection or dropped it."""

    def __init__(self, worker: str, phase: Phase, reason: object) -> None:
        super().__init__(
            503,
            f"worker {worker} could not be reached for {phase} ({reason}); try again, "
            "and look at the worker's log if it stays away",
            type="server_error",
            code="worker_unreachable",
        )


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> RouterError:
    """400: the client has to change the request."""
    return RouterError(400, message, type="invalid_request_error", code=code, param=param)


def unknown_role(name: str, roles: Iterable[str]) -> RouterError:
    """404: no role of this name."""
    return RouterError(
        404,
        f"the model {name!r} does not exist; roles of this cluster: {', '.join(sorted(roles))}",
        type="invalid_request_error",
        code="model_not_found",
        param="model",
    )


def base_is_not_a_role(name: str, roles: Iterable[str]) -> RouterError:
    """400: the base only prefills."""
    return RouterError(
        400,
        f"{name!r} is the base: it prefills for the roles and does not answer itself; "
        f"roles of this cluster: {', '.join(sorted(roles))}",
        type="invalid_request_error",
        code="model_not_callable",
        param="model",
    )


def context_too_long(prompt_tokens: int, new_tokens: int, limit: int, param: str) -> RouterError:
    """400: the prompt and the tokens asked for do not fit the context."""
    return bad_request(
        f"the prompt has {prompt_tokens} tokens and at least {new_tokens} more were asked for, "
        f"but the context of this cluster holds {limit} tokens; shorten the messages or ask for "
        "fewer tokens",
        param,
        code="context_length_exceeded",
    )


def unknown_session(session_id: str) -> RouterError:
    """404: never seen, ended, or idle for longer than its time to live."""
    return RouterError(
        404,
        f"no session {session_id!r}; it was never used, has ended or was idle for too long",
        type="invalid_request_error",
        code="session_not_found",
    )


def timed_out(phase: Phase, worker: str, seconds: float) -> RouterError:
    """504: a worker was silent for too long."""
    return RouterError(
        504,
        f"no answer from worker {worker} within {seconds:g} s (phase: {phase}); raise "
        f"timeouts.{phase if phase != 'decode' else 'first_token'}_s if the worker is only slow",
        type="server_error",
        code=f"{phase}_timeout",
    )


def handoff_missing(worker: str) -> RouterError:
    """502: prefill answered without naming KV blocks, so there is nothing to decode from."""
    return RouterError(
        502,
        f"prefill worker {worker} returned no KV blocks; the call was not decoded, because a "
        "decoder must not compute its own prompt KV",
        type="server_error",
        code="kv_handoff_missing",
    )


_ABORTS = {
    "preempted": ("decode_preempted", "was preempted, out of KV blocks"),
    "kv_load_failed": ("kv_load_failed", "could not load the prompt's KV"),
    "lease_expired": ("lease_expired", "got the prompt's KV after its lease had ended"),
}


def decode_aborted(worker: str, event: str | None) -> RouterError:
    """503: the decode worker gave the call up. `event` is its own word for why, if it said."""
    code, what = _ABORTS.get(event or "", ("decode_aborted", "ended the call without an answer"))
    return RouterError(
        503, f"decode worker {worker} {what}; try again", type="server_error", code=code
    )


def worker_failed(error: WorkerRefused, worker: str, phase: Phase) -> RouterError:
    """502: a worker failed inside, or refused what only the router can have got wrong."""
    return RouterError(
        502,
        f"worker {worker} failed in {phase}: {error.message}",
        type="server_error",
        code=error.code or f"{phase}_failed",
    )
