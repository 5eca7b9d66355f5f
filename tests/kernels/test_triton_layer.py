"""The steps between a decode step's products against TorchChunkSteps, row by row."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsekv_cli.device.prefill import TorchChunkSteps
from sparsekv_cli.kernels.layer import decode as layer
from sparsekv_cli.models.layers.layer_params import LayerParams

EPS = 1e-5


def f32(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


N_POSITIONS, N_PAIRS = 300, 64


def reference(interleaved: bool = False, *, scaled: bool = False) -> TorchChunkSteps:
    """With the tables of N_PAIRS pairs, of which a layer may turn fewer."""
    angles = np.outer(np.arange(N_POSITIONS), 10000.0 ** (-np.arange(N_PAIRS) / N_PAIRS))
    cos, sin = ((1.1 * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
    q_scale = np.linspace(1, 2, N_POSITIONS, dtype=np.float32) ** scaled
    rope = SimpleNamespace(cos=cos, sin=sin, q_scale=q_scale)
    hparams = SimpleNamespace(norm_eps=EPS, residual_scale=1.0)
    return TorchChunkSteps(hparams, rope, interleaved, torch.float32)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 63, 576, 4096])
@pytest.mark.parametrize("n_batch", [1, 3])
def test_rms_norm(n, n_batch, device):
    x, y, weight = f32(0, n_batch, n) * 10, f32(1, n_batch, n), f32(2, n)
    rows = reference()
    close(layer.rms_norm(x.to(device), weight.to(device), EPS), rows.norm(x, weight.numpy()))
    out = torch.full((n_batch, n + 5), torch.nan, device=device)
    on_device = x.clone().to(device)
    layer.rms_norm(on_device, weight.to(device), EPS, y.to(device), out[:, :n])
    close(on_device, x + y)
    close(out[:, :n], rows.norm(x + y, weight.numpy()))
    assert out[:, n:].isnan().all()
    layer.rms_norm(on_device, weight.to(device), EPS, y.to(device), y_scale=-0.25)
    close(on_device, x + 0.75 * y)


@pytest.mark.parametrize(
    ("n_head", "n_kv_head", "d", "d_v", "n_rot"),
    [
        (9, 3, 64, 64, 64),
        (4, 4, 80, 80, 32),
        (8, 2, 128, 64, 128),
        (3, 1, 64, 80, 48),
        (2, 1, 64, 64, 0),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("extras", ["none", "bias", "norm", "scale"])
def test_split_heads(n_head, n_kv_head, d, d_v, n_rot, interleaved, extras, device):
    rows = reference(interleaved, scaled=extras == "scale")
    sizes = LayerParams(n_head, n_kv_head, d, d_v, n_rot, n_ff=0)
    n_batch = 3
    raw = f32(0, n_batch, (n_head + n_kv_head) * d + n_kv_head * d_v)
    pos = [0, 257, 15]
    biases = norms = (None, None, None)
    if extras == "bias":
        biases = tuple(
            f32(i, n) for i, n in enumerate((n_head * d, n_kv_head * d, n_kv_head * d_v))
        )
    if extras == "norm":
        norms = (f32(5, d), f32(6, d), None)
    of_layer = SimpleNamespace(
        **{
            name: SimpleNamespace(bias=None if bias is None else bias.numpy())
            for name, bias in zip("qkv", biases, strict=True)
        },
        q_norm=None if norms[0] is None else norms[0].numpy(),
        k_norm=None if norms[1] is None else norms[1].numpy(),
    )
    out = layer.empty_heads(n_batch, n_head, n_kv_head, d, d_v, torch.device(device))
    for x in out:
        x.fill_(torch.nan)
    rope = rows._rope
    cos, sin, q_scale = (torch.from_numpy(x).to(device) for x in (rope.cos, rope.sin, rope.q_scale))
    biases, norms = (
        [None if x is None else x.to(device) for x in part] for part in (biases, norms[:2])
    )
    layer.split_heads(
        raw.to(device), list(out), torch.tensor(pos, dtype=torch.int32, device=device), cos, sin,
        q_scale if extras == "scale" else None, n_rot=n_rot, biases=biases, norms=norms, eps=EPS,
        interleaved=interleaved,
    )  # fmt: skip
    for b, position in enumerate(pos):
        expected = rows.heads(raw[b : b + 1], of_layer, sizes, position)
        for name in layer.Heads._fields:
            close(getattr(out, name)[b], getattr(expected, name)[:, 0])


@pytest.mark.parametrize("n", [1, 63, 1536])
def test_silu_multiply(n, device):
    gate_up = f32(0, 3, 2 * n) * 20
    gate_up[0, 0], gate_up[1, 0] = -200, 200  # exponentials that overflow
    expected = reference().gate(gate_up)
    close(layer.silu_multiply(gate_up.to(device)), expected)


def test_wrong_arguments_are_refused(device):
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="weight has shape"):
        layer.rms_norm(x, torch.ones(9, device=device), EPS)
    with pytest.raises(ValueError, match="out is"):
        layer.silu_multiply(x, torch.zeros(2, 4, dtype=torch.int32, device=device))
