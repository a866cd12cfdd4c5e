"""A team: the roles of one cluster as nodes of a graph."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self, Unpack
from uuid import UUID

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    convert_to_messages,
)
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import InjectedState
from pydantic import BaseModel

from .. import AsyncSession, Session
from .._identity import session_id_of_thread
from .._options import SessionOptions, TeamOptions
from ._chat import ChatPrefillShare
from ._clients import GraphAsyncOpenAI, GraphOpenAI
from ._transport import client_options, http_clients, keys

if TYPE_CHECKING:
    from ._middleware import PrefillShareMiddleware

NodeUpdate = dict[str, list[AIMessage]]


class Team:
    """Specialists that work on one context.

    >>> team = Team("http://127.0.0.1:8000/v1", ["planner", "critic"])
    >>> graph.add_node("planner", team.node("planner", instructions="Write a short plan."))
    >>> with team.session() as session:
    ...     graph.compile().invoke({"messages": [("user", "Where is Vega?")]})

    A role's instructions and tools travel with its own calls only and never enter the graph's
    state; the server puts them behind the conversation, so roles may differ in both as they like
    and still share the whole conversation's prefill.

    `with team:` closes its connections at the end, `async with team:` those of all runs.
    """

    def __init__(
        self,
        base_url: str,
        roles: Sequence[str] | Mapping[str, str],
        *,
        api_key: str | Callable[[], Any] = "local",
        speakers: bool = True,
        http_client: Any = None,
        http_async_client: Any = None,
        **options: Unpack[TeamOptions],
    ) -> None:
        """`roles`: names, or a map of names to models of the cluster where these differ.
        `api_key`: a text, or a function that returns one; an async one is for asynchronous runs.
        `speakers`: tell each role which answers are other roles'; see `ChatPrefillShare`.

        `http_client` and `http_async_client` are what `openai.OpenAI` and `openai.AsyncOpenAI`
        take as `http_client`, for synchronous and asynchronous runs; other `options` are those of
        both, such as `timeout`, `max_retries` and `on_prefix_break`.
        """
        if isinstance(roles, str):
            raise TypeError(f"roles is the string {roles!r}; give a list of names: [{roles!r}]")
        self.roles = dict(roles) if isinstance(roles, Mapping) else {name: name for name in roles}
        if not self.roles:
            raise ValueError("roles is empty; name at least one role of the cluster")
        self._speakers = speakers
        key, async_key = keys(api_key)
        client, async_client = http_clients(
            os.getenv("OPENAI_PROXY"), http_client, http_async_client
        )
        self._client = GraphOpenAI(base_url=base_url, api_key=key, http_client=client, **options)
        self._async_client = GraphAsyncOpenAI(
            base_url=base_url, api_key=async_key, http_client=async_client, **options
        )

    def model(
        self,
        role: str,
        *,
        session: Session | AsyncSession | str | None = None,
        **model_options: Any,
    ) -> ChatPrefillShare:
        """Return the chat model of `role`; all models of a team share its connections.

        `model_options` are those of `ChatPrefillShare`; `timeout`, `max_retries`, `api_key`,
        `base_url`, `openai_proxy` and `on_prefix_break` replace the team's, `default_headers` and
        `default_query` add to them.
        """
        if role not in self.roles:
            raise ValueError(f"role {role!r} is not in this team; it has {', '.join(self.roles)}")
        options, async_options = client_options(model_options)
        client = self._client.copy(**options)
        async_client = self._async_client.copy(**async_options)
        return ChatPrefillShare(
            model=self.roles[role],
            role=role,
            session=session,
            root_client=client,
            client=client.chat.completions,
            root_async_client=async_client,
            async_client=async_client.chat.completions,
            **{
                "speakers": self._speakers,
                "on_prefix_break": client._on_prefix_break,
                **model_options,
            },
        )

    def node(
        self,
        role: str,
        *,
        instructions: str | None = None,
        tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] = (),
        tool_choice: str | None = None,
        strict: bool | None = None,
        output: type[BaseModel] | None = None,
        **model_options: Any,
    ) -> Runnable[Any, NodeUpdate]:
        """Return a graph node in which `role` answers `state["messages"]`.

        Its answer is appended to the messages, named after the role. `tool_choice` is a tool's
        name, `"auto"` or `"required"`; with `strict=True` guided decoding keeps the arguments to
        the tool's schema, otherwise they are what the model makes of it. With `output` the answer
        is JSON of that model, by guided decoding too; parse it with
        `output.model_validate_json(message.text)`. Other options are those of `ChatPrefillShare`,
        such as `temperature` and `max_tokens`. Works in synchronous and asynchronous runs. Raises
        ValueError in a run whose state has no messages, or a system message as the first one.
        """
        if output is not None:
            # Where the model puts it too; a model has no option of this name.
            body = {"response_format": _json_schema(output), **model_options.pop("extra_body", {})}
            model_options["extra_body"] = body
        # A list that was written for this node has an order, and its role may have learnt it.
        model: Runnable[Any, AIMessage] = self.model(role, sort_tools=False, **model_options)
        if tools:
            assert isinstance(model, ChatPrefillShare)
            model = model.bind_tools(tools, tool_choice=tool_choice, strict=strict)

        def call(state: Any, config: RunnableConfig) -> NodeUpdate:
            return _update(role, model.invoke(_request(role, state, instructions), config))

        async def acall(state: Any, config: RunnableConfig) -> NodeUpdate:
            request = _request(role, state, instructions)
            return _update(role, await model.ainvoke(request, config))

        return RunnableLambda(call, afunc=acall, name=role)

    def agent(
        self,
        role: str,
        *,
        instructions: str | None = None,
        tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] = (),
        **options: Any,
    ) -> CompiledStateGraph[Any, Any, Any, Any]:
        """Return an agent of LangChain's `create_agent` whose model is `role`.

        It calls its tools until it has an answer. Other options are those of `create_agent`, and of
        `ChatPrefillShare`, such as `temperature`; its name is the role unless one is given.
        """
        from langchain.agents import create_agent

        of_agents = inspect.signature(create_agent).parameters
        of_model = {name for name in options.keys() & _model_options() if name not in of_agents}
        model_options = {name: options.pop(name) for name in sorted(of_model)}
        model = options.pop("model", None)
        if model is None:
            model = self.model(role, **model_options)
        elif model_options:
            names = ", ".join(f"{name}=" for name in model_options)
            raise ValueError(f"model= is given beside {names}; give {names} to that model")
        options = {"name": role, "system_prompt": instructions, **options}
        return create_agent(model, list(tools), **options)

    def middleware(self, role: str, **model_options: Any) -> PrefillShareMiddleware:
        """Return a middleware that makes `role` the model of the agent it is given to."""
        from ._middleware import PrefillShareMiddleware

        return PrefillShareMiddleware(self.model(role, **model_options))

    def tool(
        self,
        role: str,
        *,
        description: str,
        name: str | None = None,
        instructions: str | None = None,
        tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] = (),
        **options: Any,
    ) -> BaseTool:
        """Return a tool by which a supervisor asks `role`: `create_agent(tools=[team.tool(…)])`.

        The role reads the supervisor's conversation up to the question, so that it shares the
        prefill of all of it, and its answer is the tool's result. `name` is `ask_<role>` unless
        given; other options are those of `agent`.
        """
        agent = self.agent(role, instructions=instructions, tools=tools, **options)

        def ask(question: str, state: Annotated[Any, InjectedState]) -> str:
            return _last_text(agent.invoke(_asked(role, state, question)))

        async def aask(question: str, state: Annotated[Any, InjectedState]) -> str:
            return _last_text(await agent.ainvoke(_asked(role, state, question)))

        return StructuredTool.from_function(
            ask, coroutine=aask, name=name or f"ask_{role}", description=description
        )

    def session(
        self,
        id: str | None = None,
        *,
        thread_id: str | int | UUID | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Return a session on this team's server; enter it with `with` around the graph's run.

        `thread_id` makes it the one of the runs with that `configurable["thread_id"]`, so that
        they count here and can be ended, and go on in it without the block. Raises ValueError if
        `id` is given too. With `mode="isolate"` the server prefills for every role anew: the same
        graph without sharing, to compare with. Other options are those of `Session`.
        """
        return Session(_session_id(id, thread_id), client=self._client, **options)

    def asession(
        self,
        id: str | None = None,
        *,
        thread_id: str | int | UUID | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """Return an `AsyncSession` on this team's server; see `session`."""
        return AsyncSession(_session_id(id, thread_id), client=self._async_client, **options)

    def close(self) -> None:
        """Free the connections of synchronous runs."""
        self._client.close()

    async def aclose(self) -> None:
        """Free the connections of all runs."""
        self._client.close()
        await self._async_client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _session_id(id: str | None, thread_id: str | int | UUID | None) -> str | None:
    if id is not None and thread_id is not None:
        raise ValueError(f"id is {id!r} and thread_id is {thread_id!r}; give one of them")
    return id if thread_id is None else session_id_of_thread(thread_id)


def _model_options() -> set[str]:
    """Return the names that `ChatPrefillShare` takes."""
    fields = ChatPrefillShare.model_fields
    return {*fields, *(field.alias for field in fields.values() if field.alias)}


def _messages(role: str, state: Any) -> list[BaseMessage]:
    keyed = isinstance(state, Mapping)
    messages = state.get("messages") if keyed else getattr(state, "messages", None)
    if messages is None:
        names = state if keyed else getattr(state, "__dict__", ())
        raise ValueError(
            f"role {role!r}: the state has no messages, its keys are [{', '.join(names)}]; give "
            "the graph a state that has some, such as LangGraph's MessagesState, or call "
            f"team.model({role!r}) in a node of your own"
        )
    # Pairs and dictionaries are messages too, in a state without the `add_messages` reducer.
    return convert_to_messages(messages)


def _asked(role: str, state: Any, question: str) -> dict[str, list[BaseMessage]]:
    """Return the state of a role that is asked, by a tool call at the end of `state`."""
    messages = _messages(role, state)
    calling = next(
        (i for i in reversed(range(len(messages))) if isinstance(messages[i], AIMessage)),
        len(messages),
    )
    return {"messages": [*messages[:calling], HumanMessage(question)]}


def _last_text(state: Mapping[str, Any]) -> str:
    return str(state["messages"][-1].text)


def _json_schema(output: type[BaseModel]) -> dict[str, Any]:
    schema = {"name": output.__name__, "schema": output.model_json_schema(), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _request(role: str, state: Any, instructions: str | None) -> list[BaseMessage]:
    messages = _messages(role, state)
    if messages and isinstance(messages[0], SystemMessage):
        raise ValueError(
            'state["messages"] starts with a system message, which every role would get as its '
            "own; give each node its instructions= (they go to the end of the prompt)"
        )
    head = [] if instructions is None else [SystemMessage(instructions)]
    return [*head, *messages]


def _update(role: str, answer: AIMessage) -> NodeUpdate:
    return {"messages": [answer.model_copy(update={"name": role})]}
