"""Models of the Hugging Face hub: ``owner/repo[:quant]``, stored in huggingface_hub's cache.

Cached files are used without a request to the hub, so a network is not necessary. Only a complete
file gets its final name. An interrupted download leaves a partial file, and the next download
continues it.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.naming import DEFAULT_QUANTS, choose, quant_of, whole_models
from sparsekv_cli.system.files import APPENDED, open_written
from sparsekv_cli.system.installation import install_command

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w.-]+))?", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
TRUE = ("1", "ON", "YES", "TRUE")  # values that huggingface_hub reads as true
TIMEOUT = 15.0  # seconds for the list of files
HOW_TO_LOG_IN = "`hf auth login` or a token in HF_TOKEN"

Say = Callable[[str], None]


class CachedModel(NamedTuple):
    """A model in the cache. name: its name for -m. path: its file or its first part."""

    name: str
    path: Path


def is_hub_name(name: str) -> bool:
    """Returns whether ``name``, which is no file, can be the name of a repository."""
    return NAME.fullmatch(name) is not None and not name.lower().endswith(".gguf")


def cache_folder() -> Path:
    """Returns huggingface_hub's cache folder. Raises SparseKVError if there is no home folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    try:
        return Path(named or os.path.join(home, "hub")).expanduser()
    except RuntimeError:
        raise SparseKVError("there is no home folder: set HF_HOME to a folder") from None


def fetch(name: str, say: Say) -> Path:
    """Returns the first file of ``owner/repo[:quant]``, from the cache or downloaded.

    say: called with a line about each download. Raises SparseKVError for each failure.
    """
    found = NAME.fullmatch(name)
    assert found is not None, "is_hub_name"
    repo, quant = found[1], found[2]
    if quant is None and Path(name).parent.is_dir():  # probably a mistyped file name
        raise SparseKVError(
            f"{name}: no such file in {Path(name).parent}; if a repository of the hub is meant, "
            f"name the quantisation too, such as {name}:{DEFAULT_QUANTS[0]}"
        )
    cached = find_cached(repo, quant or DEFAULT_QUANTS[0])
    if cached is not None:
        return cached
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE:
        cached = None if quant else find_cached(repo, None)
        if cached is None:
            raise SparseKVError(
                f"{name}: is not in {cache_folder()}, and HF_HUB_OFFLINE forbids to download it: "
                "unset that, or give a file with -m FILE"
            )
        return cached
    try:
        return download(repo, quant, say)
    except ConnectionError as error:
        cached = None if quant else find_cached(repo, None)
        if cached is None:
            raise SparseKVError(f"{name}: {error}; is there a network?") from error
        say(f"warning: {error}: taking {cached.name} from the cache")
        return cached


def find_cached(repo: str, quant: str | None) -> Path | None:
    """Returns the first file of the cached model of ``repo`` that ``choose`` chooses, or None."""
    for snapshot in snapshots(cache_folder() / f"models--{repo.replace('/', '--')}"):
        files = choose(files_of(snapshot), quant)
        if files:
            return snapshot / files[0]
    return None


def snapshots(folder: Path) -> list[Path]:
    """Returns the folders of a repository's cached revisions, the newest first."""
    found = [path for path in folder.glob("snapshots/*/") if path.is_dir()]
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))


def files_of(snapshot: Path) -> list[str]:
    """Returns the names of a revision's GGUF files, relative to the repository."""
    paths = (path for path in snapshot.rglob("*.gguf") if path.is_file())
    return sorted(path.relative_to(snapshot).as_posix() for path in paths)


