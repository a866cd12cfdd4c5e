"""What a client asks for: the request body, checked for what no decode worker could do."""

import re
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json, to_json

from prefillshare_server.router.errors import bad_request, base_is_not_a_role, unknown_role
from prefillshare_server.router.identity import Identity, identify
from prefillshare_server.router.topology import Decoder

Kind = Literal["chat", "completions"]

MAX_CHOICES = 128

_ONE_PROMPT = "the router renders the prompt once, for the base and the decoders alike"
_NO_PROMPT_LOGITS = "the decoder never computes the prompt: its KV comes from the base"

_REFUSED: dict[str, str] = {
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
"""Fields that vLLM takes and this cluster cannot serve, and why."""

_PRINTABLE = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client. `body` is as it was sent and never mutated."""

    kind: Kind
    body: Mapping[str, Any]
    role: str
    decoder: Decoder
    """Speaks for the role to the end of this call, whatever becomes of the role meanwhile."""
    who: Identity
    n: int
    stream: bool
    include_usage: bool
    """The client wants the usage chunk at the end of its stream."""
    return_token_ids: bool
    request_id: str
    """The client's X-Request-Id, or one made here; echoed to the client and never sent on, since
    clients repeat theirs when they retry."""
    isolated: bool = False
    """The session's roles share no KV in this call: sharing switched off, to measure it."""
    separate: bool = False
    """Roles share no KV in this cluster, whichever session."""
    next_role: str | None = None
    """Whose turn is next, if the client says so and the cluster has a use for it."""
    strict: bool = False
    """A prefix break is an error."""
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def cache_salt(self) -> Any:
        """Whose KV blocks the call may share at the workers: those of calls with the same salt."""
        salt = self.body.get("cache_salt")
        if self.isolated:
            return to_json(["isolate", self.who.session, self.role, salt]).decode()
        return to_json(["role", self.role, salt]).decode() if self.separate else salt

    @property
    def answer_id(self) -> str:
        """`id` of the answer and of all chunks of its stream."""
        return ("chatcmpl-" if self.kind == "chat" else "cmpl-") + self.request_id

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate per choice, if the client said."""
        value = self.body.get(self.max_tokens_field)
        return value if isinstance(value, int) else None

    @property
    def max_tokens_field(self) -> str:
        """Name of the field that says so."""
        if self.kind == "chat" and self.body.get("max_completion_tokens") is not None:
            return "max_completion_tokens"
        return "max_tokens"


def parse(
    kind: Kind,
    raw: bytes,
    headers: Mapping[str, str],
    *,
    roles: Mapping[str, Decoder],
    base_name: str,
    separate: bool = False,
    warms_up: bool = False,
) -> Ask:
    """Read a request. `headers` is case-insensitive.

    `separate` is `Ask.separate`; the next role is read with `warms_up` only. Raises RouterError 400
    for what cannot be served and 404 for an unknown role. Everything not mentioned here is left to
    the decode worker, whose errors reach the client unchanged.
    """
    return asked(
        kind,
        json_object(raw),
        headers,
        roles=roles,
        base_name=base_name,
        separate=separate,
        warms_up=warms_up,
    )


def asked(
    kind: Kind,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    roles: Mapping[str, Decoder],
    base_name: str,
    separate: bool = False,
    warms_up: bool = False,
) -> Ask:
    """The same for a body that was read."""
    role = _role(body.get("model"), roles, base_name)
    _refuse(kind, body)
    options = _stream_options(body.get("stream_options"))
    _require_some_tokens(body)
    if separate:
        _require_text_salt(body)
    given_id = headers.get("x-request-id", "")
    return Ask(
        kind=kind,
        body=body,
        role=role,
        decoder=roles[role],
        who=identify(headers, body),
        isolated=isolated(headers, body),
        separate=separate,
        next_role=_next_role(headers, roles) if warms_up else None,
        strict=strict(headers),
        n=_choices(body.get("n")),
        stream=flag(body.get("stream"), "stream"),
        include_usage=flag(options.get("include_usage"), "stream_options.include_usage"),
        return_token_ids=bool(body.get("return_token_ids")),
        request_id=given_id if _PRINTABLE.fullmatch(given_id) else uuid.uuid4().hex,
    )


def salted(cache_salt: Any) -> dict[str, Any]:
    """The field of a worker's request that names whose blocks it may share, if any."""
    return {} if cache_salt is None else {"cache_salt": cache_salt}


def isolated(headers: Mapping[str, str], body: Mapping[str, Any]) -> bool:
    """Whether X-PrefillShare-Mode says so. Raises RouterError(400) for another word than two."""
    mode = headers.get("x-prefillshare-mode", "").strip().lower()
    if mode not in ("", "share", "isolate"):
        raise bad_request(
            f"x-prefillshare-mode must be share (the default) or isolate, not {mode!r}",
            "x-prefillshare-mode",
        )
    if mode == "isolate":
        _require_text_salt(body)
    return mode == "isolate"


def _require_text_salt(body: Mapping[str, Any]) -> None:
    """Where it goes into a salt of the router's, no worker judges it."""
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise bad_request(f"cache_salt must be a non-empty string, not {salt!r}", "cache_salt")


def _next_role(headers: Mapping[str, str], roles: Collection[str]) -> str | None:
    name = headers.get("x-prefillshare-next-role") or None
    if name is not None and name not in roles:
        raise bad_request(
            f"x-prefillshare-next-role names no role of this cluster: {name!r}; roles: "
            f"{', '.join(sorted(roles))}",
            "x-prefillshare-next-role",
        )
    return name


def strict(headers: Mapping[str, str]) -> bool:
    """Whether X-PrefillShare-Strict says so. Raises RouterError(400) for what is no yes or no."""
    value = headers.get("x-prefillshare-strict", "").strip().lower()
    if value in ("", "false", "0"):
        return False
    if value in ("true", "1"):
        return True
    raise bad_request(
        f"x-prefillshare-strict must be true or false, not {value!r}", "x-prefillshare-strict"
    )


def json_object(raw: bytes) -> Mapping[str, Any]:
    """A request's body. Raises RouterError(400) for what is no JSON object."""
    try:
        body = from_json(raw)
    except ValueError as error:
        raise bad_request(f"the request body is not JSON: {error}", None) from None
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object", None)
    return body


def _role(model: object, roles: Collection[str], base_name: str) -> str:
    if not isinstance(model, str) or not model:
        raise bad_request(
            f"model must name a role of this cluster: {', '.join(sorted(roles))}", "model"
        )
    if model in roles:
        return model
    raise base_is_not_a_role(model, roles) if model == base_name else unknown_role(model, roles)


def _refuse(kind: Kind, body: Mapping[str, Any]) -> None:
    for name, why in _REFUSED.items():
        value = body.get(name)
        # Falsy values ask for nothing, but 0 is a number of prompt logprobs.
        if value is None or (not value and (name != "prompt_logprobs" or value is False)):
            continue
        if name == "best_of" and value == (body.get("n") or 1):
            continue
        raise bad_request(f"{name} is not supported: {why}", name, code="unsupported_parameter")
    if kind == "completions":
        return
    for name, only in (("add_generation_prompt", True), ("add_special_tokens", False)):
        if body.get(name, only) not in (only, None):
            raise bad_request(
                f"{name} must be {str(only).lower()}: {_ONE_PROMPT}",
                name,
                code="unsupported_parameter",
            )


def _stream_options(options: object) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise bad_request(f"stream_options must be an object, not {options!r}", "stream_options")
    return options


def flag(value: object, name: str) -> bool:
    """A field that is true, false or left out. Raises RouterError(400) naming `name`."""
    if value in (None, True, False):
        return bool(value)
    # "false" would count as true here and as false at the decode worker.
    raise bad_request(f"{name} must be true or false, not {value!r}", name)


def _require_some_tokens(body: Mapping[str, Any]) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if isinstance(value, int) and value < 1:
            raise bad_request(f"{name} must be at least 1, not {value}", name)


def _choices(n: object) -> int:
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_CHOICES:
        raise bad_request(f"n must be a whole number from 1 to {MAX_CHOICES}, not {n!r}", "n")
    return n
