"""The life of one call. Start reading here."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from prefillshare_server.router.account import Account, Head
from prefillshare_server.router.ask import Ask
from prefillshare_server.router.fanout import Answer, merged
from prefillshare_server.router.handoff import Prompt
from prefillshare_server.router.parts import Router


async def call(router: Router, ask: Ask) -> AsyncGenerator[Head | Answer, None]:
    """Yield the response's head, then its chunks or its one JSON answer.

    Closing the generator, like an error, aborts what runs at the workers, returns what is leased
    and takes the call out of every count. Raises RouterError.
    """
    with (
        await router.limit.entered(ask.who) as queued_s,
        router.sessions.opened(ask.who) as session,  # 1. who: session, pin
    ):
        waited_s = queued_s + await router.ahead.finished(session)
        prompts = await router.prompts.tokens(ask, session)  # 2. tokens: rendered once
        router.metrics.tokenised(ask.started_at + waited_s)
        _require_unbroken(router, ask, prompts)
        async with (
            router.admission.admitted(ask, session, prompts) as readers,  # 3. admit
            router.prefill.handoffs(ask, session, readers) as handoffs,  # 4. prefill
        ):
            account = Account(router, ask, session, handoffs)
            router.warm_ups.start(ask, session, handoffs[0])
            yield account.head()
            decode = partial(router.recovery.answers, ask, session)
            async with aclosing(merged(handoffs, decode)) as answers:  # 5. handoff, 6. decode
                async for handoff, answer in answers:
                    for part in account.take(handoff, answer):
                        yield part
            for part in await account.settled():  # 7. account
                yield part


def _require_unbroken(router: Router, ask: Ask, prompts: Sequence[Prompt]) -> None:
    """Raise RouterError(422) for a prefix break that loses something, if the client allows none."""
    for prompt in prompts:
        if ask.strict and prompt.broken is not None and prompt.broken.why.is_loss:
            router.metrics.broke(ask.role, prompt.broken.why.cause)
            raise prompt.broken.error()
