"""This API as an OpenAPI 3.1 document: what `GET /openapi.json` answers.

Bodies of calls are OpenAI's and vLLM's, so they are described only where the router reads them.
"""

from importlib.metadata import version
from typing import Any

from prefillshare_server.router.openapi_schemas import SCHEMAS, obj, ref, string

_SESSION_ID = {
    "in": "path",
    "name": "id",
    "required": True,
    "schema": string("1 to 255 printable ASCII characters."),
}
_CALL_HEADERS = {
    "X-Session-ID": "The session: which conversation the call continues.",
    "X-PrefillShare-Session": "The same, where a proxy has taken the first name.",
    "X-Session-Affinity": "The same, as other servers call it.",
    "X-Parent-Session-ID": "A session whose contexts and prefill worker a new session starts with.",
    "X-Session-Final": "true: the session ends with this call.",
    "X-PrefillShare-Mode": "share (the default), or isolate: the session's roles share no KV.",
    "X-PrefillShare-Next-Role": "Whose turn is next: its prompt is prefilled meanwhile, if the "
    "cluster has prefill.warm_ups.",
    "X-PrefillShare-Strict": "true: a prefix break is a 422, and nothing is computed.",
    "X-Request-Id": "Returned with the answer; made up where it is missing.",
}
_ANSWER_HEADERS = {
    "X-Request-Id": "Of the call.",
    "X-PrefillShare-Session": "The session, if the call has one.",
    "X-PrefillShare-Prefill-Worker": "Where the base read the prompt.",
    "X-PrefillShare-Decode-Worker": "Where the role answers.",
    "X-PrefillShare-Affinity": "new, hit, rebound or none.",
    "X-PrefillShare-Cached-Tokens": "Prompt tokens found in the prefix cache; not if colocated.",
    "X-PrefillShare-Computed-Tokens": "Prompt tokens computed; not if colocated.",
    "X-PrefillShare-Break": "A prefix break, as JSON on one line of ASCII: see docs/http.md.",
}
_ERRORS = {
    400: "The request has to change; `param` names the field.",
    404: "No such role, session or worker; the message lists what there is.",
    409: "The cluster is not made for that change.",
    413: "The body is larger than router.max_body_mb.",
    422: "prefix_break: the context does not go on from its session's, and the call was strict.",
    429: "session_limit: so many sessions are active, and so many calls of others wait; "
    "too_many_prefills: so many prefills ahead of the session are under way.",
    500: "internal_error: the router failed.",
    502: "A worker failed inside, or refused what it was handed.",
    503: "No worker could be reached, or workers gave the call up.",
    504: "A phase took longer than timeouts: in the cluster file allows.",
}


