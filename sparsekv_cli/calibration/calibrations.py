"""Calibrations: what methods measure once on a model and a text, and keep in a sidecar.

A model asks for the arrays of its method. They are read from the sidecar next to the model or in
the user's cache directory. If they are not there, they are measured on the built-in text and
stored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.calibration.run import CALIBRATION, Calibrated, CalibrationArray, CalibrationRun
from sparsekv_cli.calibration.sidecar import (
    SUFFIX,
    Entry,
    OutdatedError,
    check_tensors,
    digest,
    read_entry,
    write_entry,
)
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.identity import ModelIdentity
from sparsekv_cli.system.files import user_cache

DEFAULT_TOKENS = 4096
# Rows through all layers times weights of the layers; and the least rows, of the largest model.
PRODUCTS, LEAST_ROWS = 3e12, 3600
BUILT_IN = "built-in"  # name of the text that comes with the program
MIN_TOKENS = 256  # statistics of keys and queries on fewer tokens are not reliable
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # belong to pip, not to us
HUB_FOLDER = "models--"  # begins the name of a repository's folder in huggingface_hub's cache

# Called in a calibration: the method, the share that is done, and at the end a remark.
OnCalibrate = Callable[[str, float, str], None]
Encode = Callable[[str], Sequence[int]]


class CalibrationText(NamedTuple):
    """A text and its name in messages."""

    name: str
    text: str


def check_length(text: CalibrationText, n: int) -> None:
    """Raises SparseKVError for a text of too few tokens."""
    if n < MIN_TOKENS:
        raise SparseKVError(
            f"calibration: the {n} tokens of text {text.name} are too few; give at least "
            f"{MIN_TOKENS}, better 1024 and more of mixed text"
        )


def built_in_text() -> CalibrationText:
    """Returns prose, code and dialogue: about 5,000 tokens of an English vocabulary."""
    path = files("sparsekv_cli") / "data" / "calibration.txt"
    return CalibrationText(BUILT_IN, path.read_text(encoding="utf-8"))


def affordable_rows(file: GGUFFile, hparams: HParams) -> int:
    """Returns the rows of forward passes of a calibration: a minute's, or five with 8B parameters.

    These are minutes of two cores. A small model needs less time for all rows. The number depends
    only on the model, so that a calibration is the same on a slow machine.
    """
    return max(LEAST_ROWS, int(PRODUCTS / layer_products(file, hparams)))


def layer_products(file: GGUFFile, hparams: HParams) -> float:
    """Returns the products of one row with the weights of all layers and chosen experts."""
    share = min(
        (e.n_expert_used / e.n_expert for layer in hparams.layers if (e := layer.experts)),
        default=1.0,
    )
    return sum(
        info.n_elements * (share if len(info.shape) > 2 else 1.0)
        for name, info in file.tensors.items()
        if name.startswith("blk.")
    )


class Calibrations:
    """The calibrations of one open model, found, or made and stored, when a method asks.

    identity: of the model as it was opened. decoder: None only finds stored calibrations. encode:
    text -> ids. sidecar: the only file to read, instead of the usual ones. A method that it lacks
    is refused, not calibrated.
    """

    def __init__(
        self,
        file: GGUFFile,
        hparams: HParams,
        identity: ModelIdentity,
        decoder: Any,
        encode: Encode,
        sidecar: Path | None = None,
    ) -> None:
        self._file = file
        self._hparams, self.identity = hparams, identity
        self._decoder = decoder
        self._encode = encode
        self._sidecar = sidecar
        self._loaded: dict[str, Mapping[str, np.ndarray]] = {}

    def places(self) -> tuple[Path, Path]:
        """Returns the file next to the model, and the user's (without a cache the first again)."""
        path = Path(self._file.path)
        beside = path.with_name(f"{path.stem}{SUFFIX}")
        folder = user_cache("calibration")
        return beside, folder / f"{self.identity.model_hash}.npz" if folder else beside

    def place_to_write(self) -> Path:
        """Returns the file next to the model, or the user's if that folder is not the user's."""
        beside, cached = self.places()
        folder = beside.parent.resolve()
        foreign = any(
            part in PACKAGE_FOLDERS or part.startswith(HUB_FOLDER) for part in folder.parts
        )
        return beside if os.access(folder, os.W_OK) and not foreign else cached

    def specs(self, method: Calibrated, report: OnCalibrate | None = None) -> list[LayerSpec]:
        """Returns the decoder's layers, with the method's calibration if it needs one."""
        specs = self._decoder.layer_specs()
        if method.needs != CALIBRATION:
            return specs
        tensors = self._tensors(method, report)
        return [
            replace(spec, calibration={name: array[i] for name, array in tensors.items()})
            for i, spec in enumerate(specs)
        ]

    def has(self, method: Calibrated) -> bool:
        """Returns whether the method needs no calibration, or has a stored one."""
        name = method.name
        if method.needs != CALIBRATION or name in self._loaded:
            return True
        return self.find_of(method) is not None

    def digests(self, methods: Iterable[Calibrated]) -> dict[str, str]:
        """Returns hashes of the calibrations of those ``methods`` that have one, by name."""
        found: dict[str, str] = {}
        for name, method in {m.name: m for m in methods if m.needs == CALIBRATION}.items():
            if name in self._loaded:
                found[name] = digest(self._loaded[name])
            elif (entry := self.find_of(method)) is not None:
                found[name] = digest(entry.tensors)
        return found

    def _tensors(self, method: Calibrated, report: OnCalibrate | None) -> Mapping[str, np.ndarray]:
        name = method.name
        if name not in self._loaded:
            entry = self.find_of(method, report)
            if entry is None:
                entry = self.calibrate(method, built_in_text(), DEFAULT_TOKENS, report)
                note = self.store(name, entry)
                if report is not None:
                    report(name, 1.0, note)
            self._loaded[name] = entry.tensors
        return self._loaded[name]

    def find_of(self, method: Calibrated, report: OnCalibrate | None = None) -> Entry | None:
        """See ``find``. Raises SparseKVError also for arrays that do not fit ``method``."""
        return self.find(method.name, report, method.calibration_arrays(self._sizes()))

    def _sizes(self) -> list[LayerSpec]:
        """Returns the layers' sizes, which are known without a decoder."""
        layers = self._hparams.layers
        return [
            LayerSpec(
                i,
                len(layers),
                each.n_head,
                each.n_head_kv,
                each.head_dim,
                each.value_dim,
                n_threads=1,
                theta=np.zeros(each.n_rot // 2),
                kind=each.kind,
            )
            for i, each in enumerate(layers)
        ]

    def find(
        self,
        name: str,
        report: OnCalibrate | None = None,
        arrays: Mapping[str, CalibrationArray] | None = None,
    ) -> Entry | None:
        """Returns the stored calibration of a method.

        It is that of the first file that has one. Files that this user writes come first.
        Raises SparseKVError for a sidecar that is unusable.

        Returns None, with a remark, for one in the cache directory that an older version made by
        itself. arrays: what its arrays must be.
        """
        places = [self._sidecar] if self._sidecar else [self.place_to_write(), *self.places()]
        for path in places:
            try:
                entry = read_entry(path, name, self.identity, arrays)
            except OutdatedError as error:
                if path != self.places()[1] or error.text_name != BUILT_IN:
                    raise
                if report is not None:
                    report(name, 0.0, f"{path} is of an older version: a new one is made")
                continue
            if entry is not None:
                return entry
        if self._sidecar is not None:
            holds = "holds none of this model with this RoPE scaling"
            found = holds if self._sidecar.exists() else "is missing"
            raise SparseKVError(
                f"{self._sidecar}: {found}, but a calibration of {name} was expected; make it with "
                f"`sparsekv-cli calibrate -m MODEL --method {name} --output {self._sidecar}`"
            )
        return None

    def store(self, name: str, entry: Entry) -> str:
        """Stores the calibration of a first use. Returns a remark, also for a failure."""
        path = self.place_to_write()
        try:
            write_entry(path, name, self.identity, entry)
        except (OSError, SparseKVError) as error:
            return f"could not be stored and is made again next time ({error})"
        return f"stored in {path}"

    def calibrate(
        self,
        method: Calibrated,
        text: CalibrationText,
        n_tokens: int,
        report: OnCalibrate | None = None,
    ) -> Entry:
        """Runs ``method`` over the first ``n_tokens`` of ``text``, or as many as fit the model.

        Raises SparseKVError if text or context are too short to measure anything.
        """
        name = method.name
        n_ctx = self._hparams.n_ctx_train
        if n_ctx < MIN_TOKENS:
            raise SparseKVError(
                f"the model was trained for {n_ctx} tokens, too few to calibrate {name} "
                f"({MIN_TOKENS} are needed)"
            )
        ids = list(self._encode(text.text))[: min(n_tokens, n_ctx)]
        check_length(text, len(ids))
        decoder = self._decoder

        def forward(
            ids: Sequence[int], pos: int, caches: Sequence[LayerCache], **options: Any
        ) -> np.ndarray:
            self._file.check_intact()
            return decoder.forward(ids, pos, caches, **options)

        def progress(share: float) -> None:
            if report is not None:
                report(name, share, "")

        progress(0.0)
        n_rows = affordable_rows(self._file, self._hparams)
        n_rows = n_rows * max(n_tokens, DEFAULT_TOKENS) // DEFAULT_TOKENS
        run = CalibrationRun(decoder.layer_specs(), ids, forward, progress, n_rows)
        with blas_threads(1):  # small products: threads of BLAS wait for longer than they work
            tensors = method.calibrate(run)
        check_tensors(name, tensors, self._hparams.n_layer)
        text_hash = hashlib.sha256(text.text.encode()).hexdigest()
        return Entry(tensors, len(ids), text.name, text_hash)
