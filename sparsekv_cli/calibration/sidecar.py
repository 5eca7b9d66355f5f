"""The sidecar of a model: what calibrated methods measured on it, in one npz file.

The array ``dom`` of method ``fasa`` is the member ``fasa.dom``. The member ``about`` is JSON. For
each method it has its arrays, the model that they belong to, and the text of the measurement.
Methods share the file and are read and replaced one by one. The checksum of a member is that of zip
files.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparsekv_cli import __version__
from sparsekv_cli.calibration.run import CalibrationArray
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.system.files import alone_in, naming, open_regular, replacing

FORMAT_VERSION = 5  # raised when the layout changes, or the arrays of a method or their meaning
KIND = "sparsekv-calibration"
SUFFIX = ".calibration.npz"
PAIRING = "half-split"  # RoPE pairs (i, i + n_rot/2), as the decoder gives q and k to the methods

WORDS = {
    "n_layer": "layers",
    "n_head": "query heads a layer",
    "n_head_kv": "kv heads a layer",
    "head_dim": "key size",
    "value_dim": "value size",
    "n_rot": "rotated dimensions",
    "freq_base": "RoPE base",
    "rope_scaling": "RoPE scaling",
    "rope_factor": "RoPE scaling factor",
    "pairing": "RoPE pairing",
    "model_hash": "model hash",
}  # of the fields of ModelIdentity, for messages


@dataclass(frozen=True)
class ModelIdentity:
    """The properties of a model on which a calibration depends.

    A file that differs in any of them belongs to another model.
    """

    n_layer: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_dim: int
    value_dim: int
    n_rot: int
    freq_base: float
    rope_scaling: str
    rope_factor: float
    pairing: str
    model_hash: str


@dataclass(frozen=True)
class Entry:
    """One method's calibration."""

    tensors: Mapping[str, np.ndarray]  # arrays (n_layer, ...)
    n_tokens: int  # tokens of the text that were used, from its start
    text_name: str
    text_hash: str  # sha256 of the text in UTF-8
    program: str = __version__


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns a hash of the arrays of a calibration, 32 hex digits."""
    hashed = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        hashed.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return hashed.hexdigest()[:32]


def identify(file: GGUFFile, hparams: HParams) -> ModelIdentity:
    """Returns a model's identity. Raises SparseKVError if its file is unreadable or changed."""
    return ModelIdentity(
        n_layer=hparams.n_layer,
        n_head=tuple(layer.n_head for layer in hparams.layers),
        n_head_kv=tuple(layer.n_head_kv for layer in hparams.layers),
        head_dim=hparams.head_dim,
        value_dim=hparams.layers[0].value_dim,
        n_rot=hparams.n_rot,
        freq_base=hparams.rope.freq_base,
        rope_scaling=hparams.rope.scaling,
        rope_factor=hparams.rope.factor,
        pairing=PAIRING,
        model_hash=file.content.wait(),
    )


class OutdatedError(SparseKVError):
    """A calibration that an older version of this program made; text_name: of what text."""

    def __init__(self, message: str, text_name: str) -> None:
        super().__init__(message)
        self.text_name = text_name


def read_entry(
    path: Path,
    method: str,
    identity: ModelIdentity,
    arrays: Mapping[str, CalibrationArray] | None = None,
) -> Entry | None:
    """Returns the calibration of ``method``; None: the file is missing or lacks the method.

    arrays: what its arrays must be; None: any. Raises SparseKVError for a file that is damaged or
    of another model or format. Raises OutdatedError for a file of an older format.
    """
    if not os.path.lexists(path):
        return None
    try:
        with _archive(path) as archive:
            about = _about(archive)
            if method not in about["methods"]:
                return None
            _check(path, method, about, identity)
            entry = _entry(archive, method, about["methods"][method])
            _check_arrays(path, method, entry, arrays)
            return entry
    except SparseKVError:
        raise
    except Exception as error:  # zipfile, numpy and json raise many for damage
        detail = " ".join(str(error).split())[:80] or type(error).__name__
        raise _unusable(path, method, f"cannot be read ({detail})") from None


def write_entry(path: Path, method: str, identity: ModelIdentity, entry: Entry) -> None:
    """Puts one method's calibration into ``path``, next to those of other methods of this model.

    The file is replaced as a whole. Entries that are damaged or of another model are dropped.
    Raises SparseKVError if ``path`` is some other kind of file, or cannot be written.
    """
    check_place(path)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):  # or another process that adds a method drops this one
            entries = {**_entries(path, identity), method: entry}
            with replacing(path, 0o666) as file:  # other users of the model use it, too
                _write(file, entries, identity)


