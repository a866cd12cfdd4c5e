"""The parts of a router, put together once per application."""

from dataclasses import dataclass

from prefillshare_server.router.admission import Admission
from prefillshare_server.router.ahead import Ahead
from prefillshare_server.router.colocated import Colocated
from prefillshare_server.router.decode import Decode
from prefillshare_server.router.health import Health
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.prefill import Prefill
from prefillshare_server.router.prompt import Prompts
from prefillshare_server.router.recovery import Recovery
from prefillshare_server.router.session_limit import SessionLimit
from prefillshare_server.router.sessions import Sessions
from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.warm_ups import WarmUps
from prefillshare_server.router.workers import Workers


@dataclass(frozen=True, slots=True)
class Router:
    """The parts a call passes through."""

    workers: Workers
    sessions: Sessions
    limit: SessionLimit
    tokens: Tokens
    prompts: Prompts
    health: Health
    placement: Placement
    admission: Admission
    prefill: Prefill | Colocated
    ahead: Ahead
    warm_ups: WarmUps
    decode: Decode
    recovery: Recovery
    metrics: Metrics
