"""scripts/reading/precision: how it rounds, and what it says of a model."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

precision = load_script("reading/precision")
RNG = np.random.default_rng(7)


def test_a_byte_holds_what_its_scale_says():
    x = RNG.standard_normal((5, 64)).astype(np.float32)
    x[1] = 0
    for block in (32, 64):
        found = precision.to_bytes(x, block)
        largest = np.abs(x.reshape(5, -1, block)).max(-1)
        errors = np.abs(found - x).reshape(5, -1, block).max(-1)
        assert (errors <= largest / 254 * (1 + 1e-5)).all() and (errors[0] > 0).all()
        levels = found[0].reshape(-1, block) / (largest[0] / 127)[:, None]
        np.testing.assert_allclose(levels, np.rint(levels), atol=1e-3)
    assert not found[1].any()


def test_bf16_rounds_to_even():
    x = np.array([[1, 1 + 2**-8, 1 + 3 * 2**-8, -3.3]], np.float32)
    assert precision.to_bf16(x).tolist() == [[1, 1, 1 + 2**-6, -3.296875]]


@pytest.mark.parametrize("name", precision.TYPES)
def test_attention_is_causal_and_near_f32(name):
    q, k, v = RNG.standard_normal((3, 40, 64)).astype(np.float32)
    k += 3  # a mean that centred keys lack
    exact, found = (
        precision.attention(q[32:], k, v, 0.125, 32, rounding)
        for rounding in (precision.in_f32, precision.TYPES[name])
    )
    np.testing.assert_allclose(found, exact, atol=0.05)
    assert np.abs(found - exact).max() > 1e-5
    scores = q[32] @ k[:33].T / 8
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(exact[0], weights @ v[:33] / weights.sum(), atol=1e-5)


def test_a_model_gets_a_row_a_type(tmp_path, capsys):
    model = make_model(tmp_path / "tiny.gguf", n_layer=2, n_embd=128, n_ff=64, n_ctx=256)
    figures = tmp_path / "figures.json"
    arguments = ["-m", str(model), "-t", "1", "--tokens", "48", "--json", str(figures)]
    assert precision.main(arguments) == 0
    rows = json.loads(figures.read_text())
    assert [row["type"] for row in rows] == list(precision.TYPES)
    assert all(0 < row["kld"] < row["kld_99"] and row["tokens"] == 48 for row in rows)
    assert "centred bytes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        precision.main([*arguments, "--tokens", "8"])