def _write(file: BinaryIO, entries: Mapping[str, Entry], identity: ModelIdentity) -> None:
    methods = {}
    for name, each in entries.items():
        methods[name] = {**vars(each), "tensors": list(each.tensors), "model": asdict(identity)}
    about = {"kind": KIND, "format": FORMAT_VERSION, "methods": methods}
    arrays: dict[str, Any] = {
        f"{m}.{name}": array for m, each in entries.items() for name, array in each.tensors.items()
    }
    np.savez(file, about=np.array(json.dumps(about)), **arrays)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens an npz file. Raises ValueError if its members together are larger than the file."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        if sum(member.file_size for member in archive.infolist()) > size:
            raise ValueError("its members overlap")
        yield archive


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Returns an array of the npz file. Raises ValueError if it has another size than stated."""
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
    """Returns the member ``about`` of the file. Raises ValueError if it is no sidecar."""
    about = json.loads(str(_array(archive, "about")))
    if about["kind"] != KIND:
        raise ValueError("it is no calibration")
    return about


def _unusable(path: Path, method: str, what: str) -> SparseKVError:
    return SparseKVError(
        f"{path}: the calibration of {method} {what}; make a new one: "
        f"`sparsekv-cli calibrate -m MODEL --method {method}`"
    )


def _check(path: Path, method: str, about: dict[str, Any], identity: ModelIdentity) -> None:
    """Raises SparseKVError unless format and model are those that are expected."""
    version, own = about["format"], about["methods"][method]
    if version != FORMAT_VERSION:
        error = _unusable(
            path, method, f"has format {version}, but this version reads {FORMAT_VERSION}"
        )
        if version < FORMAT_VERSION:
            error = OutdatedError(str(error), own["text_name"])
        raise error
    for name, expected in asdict(identity).items():
        found = own["model"].get(name)
        found = tuple(found) if isinstance(found, list) else found
        if found != expected:
            raise _unusable(
                path,
                method,
                f"is of another model: {WORDS[name]} {_show(found)}, "
                f"this model has {_show(expected)}",
            )


def _show(value: Any) -> str:
    """Returns a value on part of a line; a tuple of equal numbers as one of them."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        value = f"{value[0]} x {len(value)}"
    text = "missing" if value is None else str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else text[:57] + "..."


def _entry(archive: zipfile.ZipFile, method: str, own: dict[str, Any]) -> Entry:
    """Returns the entry that a method stored. Raises ValueError if it is not one."""
    texts = own["text_name"], own["text_hash"], own["program"]
    if type(own["n_tokens"]) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError("it does not say what text it was measured on")
    tensors = {name: _array(archive, f"{method}.{name}") for name in own["tensors"]}
    return Entry(tensors, own["n_tokens"], *texts)


def _check_arrays(
    path: Path, method: str, entry: Entry, expected: Mapping[str, CalibrationArray] | None
) -> None:
    """Raises SparseKVError unless the arrays are those that are expected."""
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
    """Raises SparseKVError if ``path`` cannot be written, or is a file of another kind."""
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


def _entries(path: Path, identity: ModelIdentity) -> dict[str, Entry]:
    """Returns the entries of a file that can be kept: of this model and format, and not damaged."""
    kept: dict[str, Entry] = {}
    with contextlib.suppress(Exception), _archive(path) as archive:
        about = _about(archive)
        for name, own in about["methods"].items():
            with contextlib.suppress(Exception):
                _check(path, name, about, identity)
                kept[name] = _entry(archive, name, own)
    return kept


def check_tensors(method: str, tensors: Mapping[str, np.ndarray], n_layer: int) -> None:
    """Raises ValueError unless the arrays are numbers with a slice a layer, without NaN or inf."""
    for name, array in tensors.items():
        what = f"{method} calibrates {name} as {array.dtype.name} {array.shape}"
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{what}: a sidecar holds integers and floats")
        if not array.ndim or len(array) != n_layer or not array.size:
            raise ValueError(f"{what}: must be ({n_layer}, ...)")
        if not np.isfinite(array).all():
            raise ValueError(f"{what}: it holds values that are not finite")
