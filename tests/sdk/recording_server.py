"""A small real HTTP server in the shape of the router, that records what it is sent."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = str | dict[str, Any]
"""A text, or a whole assistant message."""


@dataclass(frozen=True)
class Recorded:
    """One received request; `headers` keeps every header line, names in lower case."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: dict[str, Any]

    @property
    def sessions(self) -> list[str]:
        return [value for name, value in self.headers if name == "x-session-id"]


@dataclass
class _Ledger:
    context: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    generated: int = 0


class RecordingServer:
    """Answers chat completions from a script and counts words where a real server counts tokens.

    Like the real one it puts the leading system message behind the conversation, so the words
    that a session's call finds cached are those it shares with the calls before.
    """

    def __init__(self) -> None:
        self.requests: list[Recorded] = []
        self._script: deque[Answer] = deque()
        self._failures: deque[int] = deque()
        self.sessions: dict[str, _Ledger] = {}
        self.cut_streams = False
        self.cut_after: int | None = None  # deltas that a cut stream still sends; None for all
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_state = outer

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def script(self, *answers: Answer) -> None:
        self._script.extend(answers)

    def fail(self, *statuses: int) -> None:
        """Answer the next requests with these HTTP statuses."""
        self._failures.extend(statuses)

    @property
    def chats(self) -> list[Recorded]:
        return [item for item in self.requests if item.path == "/v1/chat/completions"]

    def next_failure(self) -> int | None:
        return self._failures.popleft() if self._failures else None

    def next_answer(self, model: str) -> dict[str, Any]:
        answer: Answer = f"an answer by {model}"
        if self._script:
            answer = self._script.popleft()
        if isinstance(answer, str):
            answer = {"content": answer}
        return {"role": "assistant", "content": None, **answer}

    def account(
        self, session: str | None, body: dict[str, Any], answer: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the `prefillshare` object of a call and add it to the session's ledger."""
        messages = list(body["messages"])
        tail = [messages.pop(0)] if messages[0]["role"] == "system" else []
        words = _words(messages)
        prompt = len(words) + len(_words(tail))
        known = self.sessions.get(session or "")
        cached = _shared(known.context, words) if known else 0
        if session:
            ledger = self.sessions.setdefault(session, _Ledger())
            ledger.context = words
            ledger.roles.append(body["model"])
            ledger.prompt += prompt
            ledger.cached += cached
            ledger.generated += len(_words([answer]))
        return {
            "session": session,
            "role": body["model"],
            "prefill_worker": "prefill-0",
            "decode_worker": f"{body['model']}-0",
            "affinity": "hit" if known else "new",
            "cached_tokens": cached,
            "computed_tokens": prompt - cached,
            "handoff_bytes": 1000 * prompt,
            "base_tokens_reused": 0,
            "decode_prompt_tokens_computed": 1,
            "break": None,
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes a stream early is no error of the test."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_state: RecordingServer

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def do_GET(self) -> None:
        state = self._record({})
        ledger = state.sessions.get(self.path.rsplit("/", 1)[-1])
        if ledger is None:
            return self._error(404, "no such session")
        return self._json(
            {
                "calls": len(ledger.roles),
                "prompt_tokens": ledger.prompt,
                "cached_tokens": ledger.cached,
                "computed_tokens": ledger.prompt - ledger.cached,
                "handoff_bytes": 1000 * ledger.prompt,
                "generated_tokens": ledger.generated,
                "per_model_prefill_tokens": ledger.prompt,
                "roles": sorted(set(ledger.roles)),
                "prefill_worker": "prefill-0",
            }
        )

    def do_DELETE(self) -> None:
        state = self._record({})
        if failure := state.next_failure():
            return self._error(failure, "scripted failure")
        if state.sessions.pop(self.path.rsplit("/", 1)[-1], None) is None:
            return self._error(404, "no such session")
        return self._json({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self._record(body)
        with state.lock:
            failure = state.next_failure()
            if failure is not None:
                return self._error(failure, "scripted failure")
            answer = state.next_answer(body["model"])
            account = state.account(self.headers.get("X-Session-ID"), body, answer)
        if body.get("stream"):
            return self._stream(body, answer, account)
        choice = {"index": 0, "message": answer, "finish_reason": _finish(answer)}
        return self._json(
            {
                **_envelope(body, "chat.completion"),
                "choices": [choice],
                "usage": _usage(account, answer),
                "prefillshare": account,
            },
            account,
        )

    def _record(self, body: dict[str, Any]) -> RecordingServer:
        headers = tuple((name.lower(), value) for name, value in self.headers.items())
        self.server_state.requests.append(Recorded(self.command, self.path, headers, body))
        return self.server_state

    def _error(self, status: int, message: str) -> None:
        error = {"message": message, "type": "test", "param": None, "code": None}
        self._json({"error": error}, status=status)

    def _head(self, status: int, kind: str, account: dict[str, Any] | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name in ("session", "prefill_worker", "decode_worker", "affinity", "cached_tokens"):
            if account is not None and account[name] is not None:
                header = "X-PrefillShare-" + name.replace("_", "-").title()
                self.send_header(header, str(account[name]))
        self.end_headers()

    def _json(
        self, body: dict[str, Any], account: dict[str, Any] | None = None, status: int = 200
    ) -> None:
        self._head(status, "application/json", account)
        self.wfile.write(json.dumps(body).encode())

    def _stream(
        self, body: dict[str, Any], answer: dict[str, Any], account: dict[str, Any]
    ) -> None:
        self._head(200, "text/event-stream", account)
        envelope = _envelope(body, "chat.completion.chunk")
        state = self.server_state
        deltas = _deltas(answer)
        for delta in deltas[: state.cut_after] if state.cut_streams else deltas:
            self._event({**envelope, "choices": [{"index": 0, "delta": delta}]})
        if state.cut_streams:
            return
        last = {"index": 0, "delta": {}, "finish_reason": _finish(answer)}
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({**envelope, "choices": [last]})
            usage = _usage(account, answer)
            self._event({**envelope, "choices": [], "usage": usage, "prefillshare": account})
        else:
            self._event({**envelope, "choices": [last], "prefillshare": account})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


def _words(messages: list[dict[str, Any]]) -> list[str]:
    return " ".join(f"{item['role']} {item.get('content') or ''}" for item in messages).split()


def _shared(left: list[str], right: list[str]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _finish(answer: dict[str, Any]) -> str:
    return "tool_calls" if answer.get("tool_calls") else "stop"


def _envelope(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": body["model"]}


def _usage(account: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    prompt = account["cached_tokens"] + account["computed_tokens"]
    generated = len(_words([answer]))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": account["cached_tokens"]},
    }


def _deltas(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Cut an answer into pieces the way vLLM streams it: text by parts, arguments by parts."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning", "content"):
        text = answer.get(name) or ""
        deltas += [{name: text[i : i + 4]} for i in range(0, len(text), 4)]
    for index, call in enumerate(answer.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        head = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        for i in range(0, len(arguments), 4):
            part = {"index": index, "function": {"arguments": arguments[i : i + 4]}}
            deltas.append({"tool_calls": [part]})
    return deltas
