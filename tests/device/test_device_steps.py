"""A step on the device: what the host does while the device works, and Ctrl-C in the wait."""

import numpy as np
import pytest
from opened import open_sequence

from sparsekv_cli.device.methods.full import DeviceDense
from sparsekv_cli.device.step import StepBuffers
from sparsekv_cli.methods import build_method
from sparsekv_cli.settings.config import SessionConfig

SIZES = {"n_embd": 32, "n_ff": 32, "n_vocab": 400, "head_dim": 32, "n_head": 2, "n_head_kv": 1}


@pytest.fixture
def sequence(tiny_model):
    config = SessionConfig(threads=1, device="cuda", prefill_dtype="f32", ctx_size=256)
    model = tiny_model(wtype="F32", n_layer=2, **SIZES)
    opened = open_sequence(model, build_method("full", {}), config)
    opened.prefill(list(range(3, 40)))
    yield opened
    opened.model.gguf.close()


def test_steps_are_counted_while_the_device_works(sequence, monkeypatch):
    """Ahead of the wait for the logits, not behind it."""
    done = []
    end, wait = DeviceDense.end_step, StepBuffers._wait
    monkeypatch.setattr(
        DeviceDense, "end_step", lambda cache, n: (done.append("counted"), end(cache, n))
    )
    monkeypatch.setattr(StepBuffers, "_wait", lambda self: (done.append("wait"), wait(self)))
    sequence.decode(5)
    assert done == ["counted", "counted", "wait"]


def test_a_step_that_is_broken_off_in_the_wait_has_not_been(sequence, monkeypatch):
    n = sequence.caches[0].n
    expected = sequence.decode(5)
    sequence.rewind(n)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(StepBuffers, "_wait", interrupted)
        sequence.decode(7)
    assert [cache.n for cache in sequence.caches] == [n, n]
    np.testing.assert_array_equal(sequence.decode(5), expected)
