"""The roofline: its arithmetic by hand, its bytes against a real sequence, a measured bandwidth."""

import pytest
from opened import open_sequence
from tiny_models import make_model

from sparsekv_cli.evaluation.roofline import Roofline, decode_roofline, measure_bandwidth
from sparsekv_cli.methods import build_method
from sparsekv_cli.settings.config import SessionConfig


def test_bound_by_hand():
    roofline = Roofline(weight_bytes=98_000_000, kv_bytes=189_000_000, bandwidth=41e9)
    assert roofline.n_bytes == 287_000_000
    assert roofline.bound_ts == pytest.approx(142.857, rel=1e-5)
    assert roofline.fraction(71.4285) == pytest.approx(0.5, rel=1e-5)
    assert roofline.line("tg128 @ d8192 full", 101.4) == (
        "roofline tg128 @ d8192 full: 98 MB weights + 189 MB KV a token, 41.0 GB/s measured, "
        "bound 143 t/s, reached 71%"
    )


def test_small_sizes_keep_a_figure():
    line = Roofline(0, 1_250_000, 1e9).line("tg1 lfps", 1.0)
    assert "0 MB weights + 1.2 MB KV" in line


def test_bytes_a_token_are_those_of_the_ledger():
    roofline = decode_roofline(1000, {"bytes_read": 600, "rows_total": 7}, 4, 1e6)
    assert (roofline.weight_bytes, roofline.kv_bytes) == (1000, 150)
    assert decode_roofline(1000, {}, 4, 1e6).kv_bytes == 0


def test_full_attention_reads_all_rows(tmp_path):
    path = make_model(tmp_path / "model.gguf", n_layer=2, n_embd=128, n_ff=128)
    config = SessionConfig(ctx_size=40, threads=1, prefill_dtype="f32")
    sequence = open_sequence(path, build_method("full", {}), config)
    sequence.prefill(list(range(3, 23)))
    sequence.decode(5)
    weights = sequence.model.decoder.weights
    roofline = decode_roofline(weights.bytes_a_step(1), sequence.ledger(), 1, 1e9)
    h = sequence.model.hparams
    row = sum(x.n_head_kv * 2 * (x.head_dim + x.value_dim) for x in h.layers)
    assert roofline.kv_bytes == 21 * row  # 20 prefilled and the token's own
    n_linear = sum(w.data.nbytes for layer in weights.layers for w in layer.linears())
    assert roofline.weight_bytes == n_linear + weights.output.data.nbytes
    sequence.model.gguf.close()


def test_bandwidth_is_of_a_plausible_size():
    assert 1e8 < measure_bandwidth(1, n_bytes=1 << 20) < 1e13
