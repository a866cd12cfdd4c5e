"""The calls of one session, judged one after the other: what each shares, and where it broke."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from prefillshare_prefix import Break, CallRow, Cause, Finding, History, Layout, Report, text_break
from prefillshare_prefix.compare import common, divergence, turned_round
from prefillshare_prefix.head import head_break
from prefillshare_prefix.messages import Message, Request, read_request
from prefillshare_prefix.rewriting import is_unwritten
from prefillshare_prefix.texts import common_prefix
from prefillshare_server.lint.rendering import ID_BYTES, Writer, Written

KEPT_PROMPTS = 64
_HEAD = {Cause.ROLE_PROMPT_FIRST, Cause.SYSTEM_CHANGED, Cause.TOOLS_CHANGED, Cause.TOOL_ORDER}


class _Prompt(NamedTuple):
    call: int | None
    """None where the parent made it."""
    request: Request
    written: Written

    def shared(self, written: Written) -> int:
        """Leading tokens that another prompt has as well."""
        return common_prefix(self.written.ids, written.ids) // ID_BYTES


class Judge:
    """Takes a session's chat requests in order and reports on them. Mutates nothing it is given."""

    def __init__(
        self, session: str | None, writer: Writer, layout: Layout, parent: Judge | None = None
    ) -> None:
        """`parent`: the judge of the session that this one forks from, as it is now."""
        self._session = session
        self._writer = writer
        self._layout: Layout = layout
        inherited = [each._replace(call=None) for each in parent._kept] if parent else []
        history = parent._history.fork() if parent else History(layout, kept=KEPT_PROMPTS)
        self._history: History = history
        self._kept: deque[_Prompt] = deque(inherited, maxlen=KEPT_PROMPTS)
        self._known: set[Message] = set(parent._known) if parent else set()
        self._rows: list[CallRow] = []
        self._findings: list[Finding] = []
        # What the fixes would give: among them is the layout that puts the context first.
        self._ideal: Judge | None = None
        if layout == "model":
            ideal = parent._ideal if parent else None
            self._ideal = Judge(session, writer, "context_first", ideal)

    def add(self, body: Mapping[str, Any], answer: Mapping[str, Any] | None = None) -> None:
        """Judge the session's next call. Raises ValueError for what cannot be rendered."""
        request = read_request(body, self._layout)
        written = self._writer.write(body, self._layout)
        shared, nearest = self._shared(written)
        found = self._break(body, request, written)
        call = len(self._rows)
        prompt = _Prompt(call, request, written)
        lost = self._lost(body, request, found, shared) if found else 0
        if found:
            before = self._parted_from(request, found) or nearest
            at = before.shared(written) if before else 0
            self._findings.append(
                Finding(
                    call,
                    before.call if before else None,
                    request.model,
                    found,
                    at,
                    lost,
                    written.tokens,
                )
            )
        self._rows.append(CallRow(call, request.model, written.tokens, shared, lost))
        self._kept.append(prompt)
        self._known.update(request.context)
        self._history.keep(body, answer)
        if self._ideal:
            self._ideal.add(body, answer)

    def report(self) -> Report:
        """What was found so far."""
        prompt_tokens = sum(row.prompt_tokens for row in self._rows)
        fixed = round(self._ideal.report().fixed_ratio * prompt_tokens) if self._ideal else None
        return Report(
            calls=len(self._rows),
            prompt_tokens=prompt_tokens,
            shared_tokens=sum(row.shared_tokens for row in self._rows),
            findings=tuple(self._findings),
            rows=tuple(self._rows),
            session=self._session,
            fixed_tokens=fixed,
            estimated=self._writer.estimated,
        )

    def _shared(self, written: Written) -> tuple[int, _Prompt | None]:
        """Leading tokens that some earlier prompt has as well, and the latest such prompt."""
        best, nearest = -1, None
        for prompt in reversed(self._kept):
            shared = prompt.shared(written)
            if shared > best:
                best, nearest = shared, prompt
        return max(best, 0), nearest

    def _parted_from(self, request: Request, found: Break) -> _Prompt | None:
        """The latest prompt that a break was found against, if one alone shows the same."""
        contexts = [prompt.request.context for prompt in self._kept]
        shared = max((common(context, request.context) for context in contexts), default=0)
        for prompt in reversed(self._kept):
            before = prompt.request
            diverged = divergence(before, request)
            parting = [turned_round(before, request, shared), diverged and diverged.found]
            if self._layout == "model":
                parting.append(head_break(before, request))
            if found in parting:
                return prompt
        return None

    def _break(self, body: Mapping[str, Any], request: Request, written: Written) -> Break | None:
        if not self._rows and self._kept:
            return None  # a child need not go on from one of its parent's contexts
        found = self._history.compare(body)
        if found is not None:
            kept = ((len(each.request.context), each.written.context) for each in self._kept)
            head = len(request.system)
            return None if is_unwritten(found, head, written.context, kept) else found
        extended = [prompt for prompt in self._kept if self._extends(request, prompt.request)]
        if not extended:
            return None
        before = max(extended, key=lambda prompt: len(prompt.request.context)).written.context
        return None if written.context.startswith(before) else text_break(before, written.context)

    def _extends(self, request: Request, before: Request) -> bool:
        if self._layout == "model" and (before.system, before.tools) != (
            request.system,
            request.tools,
        ):
            return False
        length = len(before.context)
        return 0 < length <= len(request.context) and request.context[:length] == before.context

    def _lost(self, body: Mapping[str, Any], request: Request, found: Break, shared: int) -> int:
        """Tokens computed again that would have been shared without the break."""
        if found.cause is Cause.UNRELATED:
            return 0
        known = [i for i, message in enumerate(request.context) if message in self._known]
        if found.cause is Cause.ROLE_CHANGED:
            texts = {message.text for message in self._known}
            known = [i for i, message in enumerate(request.context) if message.text in texts]
        last = known[-1] if known else -1
        if found.message_index is not None and found.cause not in _HEAD:
            last = max(last, found.message_index - len(request.system))
        head = len(request.system)
        in_head = self._layout == "model" and (
            found.cause in _HEAD or found.message_index is None or found.message_index < head
        )
        # A head is not part of the context, and would not be shared behind it.
        layout: Layout = "context_first" if in_head else self._layout
        part = {**body, "messages": list(body["messages"])[: head + last + 1]}
        try:
            count = self._writer.write(part, layout).context_tokens if last >= 0 else 0
        except ValueError:
            return 0  # the template takes no conversation that ends there
        return max(count - (0 if in_head else shared), 0)
