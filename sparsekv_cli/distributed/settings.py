"""What every machine opens a session from, so that all of them compute alike.

Whatever a session works out on its machine (threads, types of products, copies of weights, where a
method begins to be sparse, calibrations) is worked out once and sent along.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv_cli import __version__
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import Method

if TYPE_CHECKING:
    from sparsekv_cli.session import Session

ROOM_CONTEXT = 8192  # tokens of K and V that a session is given memory for, if -c does not say


@dataclass(frozen=True)
class SessionSettings:
    """A session without what a machine decides. sidecar: a file with the methods' calibrations."""

    path: Path
    model_hash: str
    version: str
    method: Method
    config: SessionConfig
    sidecar: bytes

    def open(self, others: Iterable[Method] = ()) -> Session:
        """The session, with ``others`` prepared.

        SparseKVError where model or program are not those that were sent.
        """
        from sparsekv_cli.session import load_session

        if self.version != __version__:
            raise SparseKVError(f"sparsekv-cli is {__version__}, not {self.version}")
        if not self.path.exists():
            raise SparseKVError(f"{self.path} is missing: every node needs the model at that path")
        config = self.config
        if not self.sidecar:
            return self._ready(load_session(self.path, self.method, config), others)
        with tempfile.TemporaryDirectory() as folder:
            sidecar = Path(folder) / "sent.npz"
            sidecar.write_bytes(self.sidecar)
            config = replace(config, calibration=str(sidecar))
            return self._ready(load_session(self.path, self.method, config), others)

    def _ready(self, session: Session, others: Iterable[Method]) -> Session:
        if session.calibrations.identity.model_hash != self.model_hash:
            raise SparseKVError(f"{self.path} is another model there: copy the file to every node")
        for method in others:
            session.prepare(method)
        return session


@dataclass(frozen=True)
class Room:
    """What a session takes of a machine."""

    n_cpus: int
    n_gpus: int
    n_bytes: int


def settings_of(session: Session, method: Method, others: Iterable[Method] = ()) -> SessionSettings:
    """What ``session``, which was opened with ``method``, has worked out.

    others: methods that the nodes use, too, and whose calibrations they get.
    """
    config = replace(
        session.config,
        threads=session.n_threads,
        sparse_from=session.sparse_from,
        device="cpu" if session.engine.shares_prefill else "cuda",
        calibration="",
    )
    if session.engine.shares_prefill:
        config = replace(config, **_host_choices(session))
    return SessionSettings(
        Path(session.gguf.path).absolute(),
        session.calibrations.identity.model_hash,
        __version__,
        method,
        config,
        _sidecar(session, [method, *others]),
    )


def room_of(session: Session, n_sequences: int) -> Room:
    """What a session like this one takes with so many sequences."""
    from sparsekv_cli.cache.row_sizes import token_bytes

    n_rows = session.config.ctx_size or min(session.n_ctx, ROOM_CONTEXT)
    types = session.method.cache_type_k, session.method.cache_type_v
    row = token_bytes(session.hparams.layers, *types)
    on_gpu = not session.engine.shares_prefill
    is_copied = not on_gpu and _host_choices(session)["repack"] == "on"
    weights = session.gguf.size * (2 if is_copied else 1)
    return Room(session.n_threads, int(on_gpu), weights + n_sequences * n_rows * row)


def _host_choices(session: Session) -> dict[str, Any]:
    from sparsekv_cli.cpu.weights.integer import activation_planes
    from sparsekv_cli.models.repack import wants_repacking

    decoder, config = session.decoder, session.config
    return {
        "prefill_dtype": decoder.prefill_dtype,
        "activations": str(8 * activation_planes(config.activations)),
        "repack": "on" if wants_repacking(decoder.weights, config.repack) else "off",
    }


def _sidecar(session: Session, methods: Iterable[Method]) -> bytes:
    """A calibration file with what the methods need; empty if they need none."""
    from sparsekv_cli.calibration.run import CALIBRATION
    from sparsekv_cli.calibration.sidecar import write_entry

    calibrated = {method.name for method in methods if method.needs == CALIBRATION}
    if not calibrated:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        sidecar = Path(folder) / "sent.npz"
        for name in sorted(calibrated):
            entry = session.calibrations.find(name)
            if entry is None:
                raise SparseKVError(
                    f"the calibration of {name} could not be stored, so it cannot be sent: make "
                    f"one with 'sparsekv-cli calibrate --method {name} --output FILE' and give "
                    "--calibration FILE"
                )
            write_entry(sidecar, name, session.calibrations.identity, entry)
        return sidecar.read_bytes()
