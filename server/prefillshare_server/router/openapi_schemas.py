"""Schemas of the OpenAPI document: what is sent and what is answered."""

from typing import Any

Schema = dict[str, Any]


def string(description: str = "") -> Schema:
    """A text."""
    return _described({"type": "string"}, description)


def integer(description: str = "", *, null: bool = False) -> Schema:
    """A count; with `null` it may be unknown."""
    return _described({"type": ["integer", "null"] if null else "integer"}, description)


def boolean(description: str = "") -> Schema:
    """A yes or no."""
    return _described({"type": "boolean"}, description)


def array(items: Schema, description: str = "") -> Schema:
    """A list."""
    return _described({"type": "array", "items": items}, description)


def ref(name: str) -> Schema:
    """One of SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


def obj(*required: str, **properties: Schema) -> Schema:
    """An object; further fields are allowed."""
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description} if description else schema


def _or_null(schema: Schema) -> Schema:
    return {"oneOf": [schema, {"type": "null"}]}


def _list(items: Schema) -> Schema:
    return obj("object", "data", object={"const": "list"}, data=array(items))


_MESSAGES = array(
    {"type": "object"}, "Text only. A leading system message is the role's own and rendered last."
)
_TOOLS = array({"type": "object"}, "Rendered behind the messages.")
_TEMPLATE = {"type": "object", "description": "Variables for the chat template."}
_SALT = string("KV is shared only with calls of the same salt.")
_MODEL = string("A role of the cluster.")

_CALL: dict[str, Schema] = {
    "model": _MODEL,
    "stream": boolean(),
    "n": integer("1 to 128."),
    "max_tokens": integer(),
    "session_id": string("Like the header X-Session-ID, which comes first."),
    "prompt_cache_key": string("The same."),
    "metadata": obj(session_id=string("The same.")),
    "cache_salt": _SALT,
}

SCHEMAS: dict[str, Schema] = {
    "Error": obj(
        "error",
        error=obj(
            "message",
            "type",
            "param",
            "code",
            message=string("What is wrong and what to do."),
            type=string("invalid_request_error or server_error."),
            param={"type": ["string", "null"], "description": "The field to change."},
            code={"type": ["string", "null"], "description": "For programs, stable."},
        ),
    ),
    "ChatRequest": obj(
        "model",
        "messages",
        **_CALL,
        messages=_MESSAGES,
        tools=_TOOLS,
        chat_template_kwargs=_TEMPLATE,
        max_completion_tokens=integer(),
    ),
    "CompletionRequest": obj(
        "model", "prompt", **_CALL, prompt={"description": "A text, token ids, or a list of these."}
    ),
    "ChatCompletion": obj(
        "id",
        "choices",
        id=string(),
        choices=array({"type": "object"}),
        usage=ref("Usage"),
        prefillshare=ref("Report"),
    ),
    "Completion": obj(
        "id",
        "choices",
        id=string(),
        choices=array({"type": "object"}),
        usage=ref("Usage"),
        prefillshare=ref("Report"),
    ),
    "Usage": obj(
        prompt_tokens=integer(),
        completion_tokens=integer(),
        total_tokens=integer(),
        prompt_tokens_details=obj(cached_tokens=integer("Found in the prefix cache.")),
    ),
    "Report": obj(
        session={"type": ["string", "null"]},
        role=string(),
        prefill_worker=string(),
        decode_worker=string(),
        affinity={"enum": ["new", "hit", "rebound", "none"]},
        cached_tokens=integer("Prompt tokens found in the prefix cache.", null=True),
        computed_tokens=integer("Prompt tokens computed.", null=True),
        per_model_prefill_tokens=integer(
            "What a prefill worker of the role's own would have computed, but for what was cached "
            "before the session read it.",
            null=True,
        ),
        handoff_bytes=integer("KV moved to the decode worker.", null=True),
        base_tokens_received=integer("Prompt tokens whose base KV was moved.", null=True),
        base_tokens_reused=integer("Those whose KV the decode worker held.", null=True),
        decode_prompt_tokens_computed=integer("1: the last one.", null=True),
        resumed=integer("How often the answer broke off and was continued."),
        **{"break": _or_null(ref("Break"))},
    ),
    "Break": obj(
        cause=string("See docs/prefix.md."),
        message_index=integer("Into the request's messages as sent.", null=True),
        detail=string("The place and the change."),
        expected=string("The earlier text around the first difference."),
        found=string("The later text there."),
        fix=string("What to do."),
        token_index=integer("Leading tokens still shared with an earlier context."),
        lost_tokens=integer("Tokens of the session's latest context behind that point."),
    ),
    "TokenizeRequest": obj(
        "model",
        model=_MODEL,
        messages=_MESSAGES,
        tools=_TOOLS,
        prompt=string("Instead of messages."),
        chat_template_kwargs=_TEMPLATE,
        return_token_strs=boolean(),
    ),
    "Tokens": obj(
        "count",
        "max_model_len",
        "tokens",
        count=integer("What the call's usage.prompt_tokens would be."),
        max_model_len=integer(),
        tokens=array(integer()),
        token_strs={"type": ["array", "null"], "items": {"type": "string"}},
    ),
    "Session": obj(
        id=string(),
        object={"const": "prefillshare.session"},
        calls=integer(),
        prompt_tokens=integer(),
        cached_tokens=integer(),
        computed_tokens=integer("For calls and ahead of them."),
        handoff_bytes=integer(),
        generated_tokens=integer(),
        per_model_prefill_tokens=integer(
            "What one prefill worker per role would have computed, but for what was cached before "
            "the session read it."
        ),
        prefills_ahead=integer("Contexts prefilled before a call needed them."),
        roles=array(string()),
        prefill_worker=string(),
    ),
    "Calls": _list(
        obj(
            index=integer("From 0, over all calls of the session."),
            role=string(),
            prompt_tokens=integer(),
            context_tokens=integer("Of these, the ones that the next calls repeat."),
            shared_tokens=integer(
                "Leading ones that an earlier prompt of the session had as well, cached or not."
            ),
            cached_tokens=integer(null=True),
            computed_tokens=integer(null=True),
            **{"break": _or_null(ref("Break"))},
        )
    ),
    "PrefillRequest": obj(
        "messages",
        messages=array({"type": "object"}, "The context, without a leading system message."),
        wait=boolean("Answer when it is computed."),
        chat_template_kwargs=_TEMPLATE,
        cache_salt=_SALT,
    ),
    "Prefill": obj(
        id=string("The session."),
        object={"const": "prefillshare.prefill"},
        prefill_worker=string(),
        affinity={"enum": ["new", "hit", "rebound"]},
        prompt_tokens=integer("Of the context."),
        cached_tokens=integer("Null while it is under way.", null=True),
        computed_tokens=integer("Null while it is under way.", null=True),
        **{"break": _or_null(ref("Break"))},
    ),
    "Deleted": obj(id=string(), object=string(), deleted={"const": True}),
    "Models": _list(ref("Model")),
    "Model": obj(
        id=string(),
        object={"const": "model"},
        created=integer(),
        owned_by=string(),
        parent={"type": ["string", "null"]},
        max_model_len=integer(),
        prefillshare=obj(kind={"enum": ["role", "base"]}, callable=boolean()),
    ),
    "Roles": _list(ref("Role")),
    "Role": obj(
        id=string(),
        object={"const": "prefillshare.role"},
        pool=string("The decode workers that speak for it."),
        adapter={"type": ["string", "null"]},
        decoder=string("Its name at the workers."),
    ),
    "RoleRequest": obj(
        "adapter",
        adapter=string("A directory on the router's machine, or a hub id."),
        allow_untrained=boolean(),
    ),
    "Workers": _list(ref("Worker")),
    "Worker": obj(
        id=string(),
        object={"const": "prefillshare.worker"},
        phase={"enum": ["prefill", "decode", "colocated"]},
        pool={"type": ["string", "null"]},
        roles=array(string()),
        state={"enum": ["up", "open", "draining"]},
        reason={"type": ["string", "null"]},
        in_flight=integer(),
        reserved_blocks=integer(),
        blocks=integer(),
    ),
    "Health": obj(status={"enum": ["ok", "unhealthy"]}, workers={"type": "object"}),
}
