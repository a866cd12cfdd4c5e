"""A chat request, read and checked as the real router does it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefillshare_prefix import Layout

from ._errors import ApiError, bad_request, base_is_not_a_role, unknown_role
from ._rendering import SYSTEM_ROLES

BASE = "base"
"""What the fake calls its base: listed by /v1/models, and not callable."""

_MAX_ID = 255
_MAX_CHOICES = 128
_SPELLINGS = (
    ("header", "x-session-id"),
    ("header", "x-prefillshare-session"),
    ("body", "session_id"),
    ("header", "x-session-affinity"),
    ("body", "prompt_cache_key"),
    ("body", "metadata.session_id"),
)
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,128}")
_ONE_PROMPT = "the router renders the prompt once, for the base and the decoders alike"
_NO_PROMPT_LOGITS = "the decoder never computes the prompt: its KV comes from the base"
_REFUSED = {
    "best_of": "ask for n choices instead",
    "chat_template": f"{_ONE_PROMPT}; set the layout in the cluster file",
    "continue_final_message": "a role's instructions stand between the messages and the answer",
    "ec_transfer_params": "transfer parameters are the router's to set",
    "echo": _NO_PROMPT_LOGITS,
    "kv_transfer_params": "transfer parameters are the router's to set",
    "prompt_embeds": "the base prefills token ids",
    "prompt_logprobs": _NO_PROMPT_LOGITS,
    "suffix": "the decoders do not fill gaps",
    "truncate_prompt_tokens": "cutting the prompt would break the shared prefix; shorten it",
    "use_beam_search": "a handoff feeds one sequence; ask for n choices instead",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What one chat request asks for."""

    body: Mapping[str, Any]
    role: str
    session: str | None
    parent: str | None
    final: bool
    cache: object
    """Which cache it reads and fills: everybody's under None, or that of a salt."""
    strict: bool
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int
    max_tokens_field: str
    request_id: str
    """The client's, or one made here; every answer carries it, and so do errors from here on."""


def read_object(raw: bytes) -> dict[str, Any]:
    """A request body; raises ApiError 400 unless it is a JSON object."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise bad_request(f"the request body is not JSON: {error}", None) from None
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object", None)
    return body


def read_ask(
    body: Mapping[str, Any], headers: Mapping[str, str], roles: frozenset[str] | None
) -> Ask:
    """Read a chat request. `headers` has lower-case names; `roles` None allows every name.
    Messages and tools are left to `check_messages`.

    Raises ApiError 400, or 404 for a role that there is not.
    """
    role = read_role(body.get("model"), roles)
    _refuse(body)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise bad_request(f"stream_options must be an object, not {options!r}", "stream_options")
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if isinstance(value, int) and value < 1:
            raise bad_request(f"{name} must be at least 1, not {value}", name)
    field = "max_tokens"
    if body.get("max_completion_tokens") is not None:
        field = "max_completion_tokens"
    wanted = body.get(field)
    session, parent = read_session(headers, body)
    salt = salted(body)
    given_id = headers.get("x-request-id", "")
    return Ask(
        body=body,
        role=role,
        session=session,
        parent=parent,
        final=headers.get("x-session-final", "").strip().lower() in ("true", "1"),
        cache=salt if not isolated(headers, body) else (session, role, salt),
        strict=strict(headers),
        n=_choices(body.get("n")),
        stream=flag(body.get("stream"), "stream"),
        include_usage=flag((options or {}).get("include_usage"), "stream_options.include_usage"),
        max_tokens=wanted if isinstance(wanted, int) else 1,
        max_tokens_field=field,
        request_id=given_id if _PRINTABLE.fullmatch(given_id) else uuid.uuid4().hex,
    )


def read_role(model: object, roles: frozenset[str] | None) -> str:
    if not isinstance(model, str) or not model:
        known = f" of this cluster: {', '.join(sorted(roles))}" if roles else ""
        raise bad_request(f"model must name a role{known}", "model")
    if roles is None or model in roles:
        return model
    raise base_is_not_a_role(model, roles) if model == BASE else unknown_role(model, roles)


def read_session(
    headers: Mapping[str, str], body: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Return the session of a request, in the first spelling that is present, and its parent."""
    metadata = body.get("metadata")
    inner = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    found = {**body, "metadata.session_id": inner}
    session = None
    for place, name in _SPELLINGS:
        value = headers.get(name) if place == "header" else found.get(name)
        if value is not None and value != "":
            session = checked_id(value, name)
            break
    parent = headers.get("x-parent-session-id") or None
    return session, None if parent is None else checked_id(parent, "x-parent-session-id")


def checked_id(value: object, name: str) -> str:
    """Return a valid session id; raises ApiError 400 naming the place for another value."""
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string, not {type(value).__name__}", name)
    if not 0 < len(value) <= _MAX_ID:
        raise bad_request(
            f"{name} has {len(value)} characters; a session id has 1 to {_MAX_ID} "
            "(hash longer names)",
            name,
        )
    if not (value.isascii() and value.isprintable()):
        raise bad_request(f"{name} is not printable ASCII: {value!r}", name)
    return value


