"""The fused decode calls of one layer against numpy in f64."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tiny_models import random_rows, tensor_rng

from sparsekv_cli.cpu.layer import choice, decode, products, rows
from sparsekv_cli.cpu.weights import dot, integer
from sparsekv_cli.models.weights import Linear

EPS = np.float32(1e-5)
THREADS = [1, 2]


def linear(name: str, n_rows: int, n_columns: int, wtype: str = "F32", std: float = 0.05):
    """A Linear of random rows and its values, f64 (rows, columns)."""
    rows = random_rows(tensor_rng(0, name), wtype, n_rows, n_columns, std)
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(n_rows, -1)
    weights = Linear(int(GGMLQuantizationType[wtype]), data, n_columns)
    values = dot.dequantize(weights.code, data, n_columns).astype(np.float64)
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
    rows.rms_norm(x.astype(np.float32), weight, EPS, out)
    np.testing.assert_allclose(out, norm_ref(x, weight), rtol=2e-5)


HEADS = ("q", "q_nope", "k", "k_nope", "v")
NUMBERS = ("n_head_kv", "head_dim", "n_ff", "n_rot", "n_inputs", "interleaved")


class Layer:
    """A layer of random weights, the buffers of ``n_rows`` rows, and its record."""

    def __init__(self, n_rows: int, matrices: dict[str, Linear], sizes: dict[str, int], **arrays):
        """matrices: those of q, k, v, o, gate, up, down that are of use; arrays: norms, biases."""
        h = {"n_embd": 0, "n_head": 1, "n_head_kv": 1, "head_dim": 0, "value_dim": 0, "n_ff": 0}
        h |= {"n_inputs": 3, "n_rot": 0, "interleaved": 0, **sizes}
        d, d_v = (-(-h[name] // 16) * 16 for name in ("head_dim", "value_dim"))
        heads, kv_heads = h["n_head"], h["n_head_kv"]
        width = heads * h["head_dim"] + kv_heads * (h["head_dim"] + h["value_dim"])
        columns = max(h["n_embd"], heads * h["value_dim"], h["n_ff"])
        stride = integer.quantized_stride(-(-columns // 32) * 32)
        shapes = {
            "normed": (n_rows, h["n_embd"]), "projected": (n_rows, width),
            "packed": (n_rows * heads, h["value_dim"]), "hidden": (n_rows, 2 * h["n_ff"] + 16),
            "q": (n_rows, heads, d), "q_nope": (n_rows, heads, d), "k": (n_rows, kv_heads, d),
            "k_nope": (n_rows, kv_heads, d), "v": (n_rows, kv_heads, d_v),
            "cos": (n_rows, h["n_rot"] // 2), "sin": (n_rows, h["n_rot"] // 2),
            "attn_norm": (h["n_embd"],), "ffn_norm": (h["n_embd"],),
        }  # fmt: skip
        self.arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.arrays |= {"q_scale": np.ones(n_rows, np.float32), **arrays}
        self.arrays["x"] = self.arrays["x"].reshape(n_rows, -1)
        tables = [
            choice.matrix_table([matrices[name]], 2)
            if name in matrices
            else np.zeros((1, 6), np.int64)
            for name in ("q", "k", "v", "o", "gate", "up", "down")
        ]
        self.matrices = np.concatenate(tables)
        apart = {name: self.arrays[name][:, :, None] for name in HEADS}
        self.state = decode.LayerState(
            **{name: h[name] for name in NUMBERS}, eps=float(EPS), residual_scale=1.0,
            matrices=self.matrices, regions=products.matrix_regions([self.matrices]),
            quantized=np.zeros((n_rows, stride), np.uint8),
            **{name: array for name, array in self.arrays.items() if name not in HEADS},
            **apart,
        )  # fmt: skip

    def __getattr__(self, name: str) -> np.ndarray:
        return self.arrays[name]


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("qk_norm", ["", "head", "all"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("d", "n_rot", "wtype"), [(64, 64, "F32"), (80, 80, "F32"), (72, 32, "Q8_0"), (64, 0, "F32")]
)
def test_project_qkv(d, n_rot, wtype, interleaved, qk_norm, biases, n_threads, n_rows):
    n_embd, n_head, n_kv, d_v = 96, 6 if qk_norm == "all" else 3, 2 if qk_norm == "all" else 1, 40
    shapes = {"q": (n_head, d), "k": (n_kv, d), "v": (n_kv, d_v)}
    pairs = {name: linear(name, n * w, n_embd, wtype) for name, (n, w) in shapes.items()}
    x, norm = vector(0, n_rows * n_embd).reshape(n_rows, n_embd), vector(1, n_embd, 1)
    angles = np.random.default_rng(2).random((n_rows, n_rot // 2)) * 6
    bias = {n: vector(i, h * w) for i, (n, (h, w)) in enumerate(shapes.items()) if biases}
    n_normed = {"q": n_head, "k": n_kv} if qk_norm == "all" else {"q": 1, "k": 1}
    norms = {n: vector(9, n_normed[n] * d, 1) for n in "qk" if qk_norm}
    q_scale = np.linspace(1, 1.5, n_rows).astype(np.float32)
    found = Layer(
        n_rows,
        {name: weights for name, (weights, _) in pairs.items()},
        {
            "n_embd": n_embd, "n_head": n_head, "n_head_kv": n_kv, "head_dim": d, "value_dim": d_v,
            "n_rot": n_rot, "interleaved": int(interleaved),
        },
        x=x, attn_norm=norm, q_scale=q_scale, cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32), **{f"{n}_bias": a for n, a in bias.items()},
        **{f"{n}_norm": a for n, a in norms.items()},
    )  # fmt: skip
    decode.project_qkv(found.state.at, n_rows, n_threads)

    def heads_ref(name, row):
        heads = pairs[name][1] @ norm_ref(x[row], norm)
        heads = heads + bias.get(name, 0)
        if qk_norm == "all" and name != "v":
            heads = norm_ref(heads, norms[name])
        heads = heads.reshape(shapes[name])
        if name == "v":
            return heads, heads
        if qk_norm == "head":
            heads = norm_ref(heads, norms[name])
        if interleaved:
            order = [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, d)]
            heads = heads[:, order]
        if name == "q":
            heads = heads * q_scale[row]
        return heads, rotate_ref(heads, np.cos(angles[row]), np.sin(angles[row]))

    # A block's activations are rounded to 2^-16 of the largest: 1e-4 (one sigma) of a normed head.
    limit = 2e-4 if wtype == "F32" else 1e-3
    for name, nope in (("q", "q_nope"), ("k", "k_nope"), ("v", "v")):
        width = shapes[name][1]
        for row in range(n_rows):
            both = getattr(found, nope)[row], getattr(found, name)[row]
            for actual, expected in zip(both, heads_ref(name, row), strict=True):
                np.testing.assert_allclose(actual[:, :width], expected, atol=limit)
                assert not actual[:, width:].any(), "the padding must stay zero"


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize(
    ("wtypes", "n_ff"),
    [
        (("F32",) * 4, 200),
        (("F16", "BF16", "F32", "F16"), 33),
        (("Q8_0", "Q4_0", "Q5_1", "Q4_1"), 96),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_finish_layer(wtypes, n_ff, scale, n_threads, n_rows):
    n_embd, n_head, d_v = 96, 4, 40
    o, o_values = linear("o", n_embd, n_head * d_v, wtypes[0])
    gate, gate_values = linear("gate", n_ff, n_embd, wtypes[1], 0.5)
    up, up_values = linear("up", n_ff, n_embd, wtypes[2], 0.5)
    down, down_values = linear("down", n_embd, n_ff, wtypes[3])
    attended = np.full((n_rows, n_head, 48), 1e9, np.float32)  # the padding must not be read
    attended[..., :d_v] = vector(0, n_rows * n_head * d_v).reshape(n_rows, n_head, d_v)
    x, norm = vector(1, n_rows * n_embd).reshape(n_rows, n_embd), vector(2, n_embd, 1)

    middle = x + scale * attended[..., :d_v].reshape(n_rows, -1) @ o_values.T
    normed = norm_ref(middle, norm)
    gated = normed @ gate_values.T
    hidden = gated / (1 + np.exp(-gated)) * (normed @ up_values.T)
    expected = middle + scale * hidden @ down_values.T

    sizes = {"n_embd": n_embd, "n_head": n_head, "value_dim": d_v, "n_ff": n_ff}
    matrices = {"o": o, "gate": gate, "up": up, "down": down}
    found = Layer(n_rows, matrices, sizes, x=x, ffn_norm=norm)
    found.state.set(residual_scale=float(scale))
    rows = attended.reshape(n_rows * n_head, 48)
    decode.finish_layer(found.state.at, rows, n_rows, n_threads)
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
    x = np.ones(n, np.float32)
    matrices = {"o": zero, "gate": scaled, "up": eye, "down": down}
    found = Layer(
        1, matrices, {"n_embd": n, "value_dim": n, "n_ff": n}, x=x, ffn_norm=np.ones(n, np.float32)
    )
    found.state.set(eps=0.0)
    decode.finish_layer(found.state.at, np.zeros((1, n), np.float32), 1, 1)
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(np.float64(-gate)))
    np.testing.assert_allclose(x, 1 + down_values @ np.full(n, silu), rtol=1e-3, atol=1e-5)


def multiplied(pairs, x: np.ndarray, n_threads: int) -> np.ndarray:
    """``layer.multiply`` of matrices with x f32 (B, columns)."""
    table = choice.matrix_table([weights for weights, _ in pairs], 2)
    out = np.full((len(x), sum(len(values) for _, values in pairs)), np.nan, np.float32)
    columns = -(-x.shape[1] // 32) * 32
    quantized = np.empty((len(x), integer.quantized_stride(columns)), np.uint8)
    products.multiply(table, x, len(x), quantized, out, n_threads)
    return out


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-36, 1e-20, 1.0, 1e20])
def test_block_formats_take_activations_of_any_size(size):
    pair = linear("w", 48, 64, "Q4_1")
    x = (size * vector(0, 64)).astype(np.float32)
    x[::5] = 0
    out = multiplied([pair], x[None], 1)[0]
    np.testing.assert_allclose(out, pair[1] @ x, rtol=1e-3, atol=1e-3 * size + 1e-30)


@pytest.mark.parametrize("n_rows", [1, 2, 5])
@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_rows_of_several_matrices_are_shared_out(n_threads, n_rows):
    pairs = [linear(f"m{n}", n, 64, wtype) for n, wtype in ((5, "F32"), (1, "Q8_0"), (30, "F16"))]
    x = vector(0, n_rows * 64).reshape(n_rows, 64)
    expected = np.concatenate([x @ values.T for _, values in pairs], axis=1)
    np.testing.assert_allclose(multiplied(pairs, x, n_threads), expected, atol=1e-5)


def test_regions_are_the_matrices_in_the_order_of_use_and_again():
    names = ("q", "k", "v", "o", "gate", "up", "down")
    linears = [linear(name, 16 * (i + 1), 32, "Q4_0")[0] for i, name in enumerate(names)]
    head = linear("output", 48, 32)[0]
    tables = [choice.matrix_table(linears, 2), choice.matrix_table([head], 2)]
    expected = [(dot.address(w.data), w.data.nbytes) for w in [*linears, head, *linears[:4]]]
    np.testing.assert_array_equal(products.matrix_regions(tables), expected)


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("wtype", ["F32", "Q6_K"])
def test_output_logits(wtype, n_rows):
    head, values = linear("output", 333, 256, wtype)
    x, norm = vector(0, 4 * 256).reshape(4, 256), vector(1, 256, 1)  # a row to spare
    logits = np.empty((n_rows, 333), np.float32)
    quantized = np.empty((4, integer.quantized_stride(256)), np.uint8)
    table = choice.matrix_table([head], 2)
    following = products.matrix_regions([table] * 4)
    decode.output_logits(
        x, norm, EPS, table, dot.address(following), np.zeros_like(x), quantized, logits, 2
    )
    expected = norm_ref(x[:n_rows], norm) @ values.T
    np.testing.assert_allclose(logits, expected, atol=2e-4)
