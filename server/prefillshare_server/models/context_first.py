"""Writes the context-first chat template: the conversation first, the role last.

A role's instructions and tools at the head of a prompt leave nothing for the roles to share.
The generated template is a prelude that moves them into one final message, followed by the
model's own template, unchanged. It is plain Jinja: transformers and vLLM render it as it is.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from prefillshare_server.models import jinja_env

TailRole = Literal["system", "user"]

# Wording of Qwen's and Hermes' templates: what models trained on tools have seen most, and
# what vLLM's `hermes` tool parser reads.
_TOOLS_BEFORE = (
    "# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_AFTER = (
    "\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)

# Every tag strips the whitespace around it, except the very last: its newline is removed by
# trim_blocks, so that the model's template starts at the start of a line, as it would alone.
_PRELUDE = """\
{%- set prefillshare = namespace(messages=@FIRST@, tail=[], leading=true, text='', parts=[]) -%}
{%- for message in messages -%}
  {%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
  {%- set content = message.get('content') -%}
  {%- if content is none -%}
    {%- set prefillshare.text = '' -%}
  {%- elif content is string -%}
    {%- set prefillshare.text = content -%}
  {%- else -%}
    {%- set prefillshare.parts = [] -%}
    {%- for part in content -%}
      {%- if part['type'] != 'text' -%}
        {{- raise_exception("content part '" ~ part['type'] ~ "': only text is supported") -}}
      {%- endif -%}
      {%- set prefillshare.parts = prefillshare.parts + [part['text']] -%}
    {%- endfor -%}
    {%- set prefillshare.text = prefillshare.parts | join('\\n') -%}
  {%- endif -%}
  {%- if prefillshare.leading and role == 'system' -%}
    {%- if prefillshare.text | trim -%}
      {%- set prefillshare.tail = prefillshare.tail + [prefillshare.text | trim] -%}
    {%- endif -%}
  {%- else -%}
    {%- set prefillshare.leading = false -%}
@REWRITE@
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {%- set prefillshare.parts = [] -%}
  {%- for tool in tools -%}
    {%- set prefillshare.parts = prefillshare.parts + [tool | tojson] -%}
  {%- endfor -%}
  {%- set prefillshare.text = @BEFORE@ ~ (prefillshare.parts | join('\\n')) ~ @AFTER@ -%}
  {%- set prefillshare.tail = prefillshare.tail + [prefillshare.text] -%}
{%- endif -%}
{%- if prefillshare.tail -%}
  {%- set prefillshare.text = prefillshare.tail | join('\\n\\n') -%}
@TAIL@
{%- endif -%}
{%- set messages = prefillshare.messages -%}
{%- set tools = none %}
"""

# Templates take an empty or null `tool_calls` for a call, so it goes.
_KEEP = """\
    {%- if not message.get('tool_calls') -%}
      {%- set message = dict(message.items() | rejectattr(0, 'equalto', 'tool_calls')) -%}
    {%- endif -%}
    {%- set prefillshare.messages = prefillshare.messages
        + [dict(message, role=role, content=prefillshare.text)] -%}"""

_CALLS_INTO_CONTENT = """\
    {%- for call in message.get('tool_calls') or [] -%}
      {%- set function = call['function'] -%}
      {%- set arguments = function['arguments'] or '{}' -%}
      {%- set prefillshare.text = prefillshare.text ~ ('\\n' if prefillshare.text else '')
          ~ '<tool_call>\\n{"name": ' ~ (function['name'] | tojson) ~ ', "arguments": '
          ~ (arguments if arguments is string else arguments | tojson) ~ '}\\n</tool_call>' -%}
    {%- endfor -%}"""

_RESULTS_INTO_USER = """\
    {%- if role == 'tool' -%}
      {%- set role = 'user' -%}
      {%- set prefillshare.text
          = '<tool_response>\\n' ~ prefillshare.text ~ '\\n</tool_response>' -%}
    {%- endif -%}"""

_SYSTEM_TAIL = """\
  {%- set prefillshare.messages = prefillshare.messages
      + [{'role': 'system', 'content': prefillshare.text}] -%}"""

# Templates without system messages at the end mostly insist on alternating roles as well, so
# the tail joins a final user message instead of following it.
_USER_TAIL = """\
  {%- set last = prefillshare.messages | last -%}
  {%- if last and last['role'] == 'user' -%}
    {%- set prefillshare.messages = prefillshare.messages[:-1]
        + [dict(last, content=last['content'].rstrip() ~ '\\n\\n' ~ prefillshare.text)] -%}
  {%- else -%}
    {%- set prefillshare.messages = prefillshare.messages
        + [{'role': 'user', 'content': prefillshare.text}] -%}
  {%- endif -%}"""


def context_first(
    template: str, *, tail_role: TailRole = "system", shared_head: str | None = None
) -> str:
    """Jinja source that renders `template` with the leading system message and the tools last.

    Args:
        template: a model's chat template.
        tail_role: role of the final message. `user` joins it to a final user message.
        shared_head: a system message that opens the prompt of every role.

    Tool calls and tool results that `template` does not render are written into the content
    of ordinary messages, so that a history with tools is never cut silently.
    """
    first = "[]"
    if shared_head is not None:
        first = "[{'role': 'system', 'content': " + _literal(shared_head) + "}]"
    rewrite = [_KEEP]
    if not _renders_tool_results(template):
        rewrite.insert(0, _RESULTS_INTO_USER)
    if not _renders_tool_calls(template):
        rewrite.insert(0, _CALLS_INTO_CONTENT)
    prelude = (
        _PRELUDE.replace("@REWRITE@", "\n".join(rewrite))
        .replace("@TAIL@", _SYSTEM_TAIL if tail_role == "system" else _USER_TAIL)
        .replace("@BEFORE@", _literal(_TOOLS_BEFORE))
        .replace("@AFTER@", _literal(_TOOLS_AFTER))
        .replace("@FIRST@", first)
    )
    return prelude + template


_PROBE = "prefillshare-probe"
_ASK = {"role": "user", "content": "a"}
_CALL = {"id": "000000000", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "000000000", "name": "f", "content": _PROBE}


def _renders_tool_calls(template: str) -> bool:
    return _PROBE in _try(template, [_ASK, _CALLING])


def _renders_tool_results(template: str) -> bool:
    calling = {**_CALLING, "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": {}}}]}
    return _PROBE in _try(template, [_ASK, calling, _RESULT])


def _try(template: str, messages: list[dict[str, Any]]) -> str:
    """`messages` rendered, or nothing when the template refuses them."""
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    try:
        return jinja_env.render(
            template,
            {"messages": messages, "tools": None, "add_generation_prompt": False, **tokens},
        )
    except ValueError:
        return ""


def _literal(text: str) -> str:
    """`text` as a Jinja string. JSON's escapes mean the same there; a non-ASCII character
    stays itself, because JSON would escape it as surrogates, which Jinja does not join."""
    return json.dumps(text, ensure_ascii=False)
