"""`POST /tokenize`, as vLLM has it: the ids that a call with the same fields would have.

So a client can count tokens before it calls. It reads the session's ledger and changes nothing.
"""

from collections.abc import Mapping
from typing import Any

from prefillshare_server.router.ask import asked, flag, json_object
from prefillshare_server.router.errors import bad_request
from prefillshare_server.router.parts import Router
from prefillshare_server.router.topology import Decoder


async def tokenize(
    router: Router,
    raw: bytes,
    headers: Mapping[str, str],
    *,
    roles: Mapping[str, Decoder],
    base_name: str,
    max_model_len: int,
) -> dict[str, Any]:
    """The answer: `count`, `max_model_len`, `tokens` and, if asked for, `token_strs`.

    Prompts that are longer than the cluster's context are counted as well. Raises RouterError:
    400 for what a call could not be made of, 404 for an unknown role.
    """
    body = json_object(raw)
    chat = "messages" in body
    if not chat and not isinstance(body.get("prompt"), str):
        raise bad_request("send messages, or prompt as a text, to be tokenised", "prompt")
    strings = flag(body.get("return_token_strs"), "return_token_strs")
    ask = asked("chat" if chat else "completions", body, headers, roles=roles, base_name=base_name)
    [prompt] = await router.prompts.rendered(ask, router.sessions.look(ask.who))
    return {
        "count": len(prompt.ids),
        "max_model_len": max_model_len,
        "tokens": list(prompt.ids),
        "token_strs": router.tokens.strings(prompt.ids) if strings else None,
    }