def check_messages(body: Mapping[str, Any]) -> None:
    """Raises ApiError 400, naming the place, unless messages and tools can be rendered."""
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list):
        raise bad_request("messages must be a list of messages", "messages")
    if tools is not None and not isinstance(tools, list):
        raise bad_request("tools must be a list of tools", "tools")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs")
    if not messages:
        raise _unfit("messages", "must not be empty; send at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _unfit(where, f"{message!r} is no message; send an object with a role")
        if not isinstance(message.get("role"), str):
            raise _unfit(f"{where}.role", f"{message.get('role')!r} is no role; send a string")
        _check_content(message.get("content"), f"{where}.content")
        _check_calls(message.get("tool_calls"), f"{where}.tool_calls")


def check_prefill(
    body: Mapping[str, Any], headers: Mapping[str, str], layout: Layout = "context_first"
) -> None:
    """Raises ApiError 400, naming the field, for what cannot be prefilled for every role."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a non-empty list of messages", "messages")
    first = messages[0]
    if isinstance(first, Mapping) and first.get("role") in SYSTEM_ROLES:
        raise bad_request(
            f"messages[0] is a leading {first['role']} message: it is a role's own and stands "
            "behind the context, so it cannot be prefilled for all roles; leave it out",
            "messages",
        )
    if body.get("tools"):
        raise bad_request(
            "tools are a role's own and stand behind the context, so they cannot be prefilled for "
            "all roles; leave them out",
            "tools",
        )
    if isolated(headers, body):
        raise bad_request(
            "with x-prefillshare-mode: isolate each role has KV of its own, and a prefill ahead "
            "serves no role; leave out one of them",
            "x-prefillshare-mode",
        )
    flag(body.get("wait"), "wait")
    strict(headers)
    if layout == "model":
        raise bad_request(
            "with layout.kind: model each role's instructions and tools stand in front of the "
            "conversation, so nothing can be prefilled for all roles; leave the prefill out, "
            "or serve with layout.kind: context-first",
            "messages",
        )
    check_messages(body)


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _unfit(where, f"{content!r} is no text; send a string or a list of text parts")
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        place = f"{where}[{position}]"
        if kind != "text":
            raise _unfit(f"{place}.type", f"{kind!r} is not supported; send only 'text' parts")
        if not isinstance(part.get("text"), str):
            raise _unfit(f"{place}.text", f"{part.get('text')!r} is no string")


def _check_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise _unfit(where, f"{calls!r} is no list; send a list of function calls")
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _unfit(
                f"{where}[{position}].function", f"needs a name and arguments; got {call!r}"
            )


def _unfit(where: str, what: str) -> ApiError:
    return bad_request(f"{where}: {what}", where)


def _refuse(body: Mapping[str, Any]) -> None:
    for name, why in _REFUSED.items():
        value = body.get(name)
        # Falsy values ask for nothing, but 0 is a number of prompt logprobs.
        if value is None or (not value and (name != "prompt_logprobs" or value is False)):
            continue
        if name == "best_of" and value == (body.get("n") or 1):
            continue
        raise _unsupported(name, f"{name} is not supported: {why}")
    for name, only in (("add_generation_prompt", True), ("add_special_tokens", False)):
        if body.get(name, only) not in (only, None):
            raise _unsupported(name, f"{name} must be {str(only).lower()}: {_ONE_PROMPT}")


def _unsupported(name: str, message: str) -> ApiError:
    return bad_request(message, name, code="unsupported_parameter")


def _choices(n: object) -> int:
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _MAX_CHOICES:
        raise bad_request(f"n must be a whole number from 1 to {_MAX_CHOICES}, not {n!r}", "n")
    return n


def flag(value: object, name: str) -> bool:
    if value in (None, True, False):
        return bool(value)
    raise bad_request(f"{name} must be true or false, not {value!r}", name)


def isolated(headers: Mapping[str, str], body: Mapping[str, Any]) -> bool:
    name = "x-prefillshare-mode"
    mode = headers.get(name, "").strip().lower()
    if mode not in ("", "share", "isolate"):
        raise bad_request(f"{name} must be share (the default) or isolate, not {mode!r}", name)
    salt = body.get("cache_salt")
    if mode == "isolate" and salt is not None and not (isinstance(salt, str) and salt):
        raise bad_request(f"cache_salt must be a non-empty string, not {salt!r}", "cache_salt")
    return mode == "isolate"


def salted(body: Mapping[str, Any]) -> str | None:
    """The name of the cache that a request asks for."""
    salt = body.get("cache_salt")
    return None if salt is None else json.dumps(salt)


def strict(headers: Mapping[str, str]) -> bool:
    name = "x-prefillshare-strict"
    value = headers.get(name, "").strip().lower()
    if value not in ("", "false", "0", "true", "1"):
        raise bad_request(f"{name} must be true or false, not {value!r}", name)
    return value in ("true", "1")
