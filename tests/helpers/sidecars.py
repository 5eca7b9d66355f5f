"""A tiny model to calibrate, and what its sidecar holds."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import sparsekv_cli.cpu  # noqa: F401 - chooses the kernel cache before tests move the user's cache
from sparsekv_cli.calibration.sidecar import Entry
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.identity import identity_in
from sparsekv_cli.settings.config import SessionConfig

N_LAYER, N_CTX = 3, 320
CONFIG = SessionConfig(threads=1, prefill_dtype="f32", chunk=64)
SIZES = {"n_layer": N_LAYER, "n_embd": 64, "n_ff": 64, "n_ctx": N_CTX}
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class KnownContent:
    """In the place of a ModelContent, without a file."""

    name: str

    def wait(self) -> str:
        return self.name


def identity_of(path):
    with open_gguf(path) as file:
        found = identity_in(file, read_hparams(file))
        return replace(found, content=KnownContent(file.content.wait()))


def entry(seed=0, **tensors):
    rng = np.random.default_rng(seed)
    tensors = tensors or {"a": rng.standard_normal((N_LAYER, 2, 5)).astype(np.float32)}
    return Entry(tensors, 300, "a text", "0" * 64)


def refused(call) -> str:
    with pytest.raises(SparseKVError) as error:
        call()
    message = str(error.value)
    assert message and "\n" not in message
    return message


def assert_same(left, right):
    assert list(left.tensors) == list(right.tensors)
    for name, array in left.tensors.items():
        assert array.dtype == right.tensors[name].dtype
        np.testing.assert_array_equal(array, right.tensors[name])
    assert replace(left, tensors={}) == replace(right, tensors={})
