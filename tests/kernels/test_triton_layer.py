"""The steps of a layer between its products against the CPU's, for few rows and for many."""

from typing import Any

import numpy as np
import pytest
import torch

from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.layer import prefill as reference
from sparsekv_cli.cpu.layer.activation import ACTIVATIONS, gate_ref
from sparsekv_cli.cpu.layer.rows import HeadWeights
from sparsekv_cli.kernels.layer import rows as layer

EPS = 1e-5
N_POSITIONS, N_PAIRS = 300, 64
NONE = np.empty(0, np.float32)


def f32(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(found: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.float().cpu().numpy(), expected, tolerance, tolerance)


def on(device: str, x: np.ndarray | None, dtype: torch.dtype = torch.float32) -> Any:
    return None if x is None else torch.from_numpy(x).to(device, dtype)


def normed(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """By the CPU's kernel; x itself without a weight."""
    if weight is None:
        return x
    out = np.empty_like(x)
    reference.norm_rows(x, weight, np.float32(EPS), out, 1)
    return out


@pytest.mark.parametrize("n", [1, 63, 576, 4096])
@pytest.mark.parametrize("n_rows", [1, 3, 37])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(n, n_rows, has_weight, device):
    x, weight = f32(0, n_rows, n) * 10, f32(2, n) if has_weight else None
    close(layer.rms_norm(on(device, x), on(device, weight), EPS), normed(x, weight))
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.full((n_rows, n + 5), torch.nan, dtype=dtype, device=device)
        layer.rms_norm(on(device, x), on(device, weight), EPS, out=out[:, :n])
        close(out[:, :n], normed(x, weight), 8e-3)
        assert out[:, n:].isnan().all()


@pytest.mark.parametrize("n_rows", [2, 37])
@pytest.mark.parametrize("n", [63, 576])
@pytest.mark.parametrize("extras", ["none", "bias", "norm", "both"])
def test_added(n_rows, n, extras, device):
    """The output of a block becomes part of the rows, alone or ahead of a norm."""
    x, y, weight = f32(0, n_rows, n) * 10, f32(1, n_rows, n) * 3, f32(2, n)
    bias = f32(3, n) if extras in ("bias", "both") else None
    norm = f32(4, n) if extras in ("norm", "both") else None
    expected = x.copy()
    given = (NONE if each is None else each for each in (bias, norm))
    reference.add_rows(expected, y, *given, np.float32(EPS), np.float32(-0.25), 1)
    expected *= np.float32(1.5)
    added = layer.Added(on(device, y), -0.25, on(device, bias), on(device, norm), 1.5)
    alone, before = on(device, x.copy()), on(device, x.copy())
    layer.add_rows(alone, EPS, added)
    close(alone, expected)
    out = layer.rms_norm(before, on(device, weight), EPS, added)
    close(before, expected)
    close(out, normed(expected, weight))


CASES = {
    "none": {},
    "bias": {"biases": True},
    "norm": {"norm": "heads"},
    "norm and bias": {"norm": "heads", "biases": True},
    "wide norm": {"norm": "all", "biases": True},
    "norm of v": {"norm": "heads", "v_norm": True},
    "scale": {"scaled": True},
    "gate": {"gated": True},
    "queries alone": {"norm": "heads", "without_rows": True},
}


@pytest.mark.parametrize(
    ("n_head", "n_kv", "d", "d_v", "n_rot"),
    [
        (9, 3, 64, 64, 64),
        (4, 4, 80, 80, 32),
        (8, 2, 128, 64, 128),
        (3, 1, 64, 80, 48),
        (2, 1, 64, 64, 0),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads_first", [False, True])
def test_split_heads(n_head, n_kv, d, d_v, n_rot, interleaved, case, heads_first, device):
    options = {"biases": False, "norm": "", "v_norm": False, "scaled": False, "gated": False}
    options |= CASES[case]
    n_kv = 0 if options.pop("without_rows", False) else n_kv
    pos = np.array([0, 257, 15] if not heads_first else range(20, 57))
    n_rows, half = len(pos), n_rot // 2
    angles = np.outer(np.arange(N_POSITIONS), 10000.0 ** (-np.arange(N_PAIRS) / N_PAIRS))
    cos, sin = ((1.1 * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
    q_scale = np.linspace(1, 2, N_POSITIONS, dtype=np.float32) ** options["scaled"]
    raw = f32(0, n_rows, n_head * d * (1 + options["gated"]) + n_kv * (d + d_v))
    sizes = [n_head * d, n_kv * d, n_kv * d_v]
    vectors: list[Any] = [f32(i, n) if options["biases"] and n else None
                          for i, n in enumerate(sizes)]  # fmt: skip
    wide = {"": (0, 0), "heads": (d, d * (n_kv > 0)), "all": sizes[:2]}[options["norm"]]
    vectors += [f32(5 + i, n) if n else None for i, n in enumerate(wide)]
    vectors += [f32(7, d_v) if options["v_norm"] else None]
    shapes = [(n_head, d), (n_kv, d), (n_kv, d_v), (n_head, d), (n_kv, d)]
    expected = [np.empty((n, n_rows, width), np.float32) for n, width in shapes]
    reference.split_heads(
        raw, HeadWeights(*(NONE if each is None else each for each in vectors)), np.float32(EPS),
        cos[pos, :half], sin[pos, :half], q_scale[pos], (interleaved, options["gated"], d, d_v),
        tuple(expected), 1,
    )  # fmt: skip
    place = torch.device(device)
    out = layer.empty_heads(n_rows, (n_head, n_kv, d, d_v), place, heads_first=heads_first)
    for each in out:
        each.fill_(torch.nan)
    places, *tables = (on(device, x) for x in (pos, cos, sin, q_scale))
    rotation = layer.Rotation(places.int(), *tables, n_rot, interleaved)
    weights = layer.HeadVectors(*(on(device, each) for each in vectors))
    layer.split_heads(
        on(device, raw), out, rotation, weights, EPS, heads_first=heads_first,
        gated=options["gated"],
    )  # fmt: skip
    for found, wanted in zip(out, expected, strict=True):
        close(found if heads_first else found.transpose(0, 1), wanted, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_of_16_bits(dtype, device):
    """Results are rounded once. The interpreter cuts a bf16 off instead of rounding it."""
    raw = torch.from_numpy(f32(0, 37, 4 * 32)).to(dtype)
    angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(16) / 16))
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    expected = [np.empty((n, 37, 32), np.float32) for n in (2, 1, 1, 2, 1)]
    reference.split_heads(
        raw.float().numpy(), HeadWeights(*[NONE] * 6), np.float32(EPS), cos[:37], sin[:37],
        np.ones(37, np.float32), (False, False, 32, 32), tuple(expected), 1,
    )  # fmt: skip
    out = layer.empty_heads(37, (2, 1, 32, 32), torch.device(device), dtype, heads_first=True)
    pos = torch.arange(37, dtype=torch.int32, device=device)
    rotation = layer.Rotation(pos, on(device, cos), on(device, sin), torch.ones(64).to(device), 32)
    layer.split_heads(raw.to(device), out, rotation, layer.HeadVectors(), heads_first=True)
    for found, wanted in zip(out, expected, strict=True):
        assert found.dtype == dtype
        if dtype == torch.float16:
            assert torch.equal(found.cpu(), torch.from_numpy(wanted).to(dtype))
        close(found, wanted, 8e-3)


@pytest.mark.parametrize("n", [1, 63, 1536])
@pytest.mark.parametrize("n_rows", [3, 37])
@pytest.mark.parametrize("activation", layer.ACTIVATIONS)
def test_gate_rows(n, n_rows, activation, device):
    has_up = activation != "squared_relu"
    gate_up = f32(0, n_rows, n * (1 + has_up)) * 20
    gate_up[0, 0], gate_up[1, 0] = -200, 200  # exponentials that overflow
    gate, up = gate_up[:, :n].astype(np.float64), gate_up[:, -n:].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = gate_ref(ACTIVATIONS[activation], gate, up)
    close(layer.gate_rows(on(device, gate_up), activation), expected)
    rounded = layer.gate_rows(on(device, gate_up, torch.bfloat16), activation)
    assert rounded.dtype == torch.bfloat16
    assert np.isfinite(as_f32(rounded.cpu().view(torch.uint16).numpy())).all()


def test_wrong_arguments_are_refused(device):
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="weight has shape"):
        layer.rms_norm(x, torch.ones(9, device=device), EPS)
    with pytest.raises(ValueError, match=r"added\.norm has shape"):
        layer.add_rows(x, EPS, layer.Added(x, norm=torch.ones(9, device=device)))
    with pytest.raises(ValueError, match="out is"):
        layer.gate_rows(x, out=torch.zeros(2, 4, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="activation = 'tanh': must be one of silu"):
        layer.gate_rows(x, "tanh")
