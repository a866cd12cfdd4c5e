"""The endpoints of sessions: what they cost, their calls, prefill ahead, their end."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefillshare_server.router import ahead
from prefillshare_server.router.errors import unknown_session
from prefillshare_server.router.parts import Router
from prefillshare_server.router.respond import JSON, read_body, unless_left
from prefillshare_server.router.sessions import Session


class SessionsApi:
    """The endpoints below `/v1/sessions`."""

    def __init__(self, router: Router, max_body_mb: int) -> None:
        self._router = router
        self._max_body_mb = max_body_mb

    def routes(self) -> list[Route]:
        """Ids may hold slashes, so what ends otherwise comes first."""
        path = "/v1/sessions/{id:path}"
        return [
            Route(f"{path}/prefill", self.prefill, methods=["POST"]),
            Route(f"{path}/calls", self.calls, methods=["GET"]),
            Route(path, self.session, methods=["GET"]),
            Route(path, self.end, methods=["DELETE"]),
        ]

    async def session(self, request: Request) -> Response:
        """A session's totals."""
        return JSON(self._session(request).report())

    async def calls(self, request: Request) -> Response:
        """A session's latest calls, the oldest first."""
        data = [record.report() for record in self._session(request).calls]
        return JSON({"object": "list", "data": data})

    async def prefill(self, request: Request) -> Response:
        """Have the base read a context before a role is called. 202 while it is under way."""
        ask = ahead.parse(
            request.path_params["id"], await read_body(request, self._max_body_mb), request.headers
        )
        start = self._router.ahead.start(ask)
        if not self._router.limit.has_place(ask.who):
            start = unless_left(request.receive, start)
        answer, headers = await start
        return JSON(answer, status_code=200 if ask.wait else 202, headers=headers)

    async def end(self, request: Request) -> Response:
        """Forget a session."""
        session_id = request.path_params["id"]
        if not self._router.sessions.end(session_id):
            raise unknown_session(session_id)
        return JSON({"id": session_id, "object": "prefillshare.session.deleted", "deleted": True})

    def _session(self, request: Request) -> Session:
        session = self._router.sessions.get(request.path_params["id"])
        if session is None:
            raise unknown_session(request.path_params["id"])
        return session
