"""The command that installs an extra, in the way in which this program was installed."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "sparsekv-cli"


def install_command(extra: str) -> str:
    """Returns the command that installs an extra: of pip, uv or pipx, whichever was used."""
    command = "pip install"
    for mark, other in (("uv-receipt.toml", "uv tool"), ("pipx_metadata.json", "pipx")):
        if (Path(sys.prefix) / mark).exists():
            command = f"{other} install --force"
    return f"{command} {shlex.quote(f'{_source()}[{extra}]')}"


def _source() -> str:
    """Returns the folder that the program was installed from (PEP 610), or its name."""
    try:
        origin = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return NAME
    url = urlsplit(origin.get("url", ""))
    folder = unquote(url.path)
    return folder if url.scheme == "file" and Path(folder, "setup.cfg").is_file() else NAME
