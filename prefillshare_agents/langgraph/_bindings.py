"""What is made of a model and still keeps to its session: bindings, retries, fallbacks.

LangChain's own forms run where they are read. These look the session up where they are called, as
the model does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from langchain_core.exceptions import OutputParserException
from langchain_core.runnables import Runnable, RunnableConfig, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBinding
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.retry import RunnableRetry
from langchain_core.runnables.utils import Input, Output
from pydantic import BaseModel, ValidationError

from ._clients import session_of_call
from ._retry import TRANSIENT, retries_owned
from ._within import AnySession, awaited, awithin, entered, within

Item = TypeVar("Item")
Made = TypeVar("Made", bound=BaseModel)

_WORTH_RETRYING = (*TRANSIENT, OutputParserException, ValidationError)


class KeepsSession(Runnable[Input, Output]):
    """Whatever is called here runs in the session of this place, also if it is read later."""

    def _session_for(self, config: RunnableConfig | None) -> AnySession | None:
        return session_of_call(config)

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        with entered(self._session_for(config)):
            answer: Output = super().invoke(input, config, **kwargs)  # type: ignore[safe-super]
            return answer

    def ainvoke(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, Output]:
        return awaited(self._session_for(config), super().ainvoke(input, config, **kwargs))

    def batch(self, inputs: list[Input], config: Any = None, **kwargs: Any) -> list[Output]:
        with entered(self._session_for(_of_all(config))):
            return super().batch(inputs, config, **kwargs)

    def abatch(
        self, inputs: list[Input], config: Any = None, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Output]]:
        return awaited(self._session_for(_of_all(config)), super().abatch(inputs, config, **kwargs))

    def stream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        return within(self._session_for(config), super().stream(input, config, **kwargs))

    def astream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        return awithin(self._session_for(config), super().astream(input, config, **kwargs))

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        return within(self._session_for(config), super().transform(input, config, **kwargs))

    def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        return awithin(self._session_for(config), super().atransform(input, config, **kwargs))

    def astream_log(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        made: Any = super().astream_log(input, config, **kwargs)
        return awithin(self._session_for(config), made)

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        session = self._session_for(config)
        with entered(session):
            made: Any = super().stream_events(input, config, **kwargs)
        return within(session, made) if isinstance(made, Iterator) else made

    def astream_events(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        session = self._session_for(config)
        made: Any = super().astream_events(input, config, **kwargs)
        return (awithin if isinstance(made, AsyncIterator) else awaited)(session, made)

    def batch_as_completed(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        made: Any = super().batch_as_completed(inputs, config, **kwargs)
        return within(self._session_for(_of_all(config)), made)

    def abatch_as_completed(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        made: Any = super().abatch_as_completed(inputs, config, **kwargs)
        return awithin(self._session_for(_of_all(config)), made)

    def with_fallbacks(self, *args: Any, **kwargs: Any) -> Any:
        return _remade(EagerFallbacks, super().with_fallbacks(*args, **kwargs))


class MakesBindings(KeepsSession[Input, Output]):
    """What a binding is made of."""

    def bind(self, **kwargs: Any) -> Any:
        return _remade(EagerBinding, super().bind(**kwargs))

    def with_config(self, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return _remade(EagerBinding, super().with_config(config, **kwargs))

    def with_listeners(self, **kwargs: Any) -> Any:
        return _remade(EagerBinding, super().with_listeners(**kwargs))

    def with_alisteners(self, **kwargs: Any) -> Any:
        return _remade(EagerBinding, super().with_alisteners(**kwargs))

    def with_types(self, **kwargs: Any) -> Any:
        return _remade(EagerBinding, super().with_types(**kwargs))

    def with_retry(self, **kwargs: Any) -> Any:
        """As the parent's, and the only one to retry: the client's own retries are off then.

        By default it retries what may go away by itself, and no refusal of a request.
        """
        return _retried(self, kwargs)


class EagerBinding(KeepsSession[Any, Any], RunnableBinding[Any, Any]):
    """A model with bound options."""

    @classmethod
    def lc_id(cls) -> list[str]:
        """Serialise as what it is to LangChain."""
        return [*cls.get_lc_namespace(), "RunnableBinding"]

    def _session_for(self, config: RunnableConfig | None) -> AnySession | None:
        return session_of_call(merge_configs(self.config, config))

    def with_retry(self, **kwargs: Any) -> Any:
        return self.model_copy(update={"bound": _retried(self.bound, kwargs)})


class OwnRetry(MakesBindings[Any, Any], RunnableRetry[Any, Any]):
    """The owner of the retries of all calls inside."""

    @classmethod
    def lc_id(cls) -> list[str]:
        """Serialise as what it is to LangChain."""
        return [*cls.get_lc_namespace(), "RunnableRetry"]

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with retries_owned():
            return super().invoke(input, config, **kwargs)

    def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        return _owned(super().ainvoke(input, config, **kwargs))

    def batch(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        with retries_owned():
            return super().batch(inputs, config, **kwargs)

    def abatch(
        self, inputs: Any, config: Any = None, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]:
        return _owned(super().abatch(inputs, config, **kwargs))


class EagerFallbacks(MakesBindings[Any, Any], RunnableWithFallbacks[Any, Any]):
    """A model, and what to call where it fails."""

    @classmethod
    def lc_id(cls) -> list[str]:
        """Serialise as what it is to LangChain."""
        return [*cls.get_lc_namespace(), "RunnableWithFallbacks"]


async def _owned(answer: Awaitable[Item]) -> Item:
    with retries_owned():
        return await answer


def _retried(runnable: Runnable[Any, Any], options: dict[str, Any]) -> OwnRetry:
    options = {"retry_if_exception_type": _WORTH_RETRYING, **options}
    return _remade(OwnRetry, Runnable.with_retry(runnable, **options))


def _remade(kind: type[Made], made: Any) -> Made:
    """Return LangChain's `made` as `kind`, a subclass of its class."""
    return kind(**{name: getattr(made, name) for name in type(made).model_fields})


def _of_all(config: RunnableConfig | Sequence[RunnableConfig] | None) -> RunnableConfig | None:
    # Where each input has a config of its own, its call finds the session there.
    return None if isinstance(config, Sequence) else config
