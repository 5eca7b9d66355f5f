"""The page at /: the files of this folder, and the permissions that a browser gives them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER, STATIC = Path(__file__).parent, "/static/"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
TYPES["svg"] = "image/svg+xml"
# The page may use its own files and its own server. With require-trusted-types-for, a browser
# refuses every text that a script would turn into markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# A browser asks each time whether a file has changed, so that an upgrade is seen at once.
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[Route]:
    """Returns the routes of the page and of its files, which are read once."""
    paths = [path for path in FOLDER.rglob("*") if path.suffix[1:] in TYPES]
    files = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}

    async def answer(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404, f"the page has no file {name[:80]!a}")
        headers = {**HEADERS, "etag": f'"{hashlib.sha256(files[name]).hexdigest()[:32]}"'}
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    return [Route(path, answer, methods=["GET"]) for path in ("/", STATIC + "{name:path}")]
