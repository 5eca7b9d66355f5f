"""The sidecar of a model: an npz file with the calibrations of methods.

An entry is the calibration of one method on one model, opened with one RoPE scaling. The entry's
name is ``fasa@DIGEST``, with the digest of the model's identity. The entry's array ``dom`` is the
member ``fasa@DIGEST.dom`` of the file. The member ``about`` is JSON. For each entry it has the
names of the arrays and the text of the measurement. Entries are read and replaced one by one.
Damage is found by the checksums of zip files.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparsekv_cli import __version__
from sparsekv_cli.calibration.run import CalibrationArray
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.identity import ModelIdentity
from sparsekv_cli.system.files import alone_in, naming, open_regular, replacing

FORMAT_VERSION = 6  # raise it when the layout changes, or a method's arrays, or what they mean
KIND = "sparsekv-calibration"
SUFFIX = ".calibration.npz"


@dataclass(frozen=True)
class Entry:
    """One method's calibration."""

    tensors: Mapping[str, np.ndarray]  # arrays (n_layer, ...)
    n_tokens: int  # how many first tokens of the text were used
    text_name: str
    text_hash: str  # sha256 of the text in UTF-8
    program: str = __version__


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns a hash of the arrays of a calibration, 32 hex digits."""
    hashed = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        hashed.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return hashed.hexdigest()[:32]


class OutdatedError(SparseKVError):
    """The file was made by an older version. text_name: the text of the calibration in it."""

    def __init__(self, message: str, text_name: str) -> None:
        super().__init__(message)
        self.text_name = text_name


def read_entry(
    path: Path,
    method: str,
    identity: ModelIdentity,
    arrays: Mapping[str, CalibrationArray] | None = None,
) -> Entry | None:
    """Returns the calibration of ``method``; None if the file is missing or lacks this model.

    arrays: what its arrays must be; None: anything. Raises SparseKVError for a file that is damaged
    or of a newer format. Raises OutdatedError for an older format.
    """
    if not os.path.lexists(path):
        return None
    try:
        with _archive(path) as archive:
            about = _about(archive)
            _check_format(path, method, about)
            own, name = about.get("entries", {}), _key(method, identity)
            if name not in own:
                return None
            entry = _entry(archive, name, own[name])
            _check_arrays(path, method, entry, arrays)
            return entry
    except SparseKVError:
        raise
    except Exception as error:  # zipfile, numpy and json raise many for damage
        detail = " ".join(str(error).split())[:80] or type(error).__name__
        raise _unusable(path, method, f"cannot be read ({detail})") from None


def write_entry(path: Path, method: str, identity: ModelIdentity, entry: Entry) -> None:
    """Puts one method's calibration into ``path``, next to those of other methods and models.

    The file is replaced as a whole, without damaged entries. Raises SparseKVError if ``path`` is a
    file of another kind, or cannot be written.
    """
    check_place(path)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):  # other processes may add their methods at the same time
            entries = {**_entries(path), _key(method, identity): entry}
            with replacing(path, 0o666) as file:  # other users of the model use it, too
                _write(file, entries)


def _write(file: BinaryIO, entries: Mapping[str, Entry]) -> None:
    listed = {name: {**vars(each), "tensors": list(each.tensors)} for name, each in entries.items()}
    about = {"kind": KIND, "format": FORMAT_VERSION, "entries": listed}
    arrays: dict[str, Any] = {
        f"{m}.{name}": array for m, each in entries.items() for name, array in each.tensors.items()
    }
    np.savez(file, about=np.array(json.dumps(about)), **arrays)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens an npz file. Raises ValueError if its members claim more bytes than the file has."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        if sum(member.file_size for member in archive.infolist()) > size:
            raise ValueError("its members overlap")
        yield archive


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Returns the array ``name`` of the npz file. Raises ValueError if its size is wrong."""
    if archive.getinfo(f"{name}.npy").compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    file = io.BytesIO(archive.read(f"{name}.npy"))
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"{name} has version {version} of the npy format, not (1, 0)")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(file.getbuffer()) - file.tell():
        raise ValueError(f"{name} has another size than it says")
    file.seek(0)
    return np.load(file, allow_pickle=False)


