"""The fused decode calls of one layer against numpy in f64."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tiny_models import random_rows, tensor_rng

from sparsekv_cli.cpu import layer, matvec
from sparsekv_cli.models.weights import Linear

EPS = np.float32(1e-5)
THREADS = [1, 2]


def linear(name: str, n_rows: int, n_columns: int, wtype: str = "F32", std: float = 0.05):
    """A Linear of random rows and its values, f64 (rows, columns)."""
    rows = random_rows(tensor_rng(0, name), wtype, n_rows, n_columns, std)
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(n_rows, -1)
    weights = Linear(int(GGMLQuantizationType[wtype]), data, n_columns)
    values = matvec.dequantize(weights.code, data, n_columns).astype(np.float64)
    return weights, values


def vector(seed: int, n: int, mean: float = 0.0) -> np.ndarray:
    return (mean + np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def norm_ref(x, weight):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotate_ref(heads, cos, sin):
    """(heads, d) in half-split order."""
    half = len(cos)
    out = heads.copy()
    a, b = heads[:, :half], heads[:, half : 2 * half]
    out[:, :half], out[:, half : 2 * half] = a * cos - b * sin, a * sin + b * cos
    return out


@pytest.mark.parametrize("n", [1, 15, 64, 577])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_rms_norm(n, size):
    x, weight = size * vector(0, n), vector(1, n, 1)
    out = np.empty(n, np.float32)
    layer.rms_norm(x.astype(np.float32), weight, EPS, out)
    np.testing.assert_allclose(out, norm_ref(x, weight), rtol=2e-5)


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("d", "n_rot", "wtype"), [(64, 64, "F32"), (80, 80, "F32"), (72, 32, "Q8_0")]
)
def test_project_qkv(d, n_rot, wtype, interleaved, qk_norm, biases, n_threads):
    n_embd, n_head, n_kv, d_v = 96, 3, 1, 40
    sizes = {"q": (n_head, d), "k": (n_kv, d), "v": (n_kv, d_v)}
    pairs = {name: linear(name, n * w, n_embd, wtype) for name, (n, w) in sizes.items()}
    x, norm = vector(0, n_embd), vector(1, n_embd, 1)
    angle = np.random.default_rng(2).random(n_rot // 2) * 6
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    none = layer.NO_BIAS
    bias = {n: vector(i, h * w) if biases else none for i, (n, (h, w)) in enumerate(sizes.items())}
    norms = {n: vector(9, d, 1) if qk_norm else none for n in "qk"}

    padded = -(-d // 16) * 16
    q, q_nope = (np.zeros((n_head, padded), np.float32) for _ in range(2))
    k, k_nope = (np.zeros((n_kv, padded), np.float32) for _ in range(2))
    v = np.zeros((n_kv, 48), np.float32)
    raw = np.zeros(sum(n * w for n, w in sizes.values()), np.float32)
    table = layer.matrix_table([weights for weights, _ in pairs.values()])
    layer.project_qkv(
        x, norm, EPS, table, bias["q"], bias["k"], bias["v"], norms["q"], norms["k"], cos, sin,
        interleaved, d, d_v, np.zeros(n_embd, np.float32), raw, q, k, v, q_nope, k_nope, n_threads,
    )  # fmt: skip

    def heads_ref(name):
        heads = pairs[name][1] @ norm_ref(x, norm)
        heads = (heads + (bias[name] if biases else 0)).reshape(sizes[name])
        if name == "v":
            return heads, heads
        if qk_norm:
            heads = norm_ref(heads, norms[name])
        if interleaved:
            order = [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, d)]
            heads = heads[:, order]
        return heads, rotate_ref(heads, cos, sin)

    for name, nope, rotated in (("q", q_nope, q), ("k", k_nope, k), ("v", v, v)):
        width = sizes[name][1]
        for actual, expected in zip((nope, rotated), heads_ref(name), strict=True):
            np.testing.assert_allclose(actual[:, :width], expected, atol=2e-4)
            assert not actual[:, width:].any(), "the padding must stay zero"


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize(
    ("wtypes", "n_ff"),
    [
        (("F32",) * 4, 200),
        (("F16", "BF16", "F32", "F16"), 33),
        (("Q8_0", "Q4_0", "Q5_1", "Q4_1"), 96),
    ],
)
def test_finish_layer(wtypes, n_ff, n_threads):
    n_embd, n_head, d_v = 96, 4, 40
    o, o_values = linear("o", n_embd, n_head * d_v, wtypes[0])
    gate, gate_values = linear("gate", n_ff, n_embd, wtypes[1], 0.5)
    up, up_values = linear("up", n_ff, n_embd, wtypes[2], 0.5)
    down, down_values = linear("down", n_embd, n_ff, wtypes[3])
    attended = np.full((n_head, 48), 1e9, np.float32)  # the padding must not be read
    attended[:, :d_v] = vector(0, n_head * d_v).reshape(n_head, d_v)
    x, norm = vector(1, n_embd), vector(2, n_embd, 1)

    middle = x + o_values @ attended[:, :d_v].reshape(-1)
    normed = norm_ref(middle, norm)
    gated = gate_values @ normed
    expected = middle + down_values @ (gated / (1 + np.exp(-gated)) * (up_values @ normed))

    packed, scratch = np.zeros(n_head * d_v, np.float32), np.zeros(n_head * d_v, np.float32)
    hidden = np.zeros(2 * n_ff + 16, np.float32)
    layer.finish_layer(
        attended, d_v, layer.matrix_table([o]), norm, EPS, layer.matrix_table([gate, up]),
        layer.matrix_table([down]), x, packed, scratch, hidden, n_threads,
    )  # fmt: skip
    np.testing.assert_allclose(x, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("gate", [-1e4, -88.0, -80.0, -20.0, -0.0, 0.0, 1e-3, 20.0, 88.0, 1e4])
def test_gate_of_any_size(gate):
    """silu saturates without overflow, and nearly vanished blocks of activations stay finite."""
    n = 64
    identity = np.eye(n, dtype=np.float32)
    eye = Linear(int(GGMLQuantizationType.F32), identity.view(np.uint8), n)
    zero = Linear(eye.code, np.zeros_like(eye.data), n)
    scaled = Linear(eye.code, (gate * identity).astype(np.float32).view(np.uint8), n)
    down, down_values = linear("down", n, n, "Q4_1")
    x, ones = np.ones(n, np.float32), np.ones(n, np.float32)
    layer.finish_layer(
        np.zeros((1, n), np.float32), n, layer.matrix_table([zero]), ones, np.float32(0),
        layer.matrix_table([scaled, eye]), layer.matrix_table([down]), x, np.zeros(n, np.float32),
        np.zeros(n, np.float32), np.zeros(2 * n + 16, np.float32), 1,
    )  # fmt: skip
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(np.float64(-gate)))
    np.testing.assert_allclose(x, 1 + down_values @ np.full(n, silu), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-36, 1e-20, 1.0, 1e20])
def test_block_formats_take_activations_of_any_size(size):
    weights, values = linear("w", 48, 64, "Q4_1")
    x = (size * vector(0, 64)).astype(np.float32)
    x[::5] = 0
    table = layer.matrix_table([weights])
    out = np.empty(48, np.float32)
    layer._matrices_part(table, x, layer._quantized(table, x), out, 0, 1)
    np.testing.assert_allclose(out, values @ x, rtol=1e-3, atol=1e-3 * size + 1e-30)


@pytest.mark.parametrize("n_parts", [1, 2, 3, 7])
def test_rows_of_several_matrices_are_shared_out(n_parts):
    pairs = [linear(f"m{n}", n, 64) for n in (5, 1, 30)]
    table = layer.matrix_table([weights for weights, _ in pairs])
    x = vector(0, 64)
    out = np.full(36, np.nan, np.float32)
    for part in range(n_parts):
        layer._matrices_part(table, x, layer._quantized(table, x), out, part, n_parts)
    expected = np.concatenate([values @ x for _, values in pairs])
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("wtype", ["F32", "Q6_K"])
def test_output_logits(wtype):
    head, values = linear("output", 333, 256, wtype)
    x, norm = vector(0, 256), vector(1, 256, 1)
    logits = np.empty(333, np.float32)
    layer.output_logits(
        x, norm, EPS, layer.matrix_table([head]), np.zeros(256, np.float32), logits, 2
    )
    np.testing.assert_allclose(logits, values @ norm_ref(x, norm), atol=2e-4)
