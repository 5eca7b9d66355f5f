"""The sidecar of a model: what calibrated methods measured on it, in one GGUF file.

An array ``dom`` of method ``fasa`` is the tensor ``fasa.dom``; the keys ``fasa.*`` say what model
and what text it comes from. Methods share the file and are checked and replaced one by one. GGUF
has no unsigned tensors, so ``fasa.dtypes`` says what the bytes are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv_cli import __version__
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import MAX_DIMS, MAX_NAME_BYTES, GGUFFile, StringArray, open_gguf
from sparsekv_cli.models.hparams import HParams

FORMAT_VERSION = 3  # raised when the layout changes, or the arrays of a method or their meaning
ARCHITECTURE = "sparsekv-calibration"
PAIRING = "half-split"  # RoPE pairs (i, i + n_rot/2), as the decoder gives q and k to the methods
SAMPLE_BYTES = 256  # of a tensor, at its beginning, middle and end

# dtype of an array -> how its bytes are declared in the file.
STORED_AS = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "i1",
    "uint8": "i1",
    "int16": "<i2",
    "uint16": "<i2",
    "int32": "<i4",
    "uint32": "<i4",
    "int64": "<i8",
    "uint64": "<i8",
}


@dataclass(frozen=True)
class ModelIdentity:
    """What a calibration depends on; a file that differs in any of it is another model's."""

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

    def fields(self) -> dict[str, tuple[str, Any]]:
        """Key within the method's namespace -> (words for it, value as the file holds it)."""
        return {
            "block_count": ("layers", self.n_layer),
            "head_count": ("query heads a layer", self.n_head),
            "head_count_kv": ("kv heads a layer", self.n_head_kv),
            "key_length": ("key size", self.head_dim),
            "value_length": ("value size", self.value_dim),
            "rope.dimension_count": ("rotated dimensions", self.n_rot),
            "rope.freq_base": ("RoPE base", self.freq_base),
            "rope.scaling.type": ("RoPE scaling", self.rope_scaling),
            "rope.scaling.factor": ("RoPE scaling factor", self.rope_factor),
            "rope.pairing": ("RoPE pairing", self.pairing),
            "model_hash": ("model hash", self.model_hash),
        }


@dataclass(frozen=True)
class Entry:
    """One method's calibration: arrays (n_layer, ...), and the text they were measured on.

    text_hash: sha256 of the text in UTF-8; n_tokens: of its first tokens, how many were used.
    """

    tensors: Mapping[str, np.ndarray]
    n_tokens: int
    text_name: str
    text_hash: str
    program: str = __version__


def identify(file: GGUFFile, hparams: HParams) -> ModelIdentity:
    """The identity of an open model."""
    return ModelIdentity(
        n_layer=hparams.n_layer,
        n_head=hparams.n_head,
        n_head_kv=hparams.n_head_kv,
        head_dim=hparams.head_dim,
        value_dim=hparams.value_dim,
        n_rot=hparams.n_rot,
        freq_base=hparams.rope.freq_base,
        rope_scaling=hparams.rope.scaling,
        rope_factor=hparams.rope.factor,
        pairing=PAIRING,
        model_hash=model_hash(file),
    )