def cached_models() -> list[CachedModel]:
    """Returns all complete models in the cache, each from the newest revision with it."""
    models: dict[str, Path] = {}
    try:
        cache = cache_folder()
    except SparseKVError:
        return []
    for folder in sorted(cache.glob("models--*--*/")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in snapshots(folder):
            for file in whole_models(files_of(snapshot)):
                quant = quant_of(file)
                models.setdefault(f"{repo}:{quant}" if quant else repo, snapshot / file)
    return [CachedModel(name, path) for name, path in models.items()]


def download(repo: str, quant: str | None, say: Say) -> Path:
    """Downloads a model from the hub. Returns its file or its first part.

    Raises ConnectionError if the hub cannot be reached, and SparseKVError for the hub's errors.
    """
    try:
        from huggingface_hub import HfApi, constants, hf_hub_download
        from huggingface_hub.utils import logging
    except ImportError as error:
        raise SparseKVError(
            f"{repo}: models of the hub need huggingface_hub: {install_command('hub')}"
        ) from error
    logging.set_verbosity_error()
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT
    with explained(repo, endpoint):
        info = HfApi(endpoint=endpoint).model_info(repo, files_metadata=True, timeout=TIMEOUT)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    files = choose(sorted(sizes), quant)
    if not files:
        raise SparseKVError(nothing_chosen(repo, quant, sorted(sizes)))
    paths = []
    for number, file in enumerate(files):
        part = f", part {number + 1} of {len(files)}" if len(files) > 1 else ""
        n_bytes = sizes[file]
        size = f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
        say(f"downloading {file} of {repo}: {size}{part}, to {cache_folder()}")
        with explained(repo, endpoint):
            fetch_blob(repo, file, str(info.sha), endpoint)
            path = hf_hub_download(
                repo, file, revision=info.sha, endpoint=endpoint, cache_dir=cache_folder()
            )
        paths.append(Path(path))
    return paths[0]


def fetch_blob(repo: str, file: str, revision: str, endpoint: str) -> None:
    """Downloads a file's bytes into the folder of huggingface_hub's cache that holds them.

    Continues an interrupted download. Raises SparseKVError for a wrong checksum.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    url = hf_hub_url(repo, file, revision=revision, endpoint=endpoint)
    told = get_hf_file_metadata(url, timeout=TIMEOUT)
    if not told.etag or not told.size or told.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # huggingface_hub downloads such a file itself
    blob = cache_folder() / f"models--{repo.replace('/', '--')}" / "blobs" / told.etag
    partial = blob.with_name(f"{told.etag}.part")
    blob.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(blob.with_name(f"{told.etag}.lock")):
        if blob.exists():
            return
        with BufferedWriter(open_written(partial, APPENDED)) as stream:
            stream.seek(0, os.SEEK_END)
            if stream.tell() > told.size:
                stream.seek(0)
                stream.truncate()
            http_get(
                url, stream, resume_size=stream.tell(), headers=build_hf_headers(),
                expected_size=told.size, displayed_filename=file,
            )  # fmt: skip
        if SHA256.fullmatch(told.etag):
            with partial.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != told.etag:
                partial.unlink()
                raise SparseKVError(f"{repo}: what came of {file} is damaged: download it again")
        partial.replace(blob)


def nothing_chosen(repo: str, quant: str | None, files: list[str]) -> str:
    """Returns the error line for a repository without a chosen file, with its quantisations."""
    models = whole_models(files)
    if not models:
        return (
            f"{repo}: holds no GGUF model among its {len(files)} files: look for a repository of "
            "it in GGUF, or convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    quants = dict.fromkeys(quant_of(file) or file for file in models)
    return f"{repo}: has no {quant}; there are {', '.join(quants)}"


@contextlib.contextmanager
def explained(repo: str, endpoint: str) -> Iterator[None]:
    """Replaces huggingface_hub's exceptions by SparseKVError, or ConnectionError (no network).

    Other errors of the operating system, such as a full disk, pass unchanged.
    """
    from huggingface_hub import errors

    try:
        yield
    except SparseKVError:
        raise
    except errors.GatedRepoError as error:
        raise SparseKVError(
            f"{repo}: its owner wants terms to be accepted first: do that at {endpoint}/{repo}, "
            f"then log in ({HOW_TO_LOG_IN})"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SparseKVError(
            f"{repo}: no such repository at {endpoint}, or a private one: check the name; if it is "
            f"private, log in ({HOW_TO_LOG_IN})"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = f"log in ({HOW_TO_LOG_IN})" if status in (401, 403) else "try again later"
        raise SparseKVError(
            f"{repo}: {endpoint} answers with HTTP status {status}: {advice}"
        ) from error
    except errors.HFValidationError as error:
        raise SparseKVError(f"{repo}: is no name of a repository: {first_line(error)}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
            raise
        if is_connection_error(error):
            raise ConnectionError(f"cannot reach {endpoint}: {first_line(error)}") from error
        raise SparseKVError(
            f"{repo}: the download from {endpoint} failed: {first_line(error)}"
        ) from error


def is_connection_error(error: BaseException) -> bool:
    """Returns whether the network failed. huggingface_hub may use any HTTP library."""
    from huggingface_hub import errors

    kinds: tuple[Any, ...] = (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError)
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, kinds) or bool(names & {"TransportError", "RequestException"})


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, or its class name without a text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