def document() -> dict[str, Any]:
    """The whole document; every call makes a new one."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PrefillShare",
            "version": version("prefillshare-agents"),
            "description": "OpenAI's API over roles that share one prefill. What is not described "
            "here is OpenAI's and vLLM's.",
        },
        "paths": _paths(),
        "components": {"schemas": SCHEMAS},
    }


def _paths() -> dict[str, Any]:
    call_errors = (400, 404, 413, 422, 429, 500, 502, 503, 504)
    session, named, role = (_SESSION_ID, _named("id"), _named("name"))
    return {
        "/v1/chat/completions": {
            "post": _call("Call a role", "ChatRequest", "ChatCompletion", call_errors)
        },
        "/v1/completions": {
            "post": _call(
                "Call a role with a prompt", "CompletionRequest", "Completion", call_errors
            )
        },
        "/v1/models": {"get": _operation("List the roles, and the base", {200: ref("Models")})},
        "/v1/models/{id}": {
            "get": _operation("One role, or the base", {200: ref("Model")}, (404,), [named])
        },
        "/tokenize": {
            "post": _operation(
                "Count the tokens of a call",
                {200: ref("Tokens")},
                errors=(400, 404, 413),
                body="TokenizeRequest",
                headers=("X-Session-ID", "X-Parent-Session-ID"),
            )
        },
        "/v1/sessions/{id}": {
            "get": _operation("A session's totals", {200: ref("Session")}, (404,), [session]),
            "delete": _operation("End a session", {200: ref("Deleted")}, (404,), [session]),
        },
        "/v1/sessions/{id}/calls": {
            "get": _operation(
                "A session's latest 256 calls", {200: ref("Calls")}, (404,), [session]
            )
        },
        "/v1/sessions/{id}/prefill": {
            "post": _operation(
                "Have the base read a context before a role is called",
                {200: ref("Prefill"), 202: ref("Prefill")},
                (400, 413, 422, 429, 502, 503, 504),
                [session],
                body="PrefillRequest",
                headers=("X-Parent-Session-ID", "X-PrefillShare-Strict"),
                answered=("X-PrefillShare-Break",),
            )
        },
        "/v1/roles": {
            "get": _operation("List the roles and who speaks for each", {200: ref("Roles")})
        },
        "/v1/roles/{name}": {
            "put": _operation(
                "Add a role, or give it another adapter",
                {200: ref("Role")},
                (400, 404, 409, 413, 502, 503, 504),
                [role],
                body="RoleRequest",
            ),
            "delete": _operation("Remove a role", {200: ref("Deleted")}, (404, 409), [role]),
        },
        "/v1/workers": {"get": _operation("List the workers", {200: ref("Workers")})},
        "/v1/workers/{id}/drain": {
            "post": _operation("Give a worker nothing new", {200: ref("Worker")}, (404,), [named]),
            "delete": _operation("Give it calls again", {200: ref("Worker")}, (404,), [named]),
        },
        "/health": {
            "get": _operation(
                "200 while every worker answers", {200: ref("Health"), 503: ref("Health")}
            )
        },
        "/live": {"get": _operation("200 while the router runs", {200: obj(status=string("ok"))})},
        "/metrics": {"get": _text("Metrics for Prometheus", "text/plain")},
        "/openapi.json": {"get": _operation("This document", {200: {"type": "object"}})},
    }


def _named(name: str) -> dict[str, Any]:
    return {"in": "path", "name": name, "required": True, "schema": {"type": "string"}}


def _operation(
    summary: str,
    answers: dict[int, dict[str, Any]],
    errors: tuple[int, ...] = (),
    parameters: list[dict[str, Any]] | None = None,
    *,
    body: str | None = None,
    headers: tuple[str, ...] = (),
    answered: tuple[str, ...] = (),
) -> dict[str, Any]:
    sent = [
        {"in": "header", "name": name, "schema": string(), "description": _CALL_HEADERS[name]}
        for name in headers
    ]
    told = {name: {"schema": string(), "description": _ANSWER_HEADERS[name]} for name in answered}
    operation: dict[str, Any] = {
        "summary": summary,
        "parameters": [*(parameters or ()), *sent],
        "responses": {
            **{str(status): _json("OK", schema, told) for status, schema in answers.items()},
            **{str(status): _json(_ERRORS[status], ref("Error"), {}) for status in errors},
        },
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref(body)}},
        }
    return operation


def _call(summary: str, body: str, answer: str, errors: tuple[int, ...]) -> dict[str, Any]:
    operation = _operation(
        summary,
        {200: ref(answer)},
        errors,
        body=body,
        headers=tuple(_CALL_HEADERS),
        answered=tuple(_ANSWER_HEADERS),
    )
    # With "stream": true. The last chunk has usage and `prefillshare`, then comes [DONE].
    content = operation["responses"]["200"]["content"]
    content["text/event-stream"] = {"schema": string("Server-sent events, one chunk each.")}
    return operation


def _json(text: str, schema: dict[str, Any], headers: dict[str, Any]) -> dict[str, Any]:
    found = {"description": text, "content": {"application/json": {"schema": schema}}}
    return {**found, "headers": headers} if headers else found


def _text(summary: str, media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": string()}}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}}}