def model_hash(file: GGUFFile) -> str:
    """32 hex digits over size, header and a sample of every tensor: milliseconds, not the file."""
    digest = hashlib.sha256(file.size.to_bytes(8, "little"))
    with open(file.path, "rb") as header:
        digest.update(header.read(file.data_offset))
    for info in file.tensors.values():
        data = file.data(info).reshape(-1)
        for start in (0, len(data) // 2, max(0, len(data) - SAMPLE_BYTES)):
            digest.update(data[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:32]


class OutdatedError(SparseKVError):
    """A calibration that an older version of this program made; text_name: of what text."""

    def __init__(self, message: str, text_name: str) -> None:
        super().__init__(message)
        self.text_name = text_name


def read_entry(path: Path, method: str, identity: ModelIdentity) -> Entry | None:
    """The calibration of ``method``; None if there is no such file or it has none of this method.

    SparseKVError for a file that is damaged or of another model or format, OutdatedError for one
    of an older format.
    """
    if not os.path.lexists(path):
        return None
    with _open(path, method) as file:
        if f"{method}.format" not in file.metadata:
            return None
        _check(file, method, identity)
        return _entry(file, method)


def write_entry(path: Path, method: str, identity: ModelIdentity, entry: Entry) -> None:
    """Puts one method's calibration into ``path``, beside those of other methods of this model.

    The file is replaced in one go. What is damaged or of another model in it is dropped.
    SparseKVError if ``path`` is some other kind of file, OSError if it cannot be written.
    """
    entries = {**_others(path, method, identity), method: entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, identity, entries)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _open(path: Path, method: str) -> GGUFFile:
    try:
        return open_gguf(path, vocab_only_ok=True)
    except SparseKVError as error:
        # What the reader advises, such as another download, is meant for models.
        detail = re.split(r" \(|; ", str(error).removeprefix(f"{path}: "))[0]
        raise _unusable(path, method, f"cannot be read ({detail})") from None


def _unusable(path: Path, method: str, what: str) -> SparseKVError:
    return SparseKVError(
        f"{path}: the calibration of {method} {what}; make a new one: "
        f"`sparsekv-cli calibrate -m MODEL --method {method}`"
    )


def _check(file: GGUFFile, method: str, identity: ModelIdentity) -> None:
    """SparseKVError unless format and model are those that are expected."""
    version = file.metadata[f"{method}.format"]
    if version != FORMAT_VERSION:
        error = _unusable(
            file.path, method, f"has format {version}, but this version reads {FORMAT_VERSION}"
        )
        if isinstance(version, int) and version < FORMAT_VERSION:
            error = OutdatedError(str(error), str(file.metadata.get(f"{method}.text")))
        raise error
    for key, (words, expected) in identity.fields().items():
        found = _plain(file.metadata.get(f"{method}.{key}"))
        if found != expected:
            raise _unusable(
                file.path,
                method,
                f"is of another model: {words} {_show(found)}, this model has {_show(expected)}",
            )


def _plain(value: Any) -> Any:
    return tuple(value.tolist()) if isinstance(value, (np.ndarray, StringArray)) else value


def _show(value: Any) -> str:
    """A value on part of a line; a tuple of equal numbers as one of them."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        value = f"{value[0]} x {len(value)}"
    text = "missing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _entry(file: GGUFFile, method: str) -> Entry:
    """The arrays of a method, copied out of the file; SparseKVError if they are damaged."""
    kinds = {
        "tensors": tuple,
        "dtypes": tuple,
        "n_tokens": int,
        "text": str,
        "text_hash": str,
        "program": str,
        "checksum": str,
    }
    keys = {key: _plain(file.metadata.get(f"{method}.{key}")) for key in kinds}
    for key, kind in kinds.items():
        if not isinstance(keys[key], kind):
            raise _unusable(file.path, method, f"is damaged (key {key} is no {kind.__name__})")
    names, dtypes = keys["tensors"], keys["dtypes"]
    if len(names) != len(dtypes):
        raise _unusable(file.path, method, "is damaged (keys tensors and dtypes disagree)")
    tensors = {}
    for name, dtype in zip(names, dtypes, strict=True):
        info = file.tensors.get(f"{method}.{name}")
        if info is None or dtype not in STORED_AS:
            raise _unusable(file.path, method, f"is damaged (array {name} is missing)")
        if info.type.row_bytes(1) != np.dtype(dtype).itemsize or info.type.block != 1:
            raise _unusable(file.path, method, f"is damaged (array {name} is {info.type.name})")
        tensors[name] = file.data(info).copy().view(np.dtype(dtype)).reshape(info.shape)
    if _checksum(tensors) != keys["checksum"]:
        raise _unusable(file.path, method, "is damaged (its arrays differ from their checksum)")
    return Entry(tensors, keys["n_tokens"], keys["text"], keys["text_hash"], keys["program"])


def _checksum(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in tensors.items():
        digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_place(path: Path) -> None:
    """SparseKVError if ``path`` cannot be written, or is a file of another kind."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SparseKVError(f"{path}: cannot be written: {folder} is no folder that can be")
    if not os.path.lexists(path):
        return
    try:
        with open_gguf(path, vocab_only_ok=True) as file:
            kind = file.metadata.get("general.architecture")
    except SparseKVError:
        kind = None
        if path.is_file():
            with open(path, "rb") as file_of_some_kind:
                if file_of_some_kind.read(4) in (b"GGUF", b""):
                    return  # damaged: to be replaced
    if kind != ARCHITECTURE:
        what = "" if kind is None else f" but a GGUF file of architecture {kind}"
        raise SparseKVError(
            f"{path}: is no calibration{what}, and is left as it is; choose another place"
        )


def _others(path: Path, method: str, identity: ModelIdentity) -> dict[str, Entry]:
    """The other methods' entries that can be kept; SparseKVError if ``path`` is no sidecar."""
    check_place(path)
    try:
        file = open_gguf(path, vocab_only_ok=True)
    except SparseKVError:  # not there, or damaged
        return {}
    with file:
        kept = {}
        for key in file.metadata:
            name = key.removesuffix(".format")
            if name != key and name != method:
                with contextlib.suppress(SparseKVError):
                    _check(file, name, identity)
                    kept[name] = _entry(file, name)
        return kept


def _write(path: Path, identity: ModelIdentity, entries: Mapping[str, Entry]) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_type("calibration")
    for method, entry in entries.items():
        writer.add_uint32(f"{method}.format", FORMAT_VERSION)
        writer.add_string(f"{method}.program", entry.program)
        for key, (_, value) in identity.fields().items():
            _add(writer, f"{method}.{key}", value)
        writer.add_uint32(f"{method}.n_tokens", entry.n_tokens)
        writer.add_string(f"{method}.text", entry.text_name)
        writer.add_string(f"{method}.text_hash", entry.text_hash)
        writer.add_array(f"{method}.tensors", list(entry.tensors))
        dtypes = [array.dtype.name for array in entry.tensors.values()]
        writer.add_array(f"{method}.dtypes", dtypes)
        writer.add_string(f"{method}.checksum", _checksum(entry.tensors))
        for name, array in entry.tensors.items():
            stored = np.ascontiguousarray(array).view(STORED_AS[array.dtype.name])
            writer.add_tensor(f"{method}.{name}", stored)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float64(key, value)
    elif isinstance(value, tuple):
        writer.add_array(key, list(value))
    else:
        writer.add_uint32(key, value)


def check_tensors(method: str, tensors: Mapping[str, np.ndarray], n_layer: int) -> None:
    """ValueError unless the arrays can be stored, and have a slice a layer without NaN or inf."""
    for name, array in tensors.items():
        what = f"{method} calibrates {name} as {array.dtype.name} {array.shape}"
        if array.dtype.name not in STORED_AS:
            raise ValueError(f"{what}: a sidecar holds {', '.join(STORED_AS)}")
        if not 1 <= array.ndim <= MAX_DIMS or len(array) != n_layer or not array.size:
            raise ValueError(f"{what}: must be ({n_layer}, ...), at most {MAX_DIMS} dimensions")
        if len(f"{method}.{name}".encode()) > MAX_NAME_BYTES:
            raise ValueError(f"{what}: the name is longer than {MAX_NAME_BYTES} bytes")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{what}: it holds values that are not finite")
