"""The command that installs an extra, for the tool by which this program was installed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "sparsekv-cli"


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, of pip, uv or pipx: what installed the program.

    uv and pipx install the program anew, so their command also names the extras that are there.
    """
    extras = [extra]
    command = "pip install"
    for mark, other in (("uv-receipt.toml", "uv tool"), ("pipx_metadata.json", "pipx")):
        if (Path(sys.prefix) / mark).exists():
            command = f"{other} install --force"
            extras = sorted({extra, *_installed_extras()})
    wanted = f"{_source()}[{','.join(extras)}]"
    return f"{command} {shlex.quote(wanted)}"


def _installed_extras() -> list[str]:
    """Returns the extras whose libraries are all installed."""
    wanted: dict[str, list[str]] = defaultdict(list)  # names of libraries, by extra
    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return []
    for line in requirements:
        found = re.fullmatch(r"([\w.-]+).*extra == [\"'](\w+)[\"'].*", line)
        if found is not None:
            wanted[found[2]].append(found[1])
    return [extra for extra, names in wanted.items() if all(map(_is_installed, names))]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _source() -> str:
    """Returns the folder from which the program was installed (PEP 610), or the program's name."""
    try:
        origin = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return NAME
    url = urlsplit(origin.get("url", ""))
    folder = unquote(url.path)
    return folder if url.scheme == "file" and Path(folder, "setup.cfg").is_file() else NAME
