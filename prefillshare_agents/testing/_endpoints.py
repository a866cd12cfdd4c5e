"""The endpoints of the fake server."""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from . import _reply as reply
from ._asking import (
    BASE,
    Ask,
    check_messages,
    check_prefill,
    checked_id,
    flag,
    read_ask,
    read_object,
    read_session,
    strict,
)
from ._breaks import HEADER
from ._errors import (
    ApiError,
    bad_request,
    context_too_long,
    no_such_path,
    unknown_role,
    unknown_session,
    wrong_method,
)
from ._http import Events, Json
from ._ledger import PREFILL_WORKER
from ._rendering import Prompt, render, tokens
from ._request import Request
from ._script import Answer, resolved, with_whole_tool_calls
from ._state import Cut, State, Stopped

_CHAT = "/v1/chat/completions"
_SESSIONS = "/v1/sessions/"
_MODELS = "/v1/models/"


class Endpoints:
    """Answers requests. Called from many threads."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._created = int(time.time())

    def __call__(self, request: Request, raw: bytes) -> Json | Events:
        try:
            return self._respond(request, raw)
        except ApiError as error:
            return Json(error.body(), error.status, error.headers)
        except Stopped:
            raise
        except Exception as error:
            # A function of the script, or an answer that is none: the test's mistake.
            traceback.print_exc()
            failed = ApiError(500, f"the script failed: {error!r}", code="script_failed")
            return Json(failed.body(), 500, {"x-should-retry": "false"})

    def _respond(self, request: Request, raw: bytes) -> Json | Events:
        state = self._state
        path = unquote(urlsplit(request.path).path)
        refused: ApiError | None = None
        try:
            request.body = read_object(raw) if raw else {}
            headers = dict(reversed(request.headers))
            request.session, _ = read_session(headers, request.body)
        except ApiError as error:
            refused = error
        role = request.body.get("model")
        request.role = role if isinstance(role, str) else None
        with state.changed:
            state.requests.append(request)
            if path == _CHAT and request.method == "POST":
                state.chats.append(request)
            failure = None
            if request.method != "GET" and state.failures:
                failure = state.failures.popleft()
            state.changed.notify_all()
        if failure is not None:
            raise failure.error()
        if refused is not None:
            raise refused
        if request.method == "POST" and not raw:
            read_object(raw)
        return self._route(request, path)

    def _route(self, request: Request, path: str) -> Json | Events:
        if path.startswith(_SESSIONS):
            return self._session(request, path.removeprefix(_SESSIONS))
        if path.startswith(_MODELS):
            return self._model(request, path.removeprefix(_MODELS))
        fixed = {
            _CHAT: ("POST", self._chat),
            "/tokenize": ("POST", self._tokenize),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/live": ("GET", self._live),
        }
        if path not in fixed:
            raise no_such_path(request.method, path)
        method, answer = fixed[path]
        if request.method != method:
            raise wrong_method(request.method, path, [method])
        return answer(request)

    # Chat

    def _chat(self, request: Request) -> Json | Events:
        headers = dict(reversed(request.headers))
        ask = read_ask(request.body, headers, self._state.roles)
        try:
            return self._answered(request, ask)
        except ApiError as error:
            error.headers["X-Request-Id"] = ask.request_id
            raise

    def _answered(self, request: Request, ask: Ask) -> Json | Events:
        state = self._state
        check_messages(ask.body)
        counted = render(ask.body["messages"], ask.body.get("tools"), state.layout).counted()
        self._require_room(len(counted.whole), ask.max_tokens, ask.max_tokens_field)
        with state.changed:
            number = state.chats.index(request)
            broken = state.ledger.broken(ask, counted) if ask.strict else None
            if broken is not None and broken.why.is_loss:
                raise broken.refusal()
            answers = [self._next_answer(ask, number) for _ in range(ask.n)]
        messages = [resolved(answer, request) for answer in answers]
        with state.changed:
            messages = [
                with_whole_tool_calls(message, state.script.tool_call_id) for message in messages
            ]
            generated = sum(map(reply.generated_tokens, messages))
            account = state.ledger.account(ask, counted, messages, generated)
            request.account = account
            state.seen_roles[ask.role] = None
            cut = state.cuts.popleft() if ask.stream and state.cuts else None
        known = reply.headers(account, ask.request_id)
        state.wait_at_gates(ask.role, None)
        if not ask.stream:
            return Json(reply.whole(ask, messages, account), headers=known)
        events = self._held(ask.role, reply.events(ask, messages, account))
        if cut is None:
            return Events(events, known)
        return Events(_cut(events, cut), known, cut.ending)

    def _next_answer(self, ask: Ask, number: int) -> Answer:
        state = self._state
        answer = state.script.take(ask.role)
        if answer is not None:
            return answer
        if not state.strict_script:
            return f"an answer by {ask.role}"
        where = f"call {number} (role {ask.role!r}, session {ask.session!r})"
        state.unscripted.append(where)
        raise ApiError(
            400,
            f"{where} has no scripted answer left; add one with server.script({ask.role!r}, [...])",
            code="unscripted_call",
            headers={"x-should-retry": "false"},
        )

    def _held(self, role: str, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for sent, event in enumerate(events, start=1):
            yield event
            self._state.wait_at_gates(role, sent)

    def _require_room(self, count: int, wanted: int, wanted_field: str) -> None:
        limit = self._state.max_model_len
        if count + wanted > limit:
            field = "messages" if count >= limit else wanted_field
            raise context_too_long(count, wanted, limit, field)

    # Sessions

    def _session(self, request: Request, rest: str) -> Json:
        name, _, last = rest.rpartition("/")
        request.session = name if last in ("prefill", "calls") else rest
        if request.method == "POST" and last == "prefill" and name:
            return self._prefill(request, name)
        if request.method == "GET" and last == "calls" and name:
            return Json({"object": "list", "data": list(self._known(name).calls)})
        if request.method == "GET":
            return Json(self._known(rest).report())
        if request.method == "DELETE":
            with self._state.changed:
                self._known(rest)
                del self._state.ledger.sessions[rest]
            return Json({"id": rest, "object": "prefillshare.session.deleted", "deleted": True})
        raise wrong_method(request.method, request.path, ["GET", "DELETE"])

    def _known(self, session_id: str) -> Any:
        session = self._state.ledger.sessions.get(session_id)
        if session is None:
            raise unknown_session(session_id)
        return session

    def _prefill(self, request: Request, session_id: str) -> Json:
        state, body = self._state, request.body
        headers = dict(reversed(request.headers))
        checked_id(session_id, "id")
        check_prefill(body, headers, state.layout)
        wait = flag(body.get("wait"), "wait")
        refuse = strict(headers)
        counted = Prompt("", render(body["messages"]).context, "").counted()
        self._require_room(len(counted.whole), 1, "messages")
        with state.changed:
            session = state.ledger.opened(session_id, headers.get("x-parent-session-id"))
            assert session is not None
            broken = session.broken(body, counted)
            if broken is not None and broken.why.is_loss and refuse:
                raise broken.refusal()
            done = state.ledger.prefill(session, counted, body, broken)
        if not wait:
            done |= {"cached_tokens": None, "computed_tokens": None}
        known = {HEADER: broken.header()} if broken is not None else {}
        return Json(done, 200 if wait else 202, known)

    # Everything else

    def _tokenize(self, request: Request) -> Json:
        body, state = request.body, self._state
        chat = "messages" in body
        if not chat and not isinstance(body.get("prompt"), str):
            raise bad_request("send messages, or prompt as a text, to be tokenised", "prompt")
        strings = flag(body.get("return_token_strs"), "return_token_strs")
        read_ask(body, dict(reversed(request.headers)), state.roles)
        if chat:
            check_messages(body)
            found = render(body["messages"], body.get("tools"), state.layout).counted().whole
        else:
            found = tokens(body["prompt"])
        return Json(
            {
                "count": len(found),
                "max_model_len": state.max_model_len,
                "tokens": [zlib.crc32(token.encode()) % 32_000 for token in found],
                "token_strs": found if strings else None,
            }
        )

    def _models(self, request: Request) -> Json:
        state = self._state
        roles = sorted(state.roles) if state.roles is not None else list(state.seen_roles)
        cards = [self._card(role, "role") for role in roles]
        return Json({"object": "list", "data": [*cards, self._card(BASE, "base")]})

    def _model(self, request: Request, name: str) -> Json:
        if request.method != "GET":
            raise wrong_method(request.method, request.path, ["GET"])
        if name == BASE:
            return Json(self._card(name, "base"))
        roles = self._state.roles
        if roles is not None and name not in roles:
            raise unknown_role(name, roles)
        return Json(self._card(name, "role"))

    def _card(self, name: str, kind: str) -> Mapping[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "prefillshare",
            "parent": BASE if kind == "role" else None,
            "max_model_len": self._state.max_model_len,
            "prefillshare": {"kind": kind, "callable": kind == "role"},
        }

    def _health(self, request: Request) -> Json:
        return Json({"status": "ok", "workers": {PREFILL_WORKER: "ok"}})

    def _live(self, request: Request) -> Json:
        return Json({"status": "ok"})


def _cut(events: Iterator[dict[str, Any]], cut: Cut) -> Iterator[dict[str, Any]]:
    """The events up to a cut, which always comes before the first finish_reason."""
    for sent, event in enumerate(events):
        ended = any(choice["finish_reason"] for choice in event["choices"])
        if ended or sent == cut.after or not event["choices"]:
            break
        yield event
    if cut.failure is not None:
        yield cut.failure.error().body()
