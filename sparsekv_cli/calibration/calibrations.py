"""Finds the calibrations of a model: arrays that methods measure once and store in a sidecar.

The arrays are read from the sidecar next to the model, or from the user's cache directory. If both
lack them, they are measured on the built-in text and stored.
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

from sparsekv_cli import __version__
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.calibration.run import CALIBRATION, Calibrated, CalibrationArray, CalibrationRun
from sparsekv_cli.calibration.sidecar import (
    FORMAT_VERSION,
    SUFFIX,
    Entry,
    OutdatedError,
    check_tensors,
    digest,
    read_entry,
    write_entry,
)
from sparsekv_cli.calibration.unfinished import UnfinishedScores
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.identity import ModelIdentity
from sparsekv_cli.system.files import user_cache

DEFAULT_TOKENS = 4096
# Rows times the weights of all layers that a calibration may compute; but at least so many rows.
PRODUCTS, LEAST_ROWS = 3e12, 3600
BUILT_IN = "built-in"  # name of the text that is part of the program
MIN_TOKENS = 256  # statistics of keys and queries on fewer tokens are not reliable
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # folders that belong to pip
HUB_FOLDER = "models--"  # huggingface_hub's cache has folders with names that begin so

# Called during a calibration with the method's name, the share done, and at the end a remark.
OnCalibrate = Callable[[str, float, str], None]
Encode = Callable[[str], Sequence[int]]


class CalibrationText(NamedTuple):
    """A text, and its name for messages."""

    name: str
    text: str


def check_length(text: CalibrationText, n: int) -> None:
    """Raises SparseKVError if n, the number of tokens of ``text``, is below MIN_TOKENS."""
    if n < MIN_TOKENS:
        raise SparseKVError(
            f"calibration: the {n} tokens of text {text.name} are too few; give at least "
            f"{MIN_TOKENS}, better 1024 and more of mixed text"
        )


def built_in_text() -> CalibrationText:
    """Returns the program's own text: prose, code and dialogue, about 5,000 tokens in English."""
    path = files("sparsekv_cli") / "data" / "calibration.txt"
    return CalibrationText(BUILT_IN, path.read_text(encoding="utf-8"))


def affordable_rows(file: GGUFFile, hparams: HParams) -> int:
    """Returns how many rows a calibration may send through all layers.

    This takes a minute on two cores, or five minutes for a model of 8B parameters. A small model
    needs less time for the whole text. ``faedkv`` takes more rows if they would not be enough for
    its trials. The number depends only on the model, so that a slow machine computes the same
    calibration.
    """
    return max(LEAST_ROWS, int(PRODUCTS / layer_products(file, hparams)))


def layer_products(file: GGUFFile, hparams: HParams) -> float:
    """Returns the multiplications of one row by the weights of all layers.

    Only chosen experts count.
    """
    share = min(
        (e.n_expert_used / e.n_expert for layer in hparams.layers if (e := layer.experts)),
        default=1.0,
    )
    return sum(
        info.n_elements * (share if "_exps." in name else 1.0)
        for name, info in file.tensors.items()
        if name.startswith("blk.")
    )


class Calibrations:
    """The calibrations of one open model. A missing one is made and stored when a method needs it.

    identity: the model's, as it was opened. decoder: runs the model; None: only stored calibrations
    can be found. encode: text -> ids. sidecar: the only file to read; None: the usual files. If
    ``sidecar`` lacks a method, the method is refused, not calibrated.
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
        """Returns the sidecar next to the model, and the one in the user's cache.

        Without a cache directory both are the one next to the model.
        """
        path = Path(self._file.path)
        beside = path.with_name(f"{path.stem}{SUFFIX}")
        folder = user_cache("calibration")
        return beside, folder / f"{self.identity.model_hash}.npz" if folder else beside

    def place_to_write(self) -> Path:
        """Returns the sidecar to write: the one next to the model, or the one in the cache.

        It is the one in the cache if the user cannot write to the model's folder. The same holds
        for folders of pip and huggingface_hub.
        """
        beside, cached = self.places()
        folder = beside.parent.resolve()
        foreign = any(
            part in PACKAGE_FOLDERS or part.startswith(HUB_FOLDER) for part in folder.parts
        )
        return beside if os.access(folder, os.W_OK) and not foreign else cached

    def specs(self, method: Calibrated, report: OnCalibrate | None = None) -> list[LayerSpec]:
        """Returns the decoder's layers. If the method needs a calibration, each has its arrays.

        A missing calibration is made first. report: hears of its progress.
        """
        specs = self._decoder.layer_specs()
        if method.needs != CALIBRATION:
            return specs
        tensors = self._tensors(method, report)
        return [
            replace(spec, calibration={name: array[i] for name, array in tensors.items()})
            for i, spec in enumerate(specs)
        ]

    def has(self, method: Calibrated) -> bool:
        """Returns whether the method can run: it needs no calibration, or a stored one exists."""
        name = method.name
        if method.needs != CALIBRATION or name in self._loaded:
            return True
        return self.find_of(method) is not None

    def digests(self, methods: Iterable[Calibrated]) -> dict[str, str]:
        """Returns name -> hash of the calibration, for those of ``methods`` that have one."""
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
        """Returns ``method``'s stored calibration, as ``find`` does.

        Its arrays must fit ``method``.
        """
        return self.find(method.name, report, method.calibration_arrays(self._sizes()))

    def _sizes(self) -> list[LayerSpec]:
        """Returns the sizes of the layers. No decoder is needed for this."""
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
        """Returns the stored calibration of the method ``name``; None if there is none.

        The first file that has one counts; the file that this user writes is read first. arrays:
        the shapes and types that its arrays must have. Raises SparseKVError if a sidecar cannot be
        used. A file of an older version counts as missing if it lies in the cache directory and
        used the built-in text. ``report`` hears of it.
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
        """Stores a calibration that was just made. Returns a remark where, or why it failed."""
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
        n_scored: int = 0,
    ) -> Entry:
        """Runs ``method``'s calibration on the first ``n_tokens`` of ``text``.

        It uses fewer tokens if the model's context is shorter. n_scored: see CalibrationRun.
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
        text_hash = hashlib.sha256(text.text.encode()).hexdigest()
        # what decides which trials there are, and what they give
        of = name, self.identity.digest(), text_hash, len(ids), n_rows, n_scored
        key = hashlib.sha256(repr((*of, FORMAT_VERSION, __version__)).encode()).hexdigest()[:32]
        with UnfinishedScores(user_cache("calibration"), key) as scores:
            if scores.n_trials and report is not None:
                n_known = scores.n_trials
                report(name, 0.0, f"{n_known} trials are known from a run that was interrupted")
            run = CalibrationRun(
                decoder.layer_specs(), ids, forward, progress, n_rows, scores.next, n_scored
            )
            with blas_threads(1):  # the products are small, and more BLAS threads only wait
                tensors = method.calibrate(run)
            check_tensors(name, tensors, self._hparams.n_layer)
            scores.remove()
        return Entry(tensors, len(ids), text.name, text_hash)