def _about(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Returns the member ``about`` of a sidecar. Raises ValueError for another npz file."""
    about = json.loads(str(_array(archive, "about")))
    if about["kind"] != KIND:
        raise ValueError("it is no calibration")
    return about


def _unusable(path: Path, method: str, what: str) -> SparseKVError:
    return SparseKVError(
        f"{path}: the calibration of {method} {what}; make a new one: "
        f"`sparsekv-cli calibrate -m MODEL --method {method}`"
    )


def _key(method: str, identity: ModelIdentity) -> str:
    """Returns the name of the method's entry in the file."""
    return f"{method}@{identity.digest()}"


def _check_format(path: Path, method: str, about: dict[str, Any]) -> None:
    """Raises an error if the file has a calibration of ``method`` in another format.

    The error is OutdatedError for an older format, SparseKVError for a newer one.
    """
    version = about["format"]
    if version == FORMAT_VERSION:
        return
    for name, own in (about.get("entries") or about["methods"]).items():
        if name.partition("@")[0] == method:
            what = f"has format {version}, but this version reads {FORMAT_VERSION}"
            error = _unusable(path, method, what)
            raise OutdatedError(str(error), own["text_name"]) if version < FORMAT_VERSION else error


def _entry(archive: zipfile.ZipFile, key: str, own: dict[str, Any]) -> Entry:
    """Returns the entry ``key``. own: its part of ``about``. Raises ValueError if it is damaged."""
    texts = own["text_name"], own["text_hash"], own["program"]
    if type(own["n_tokens"]) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError("it does not say what text it was measured on")
    tensors = {name: _array(archive, f"{key}.{name}") for name in own["tensors"]}
    return Entry(tensors, own["n_tokens"], *texts)


def _check_arrays(
    path: Path, method: str, entry: Entry, expected: Mapping[str, CalibrationArray] | None
) -> None:
    """Raises SparseKVError unless the entry has exactly the ``expected`` arrays; None: any."""
    if expected is None:
        return
    if set(entry.tensors) != set(expected):
        found = ", ".join(sorted(entry.tensors))
        names = ", ".join(sorted(expected))
        raise _unusable(path, method, f"has the arrays {found}, but {names} were expected")
    for name, array in expected.items():
        if problem := array.problem(entry.tensors[name]):
            raise _unusable(path, method, f"cannot be used: {name} {problem}")


def check_place(path: Path) -> None:
    """Raises SparseKVError if a sidecar cannot be written to ``path``.

    It must be writable, and may be missing, empty or a sidecar, but no other file.
    """
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SparseKVError(f"{path}: cannot be written: {folder} is not a writable folder")
    if not os.path.lexists(path):
        return
    if path.is_file():
        with open_regular(path) as file:
            start = file.read(4)
        if start == b"":
            return
        if start == b"PK\x03\x04":
            try:
                with zipfile.ZipFile(path) as archive:
                    names = archive.namelist()
            except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
                return  # a damaged sidecar, to be replaced
            if "about.npy" in names:
                return
    raise SparseKVError(f"{path}: is no calibration, and is left as it is: name another file")


def _entries(path: Path) -> dict[str, Entry]:
    """Returns name -> entry, for the entries of a file that can be read; {} for no file."""
    kept: dict[str, Entry] = {}
    with contextlib.suppress(Exception), _archive(path) as archive:
        about = _about(archive)
        if about["format"] == FORMAT_VERSION:
            for name, own in about["entries"].items():
                with contextlib.suppress(Exception):
                    kept[name] = _entry(archive, name, own)
    return kept


def check_tensors(method: str, tensors: Mapping[str, np.ndarray], n_layer: int) -> None:
    """Raises ValueError unless all arrays are finite numbers of shape (n_layer, ...)."""
    for name, array in tensors.items():
        what = f"{method} calibrates {name} as {array.dtype.name} {array.shape}"
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{what}: a sidecar holds integers and floats")
        if not array.ndim or len(array) != n_layer or not array.size:
            raise ValueError(f"{what}: must be ({n_layer}, ...)")
        if not np.isfinite(array).all():
            raise ValueError(f"{what}: it holds values that are not finite")
