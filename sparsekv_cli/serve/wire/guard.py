"""Access control: this machine's pages and programs, the key, and pages of named origins."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sparsekv_cli.errors import BusyError
from sparsekv_cli.serve.page import STATIC
from sparsekv_cli.serve.wire.bodies import BodyError
from sparsekv_cli.serve.wire.connections import IS_FURTHER

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True)
class Access:
    """Who may send requests."""

    api_key: str = ""  # the key that a request must carry; empty: every request is accepted
    origins: tuple[str, ...] = ()  # of pages on other machines that may send requests
    # whether requests must name this machine, so that no foreign page can pass for it
    only_local: bool = True


class Guard:
    """Admits requests that name this machine, if required, and that have the key, if there is one.

    refuse: returns the response to a refused request of a path.
    """

    OPEN = ("/", "/health")  # paths that tell nothing private

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
        if scope.get(IS_FURTHER):
            return BusyError("there are too many connections: try again later")
        if "transfer-encoding" in headers and "content-length" in headers:  # they may disagree
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
        elif not is_open and self._is_foreign(headers):
            return HTTPException(
                403, "a page of another origin sent this request: name its origin with --cors"
            )
        return None

    def _is_foreign(self, headers: Mapping[str, bytes]) -> bool:
        """Returns whether a page sends the request that is neither ours nor of a named origin.

        A browser says so, whatever the method is. Other programs send neither header.
        """
        site = headers.get("sec-fetch-site", b"")
        origin = headers.get("origin", b"").decode("latin-1")
        if site in (b"same-origin", b"none"):
            return False
        if not origin:
            return site != b""
        host = headers.get("host", b"").decode("latin-1")
        return origin.partition("://")[2] != host and not {origin, "*"} & {*self._access.origins}
