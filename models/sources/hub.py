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
from sparsekv_cli.models.sources.naming import (
    DEFAULT_QUANTS,
    choose,
    is_plain_path,
    quant_of,
    whole_models,
)
from sparsekv_cli.system.files import APPENDED, alone_in, open_written
from sparsekv_cli.system.installation import install_command

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)
REVISION = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})?")  # git's, SHA-256, or none
ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHA256_DIGITS = 64
TRUE = ("1", "ON", "YES", "TRUE")  # values that huggingface_hub reads as true
TIMEOUT = 15.0  # seconds for the list of files
HOW_TO_LOG_IN = "`hf auth login` or a token in HF_TOKEN"

Say = Callable[[str], None]


class HubFile(NamedTuple):
    """A file that a hub lists. n_bytes: 0 if unknown. digest: its checksum, empty if unknown."""

    name: str
    n_bytes: int
    digest: str


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
    """Returns the first file of the model of ``repo`` with ``quant`` in the cache, or None."""
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
    """Returns all complete models in the cache, each from the newest revision that has it."""
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
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils import logging
    except ImportError as error:
        raise SparseKVError(
            f"{repo}: models of the hub need huggingface_hub: {install_command('hub')}"
        ) from error
    logging.set_verbosity_error()
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT
    with explained(repo, endpoint):
        info = HfApi(endpoint=endpoint).model_info(repo, files_metadata=True, timeout=TIMEOUT)
    listed = listed_files(repo, info)
    files = choose(sorted(listed), quant)
    if not files:
        raise SparseKVError(nothing_chosen(repo, quant, sorted(listed)))
    paths = []
    for number, name in enumerate(files):
        part = f", part {number + 1} of {len(files)}" if len(files) > 1 else ""
        n_bytes = listed[name].n_bytes
        size = f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
        say(f"downloading {name} of {repo}: {size}{part}, to {cache_folder()}")
        with explained(repo, endpoint):
            paths.append(fetch_file(repo, listed[name], str(info.sha), endpoint, say))
    return paths[0]


def listed_files(repo: str, info: Any) -> dict[str, HubFile]:
    """Returns name -> file, for the files that a hub lists. info: the hub's answer.

    Raises SparseKVError if the revision or the name of a GGUF file could lead out of the cache.
    """
    if not REVISION.fullmatch(str(info.sha)):
        raise SparseKVError(
            f"{repo}: the hub tells the revision {str(info.sha)!r}: expected 40 hexadecimal "
            "digits; use another hub"
        )
    files = {}
    for each in info.siblings or ():
        name, lfs = each.rfilename, each.lfs
        n_bytes = lfs.size if lfs else each.size
        digest = (lfs.sha256 if lfs else each.blob_id) or ""
        is_gguf = not isinstance(name, str) or name.lower().endswith(".gguf")
        if is_gguf and not is_plain_path(name):
            raise SparseKVError(
                f"{repo}: the hub lists a file {name!r}, which is no plain name: use another hub"
            )
        if not isinstance(n_bytes or 0, int) or not DIGEST.fullmatch(str(digest)):
            raise SparseKVError(
                f"{repo}: the hub lists a file of {n_bytes!r} bytes with the checksum {digest!r}: "
                "use another hub"
            )
        files[name] = HubFile(name, n_bytes or 0, digest)
    return files


def fetch_file(repo: str, file: HubFile, revision: str, endpoint: str, say: Say) -> Path:
    """Returns the path of a repository's file in the cache. Downloads it if it is missing.

    The bytes are stored in the repository's folder ``blobs``, under their checksum as a name. The
    returned path, ``snapshots/REVISION/NAME``, is a link to them, if the file system has links.
    Raises SparseKVError for a wrong length or checksum.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    folder = cache_folder() / f"models--{repo.replace('/', '--')}"
    path = folder / "snapshots" / revision / file.name
    if path.is_file():
        return path
    url = hf_hub_url(repo, file.name, revision=revision, endpoint=endpoint)
    etag = file.digest
    if not file.digest or not file.n_bytes:
        told = get_hf_file_metadata(url, timeout=TIMEOUT)
        etag = file.digest or told.etag or ""
        digest = etag if len(etag) == SHA256_DIGITS and DIGEST.fullmatch(etag) else file.digest
        file = HubFile(file.name, file.n_bytes or told.size or 0, digest)
        if not ETAG.fullmatch(etag):
            raise SparseKVError(
                f"{repo}: the hub names {file.name} by the tag {etag!r}: use another hub"
            )
        if not digest:
            say(f"warning: the hub tells no checksum of {file.name}: it is not checked")
    if not 0 < file.n_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise SparseKVError(
            f"{repo}: {file.name} has {file.n_bytes} bytes, which this program does not download: "
            f"use `hf download {repo} {file.name}`"
        )
    blob = folder / "blobs" / etag
    for parent in (blob.parent, path.parent):
        parent.mkdir(parents=True, exist_ok=True)
        if not Path(os.path.realpath(parent)).is_relative_to(os.path.realpath(folder)):
            raise SparseKVError(f"{parent}: is a link out of {folder}: remove it")
    with alone_in(blob.parent):
        if not blob.exists():
            download_blob(repo, url, file, blob)
        if not path.is_file():
            path.unlink(missing_ok=True)
            try:
                path.symlink_to(os.path.relpath(os.path.realpath(blob), path.parent.resolve()))
            except OSError:  # a file system without links
                blob.replace(path)
    return path


class LimitedWriter(BufferedWriter):
    """A file that refuses more than ``n_most`` bytes."""

    n_most = 0

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.n_most:
            raise SparseKVError(f"more than {self.n_most} bytes came")
        return super().write(data)


def download_blob(repo: str, url: str, file: HubFile, blob: Path) -> None:
    """Downloads the bytes of a file to ``blob``. Continues an interrupted download.

    Raises SparseKVError for a wrong length or checksum, and removes the wrong file.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial = blob.with_name(f"{blob.name}.part")
    problem = ""
    with LimitedWriter(open_written(partial, APPENDED | os.O_NOFOLLOW)) as stream:
        stream.n_most = file.n_bytes
        stream.seek(0, os.SEEK_END)
        if stream.tell() > file.n_bytes:
            stream.seek(0)
            stream.truncate()
        try:
            http_get(
                url, stream, resume_size=stream.tell(), headers=build_hf_headers(),
                expected_size=file.n_bytes, displayed_filename=file.name,
            )  # fmt: skip
        except SparseKVError as error:
            problem = str(error)
        except OSError as error:
            if error.errno or is_connection_error(error):
                raise
            problem = f"not {file.n_bytes} bytes came"  # the library's check
        finally:
            stream.flush()
            if not os.fstat(stream.fileno()).st_size:
                partial.unlink()
    if not problem and file.digest and digest_of(partial, file.digest) != file.digest:
        problem = "its checksum is not the one that the hub tells"
    if problem:
        partial.unlink(missing_ok=True)
        raise SparseKVError(
            f"{repo}: what came of {file.name} is damaged: download it again ({problem})"
        )
    partial.replace(blob)


def digest_of(path: Path, expected: str) -> str:
    """Returns the checksum of a file's bytes, of the kind that ``expected`` has.

    64 digits: SHA-256. 40 digits: git's, SHA-1 with a header.
    """
    with path.open("rb") as stream:
        if len(expected) == SHA256_DIGITS:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        header = f"blob {os.fstat(stream.fileno()).st_size}\0".encode()
        return hashlib.file_digest(stream, lambda: hashlib.sha1(header)).hexdigest()


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
    """Turns huggingface_hub's exceptions into SparseKVError, or ConnectionError without a network.

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
