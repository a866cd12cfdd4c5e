"""Errors a client can see: always an OpenAI-style body, always naming what to do."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Phase = Literal["queue", "prefill", "decode", "colocated", "first_token", "idle_stream"]

RETRY_AFTER_S = 5
"""What a client is told to wait where no worker was free: the longest pause of a probe."""


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

    def __init__(
        self, worker: str, phase: Phase, reason: object, *, sent: bool = True, refused: bool = False
    ) -> None:
        super().__init__(
            503,
            f"worker {worker} could not be reached for {phase} ({reason}); try again, "
            "and look at the worker's log if it stays away",
            type="server_error",
            code="worker_unreachable",
        )
        self.reason = str(reason)
        self.sent = sent
        """The worker may have got the request; False if there was no connection to send it on."""
        self.refused = refused
        """Nobody listens there: the worker is dead."""


class WorkerSilent(RouterError):
    """A worker took longer than the phase's timeout."""


class NoWorker(RouterError):
    """No worker of a kind was available in time. `what` says so, `why` says what keeps each."""

    def __init__(self, what: str, seconds: float, why: Mapping[str, str]) -> None:
        states = "; ".join(f"{worker}: {reason}" for worker, reason in why.items())
        super().__init__(
            503,
            f"{what} available within {seconds:g} s ({states}); try again later, and look at the "
            "worker's log if it stays away",
            type="server_error",
            code="no_worker",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> RouterError:
    """400: the client has to change the request."""
    return RouterError(400, message, type="invalid_request_error", code=code, param=param)


def conflict(message: str) -> RouterError:
    """409: the cluster is not made for that."""
    return RouterError(409, message, type="invalid_request_error", code="conflict")


def prefix_break(where: str, detail: str, fix: str, headers: Mapping[str, str]) -> RouterError:
    """422: the caller allows no break, and the context does not go on from its session's."""
    return RouterError(
        422,
        f"the messages do not go on from this session's context {where}: {detail}. {fix} "
        "(refused because of X-PrefillShare-Strict; nothing was computed)",
        type="invalid_request_error",
        code="prefix_break",
        param="messages",
        # openai's clients repeat no call that says so.
        headers={**headers, "x-should-retry": "false"},
    )


def too_many_prefills(session_id: str, most: int) -> RouterError:
    """429: more prefills ahead of one session than the router remembers."""
    return RouterError(
        429,
        f"{most} prefills ahead of session {session_id!r} are under way; send a call, or wait for "
        "one of them (wait: true)",
        type="invalid_request_error",
        code="too_many_prefills",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def session_limit(most: int, waiting: int) -> RouterError:
    """429: as many sessions as may be, and as many calls of further ones as may wait."""
    return RouterError(
        429,
        f"{most} sessions are active and {waiting} calls of further ones wait; try again later, "
        "end sessions that are over (DELETE /v1/sessions/{id}), or raise router.max_sessions or "
        "router.session_queue",
        type="server_error",
        code="session_limit",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def no_place(most: int, seconds: float) -> RouterError:
    """504: none of the sessions that were active ended in time."""
    return RouterError(
        504,
        f"{most} sessions were active and none of them ended within {seconds:g} s (phase: queue); "
        "try again, end sessions that are over (DELETE /v1/sessions/{id}), or raise "
        "router.max_sessions or timeouts.queue_s",
        type="server_error",
        code="queue_timeout",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def body_too_large(limit_mb: int) -> RouterError:
    """413: more bytes than the router reads."""
    return RouterError(
        413,
        f"the request body is larger than {limit_mb} MiB; send less, or raise router.max_body_mb",
        type="invalid_request_error",
        code="request_too_large",
    )


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


def timed_out(phase: Phase, worker: str, seconds: float) -> WorkerSilent:
    """504: a worker was silent for too long."""
    setting = "first_token" if phase in ("decode", "colocated") else phase
    return WorkerSilent(
        504,
        f"no answer from worker {worker} within {seconds:g} s (phase: {phase}); raise "
        f"timeouts.{setting}_s if the worker is only slow",
        type="server_error",
        code=f"{phase}_timeout",
    )


def queue_timeout(role: str, pool: str, seconds: float) -> RouterError:
    """504: the role's decode workers, those of `pool`, had no room for the call in time."""
    more = f"roles.{role}.replicas" if pool == role else f"{pool}.max_loras or {pool}.replicas"
    return RouterError(
        504,
        f"no decode worker of role {role!r} had room for this call within {seconds:g} s (phase: "
        "queue); try again, ask for fewer tokens, or raise timeouts.queue_s, kv.blocks or "
        f"{more}",
        type="server_error",
        code="queue_timeout",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def crowded(seconds: float) -> RouterError:
    """504: calls that take several leases at once go one after the other."""
    return RouterError(
        504,
        f"other calls with several prompts or choices took longer than {seconds:g} s (phase: "
        "queue); try again, ask for fewer choices per call, or raise timeouts.prefill_s",
        type="server_error",
        code="queue_timeout",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def never_fits(
    role: str, *, prompt_tokens: int, new_tokens: int, needed: int, blocks: int, param: str
) -> RouterError:
    """400: the prompt and the tokens asked for exceed every KV cache of the role."""
    return bad_request(
        f"the prompt has {prompt_tokens} tokens and at least {new_tokens} more were asked for: "
        f"that takes {needed} KV blocks, but a decode worker of role {role!r} has {blocks}; "
        "shorten the prompt, ask for fewer tokens, or raise kv.blocks",
        param,
        code="context_length_exceeded",
    )


def unknown_worker(worker_id: str, workers: Iterable[str]) -> RouterError:
    """404: no worker of this id."""
    return RouterError(
        404,
        f"no worker {worker_id!r}; workers of this cluster: {', '.join(workers)}",
        type="invalid_request_error",
        code="worker_not_found",
    )


def handoff_missing(worker: str) -> RouterError:
    """502: prefill did not say which KV blocks to read where: there is nothing to decode from."""
    return RouterError(
        502,
        f"prefill worker {worker} returned no KV blocks that can be read; the call was not "
        "decoded, because a decoder must not compute its own prompt KV",
        type="server_error",
        code="kv_handoff_missing",
    )


_ABORTS = {
    "preempted": ("decode_preempted", "was preempted, out of KV blocks"),
    "kv_load_failed": ("kv_load_failed", "could not load the prompt's KV"),
    "handoff_timeout": ("handoff_timeout", "did not get the prompt's KV in time"),
    "lease_expired": ("lease_expired", "got the prompt's KV after its lease had ended"),
}


def decode_aborted(worker: str, event: str | None) -> RouterError:
    """503: the decode worker gave the call up. `event` is its own word for why, if it said."""
    code, what = _ABORTS.get(event or "", ("decode_aborted", "ended the call without an answer"))
    return RouterError(
        503, f"decode worker {worker} {what}; try again", type="server_error", code=code
    )


def resume_mismatch(what: str) -> RouterError:
    """502: a resumed answer is not the one that broke off, so it was not continued."""
    return RouterError(
        502,
        f"the answer broke off and its continuation does not begin as it did ({what}); nothing "
        "wrong was sent on; try again",
        type="server_error",
        code="resume_mismatch",
    )


def worker_failed(error: WorkerRefused, worker: str, phase: Phase) -> RouterError:
    """502: a worker failed inside, or refused what only the router can have got wrong."""
    return RouterError(
        502,
        f"worker {worker} failed in {phase}: {error.message}",
        type="server_error",
        code=error.code or f"{phase}_failed",
    )
