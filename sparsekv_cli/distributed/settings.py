"""The settings with which every node opens and computes a model in the same way.

By default a model chooses some settings by its machine: threads, types of products, copies of
weights, the depth of sparse steps and calibrations. The first machine chooses them once and sends
them to the nodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv_cli import __version__
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.config import SessionConfig

if TYPE_CHECKING:
    from sparsekv_cli.model import Model

ROOM_CONTEXT = 8192  # tokens of K and V for which a node needs memory, if -c is not given


@dataclass(frozen=True)
class SessionSettings:
    """All settings of a model, so that a node decides nothing by itself."""

    path: Path
    model_hash: str
    version: str
    method: Method
    config: SessionConfig
    sidecar: bytes  # content of a file with calibrations; empty: no method needs one

    def open(self, others: Iterable[Method] = ()) -> Model:
        """Opens the model on this node and prepares the methods ``others``.

        Raises SparseKVError if the model or the program is another one than the sender's.
        """
        from sparsekv_cli.model import load_model

        if self.version != __version__:
            raise SparseKVError(f"sparsekv-cli is {__version__}, not {self.version}")
        if not self.path.exists():
            raise SparseKVError(f"{self.path} is missing: every node needs the model at that path")
        config = self.config
        with tempfile.TemporaryDirectory() as folder:
            if self.sidecar:
                sidecar = Path(folder) / "sent.npz"
                sidecar.write_bytes(self.sidecar)
                config = replace(config, calibration=str(sidecar))
            model = load_model(self.path, self.method, config)
            if model.calibrations.identity.model_hash != self.model_hash:
                raise SparseKVError(
                    f"{self.path} is another model there: copy the file to every node"
                )
            for method in others:
                model.prepare(method)
            return model


@dataclass(frozen=True)
class Room:
    """The resources of a node that one model needs."""

    n_cpus: int
    n_gpus: int
    n_bytes: int


def settings_of(model: Model, method: Method, others: Iterable[Method] = ()) -> SessionSettings:
    """Returns the settings of ``model``, which was opened with ``method``, for the nodes.

    others: further methods that the nodes use. Their calibrations are sent too.
    """
    config = replace(
        model.config,
        threads=model.n_threads,
        sparse_from=model.sparse_from,
        device="cpu" if model.engine.shares_prefill else "cuda",
        calibration="",
        draft_model="" if model.draft is None else str(Path(model.draft.gguf.path).absolute()),
    )
    if model.engine.shares_prefill:
        config = replace(config, **_host_choices(model))
    return SessionSettings(
        Path(model.gguf.path).absolute(),
        model.calibrations.identity.model_hash,
        __version__,
        method,
        config,
        _sidecar(model, [method, *others]),
    )


def room_of(model: Model, n_sequences: int) -> Room:
    """Returns the resources that a node needs for this model and ``n_sequences`` sequences."""
    from sparsekv_cli.cache.row_sizes import token_bytes

    n_rows = model.config.ctx_size or min(model.n_ctx, ROOM_CONTEXT)
    models = [model] if model.draft is None else [model, model.draft]
    rows = sum(each.row_bytes(n_rows) for each in models)
    rows += n_rows * token_bytes(model.engine.draft_specs, "f16", "f16")
    on_gpu = not model.engine.shares_prefill
    is_copied = not on_gpu and _host_choices(model)["repack"] == "on"
    weights = sum(each.gguf.size for each in models) * (2 if is_copied else 1)
    return Room(model.n_threads, int(on_gpu), weights + n_sequences * rows)


def _host_choices(model: Model) -> dict[str, Any]:
    from sparsekv_cli.models.repack import wants_repacking

    decoder, config = model.decoder, model.config
    return {
        "prefill_dtype": decoder.prefill_dtype,
        "activations": config.activations,
        "repack": "on" if wants_repacking(decoder.weights, config.repack) else "off",
    }


def _sidecar(model: Model, methods: Iterable[Method]) -> bytes:
    """Returns the content of a file with the calibrations of ``methods``; empty: none needed."""
    from sparsekv_cli.calibration.run import CALIBRATION
    from sparsekv_cli.calibration.sidecar import write_entry

    calibrated = {method.name for method in methods if method.needs == CALIBRATION}
    if not calibrated:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        sidecar = Path(folder) / "sent.npz"
        for name in sorted(calibrated):
            entry = model.calibrations.find(name)
            if entry is None:
                raise SparseKVError(
                    f"the calibration of {name} could not be stored, so it cannot be sent: make "
                    f"one with 'sparsekv-cli calibrate --method {name} --output FILE' and give "
                    "--calibration FILE"
                )
            write_entry(sidecar, name, model.calibrations.identity, entry)
        return sidecar.read_bytes()
