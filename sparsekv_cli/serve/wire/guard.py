"""Who may send requests: pages and programs here, clients with the key, named origins."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sparsekv_cli.serve.page import STATIC
from sparsekv_cli.serve.wire.bodies import BodyError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True)
class Access:
    """Who may send requests."""

    api_key: str = ""  # the key that a request must carry; empty: every request is accepted
    origins: tuple[str, ...] = ()  # of pages on other machines that may send requests
    # requests must name this machine, so that no page elsewhere can pass for it
    only_local: bool = True


class Guard:
    """Accepts requests that name this machine, if required, and have the key, if there is one.

    refuse: returns the response to a refused request of a path.
    """

    OPEN = ("/", "/health")  # which reveal nothing

    def __init__(
        self, app: ASGIApp, access: Access, refuse: Callable[[str, Exception], Response]
    ) -> None:
        self._app, self._access, self._refuse = app, access, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (error := self._reason_against(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await self._refuse(scope["path"], error)(scope, receive, send)

    def _reason_against(self, scope: Scope) -> Exception | None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        if "transfer-encoding" in headers and "content-length" in headers:  # two ends of one body
            return BodyError("Content-Length and Transfer-Encoding exclude each other")
        if self._access.only_local:
            host = headers.get("host", b"").decode("latin-1").lower()
            if host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
                return HTTPException(421, "this server answers requests to localhost only")
        is_open = scope["path"] in self.OPEN or scope["path"].startswith(STATIC)
        if self._access.api_key and not is_open:
            given = headers.get("authorization", b"").partition(b" ")
            key = given[2].strip() if given[0].lower() == b"bearer" else b""
            key = key or headers.get("x-api-key", b"")
            if not hmac.compare_digest(key, self._access.api_key.encode()):
                return HTTPException(
                    401, "the API key is missing or wrong", {"www-authenticate": "Bearer"}
                )
        return None
