"""Prefill on the device against the CPU's: logits, and what caches on the host were given."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli.config import SessionConfig
from sparsekv_cli.methods import build_method
from sparsekv_cli.session import load_session

PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 259, 90)]
SIZES = {"n_embd": 64, "n_ff": 64, "n_vocab": 259, "head_dim": 32}  # the interpreter is slow


def sessions(path, method, **options):
    """One on the CPU, one on the device, both with f32 prefill."""
    both = []
    for device in ("cpu", "cuda"):
        config = SessionConfig(
            threads=1,
            device=device,
            prefill_dtype="f32",
            chunk=32,
            **(options if device == "cuda" else {}),
        )
        both.append(load_session(path, build_method(method, {}, budget=None), config))
    return both


@pytest.mark.parametrize("method", ["full", "lfps", "snapkv"])
def test_host_caches_are_filled_as_on_the_cpu(tmp_path, method):
    path = make_model(tmp_path / "m.gguf", wtype="F32", **SIZES)
    expected, actual = sessions(path, method, kv="host")
    for part in (PROMPT[:70], PROMPT[70:]):
        a, b = expected.prefill(part), actual.prefill(part)
        np.testing.assert_allclose(b, a, atol=2e-3)
    for ours, theirs in zip(actual.caches, expected.caches, strict=True):
        assert ours.n == theirs.n
        k = ours.cache.store.keys().float() - theirs.store.keys().float()
        assert k.abs().max() < 2e-3


@pytest.mark.parametrize(("method", "kv"), [("full", "device"), ("full", "host"), ("lfps", "host")])
def test_decode(tmp_path, method, kv):
    path = make_model(tmp_path / "m.gguf", wtype="F32", **SIZES)
    expected, actual = sessions(path, method, kv=kv)
    a, b = (session.prefill(PROMPT) for session in (expected, actual))
    for _ in range(5):
        np.testing.assert_allclose(b, a, atol=4e-3)
        token = int(a.argmax())
        a, b = (session.decode(token) for session in (expected, actual))
    assert expected.ledger.as_dict()["rows_attended"] == actual.ledger.as_dict()["rows_attended"]
