"""The fused passes of a prefill against steps in torch (tests/helpers/torch_chunk_steps.py)."""

from itertools import product

import numpy as np
import pytest
import torch
from opened import open_sequence
from tiny_models import make_model
from torch_chunk_steps import TorchChunkSteps

from sparsekv_cli.cpu.layer import prefill as kernels
from sparsekv_cli.cpu.layer.activation import ACTIVATIONS, gate_ref
from sparsekv_cli.cpu.layer.rows import HeadWeights
from sparsekv_cli.device.host import as_array, as_tensor
from sparsekv_cli.methods.full import Full
from sparsekv_cli.models.chunk_steps import FusedBF16ChunkSteps, FusedChunkSteps
from sparsekv_cli.settings.config import SessionConfig

# One step of bf16, as both sides round, and may round apart; and some of f32
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 4e-6}


def f32(seed: int, *shape: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype in TOLERANCE
    torch.testing.assert_close(got.float(), expected.float(), rtol=TOLERANCE[got.dtype], atol=1e-6)


def test_narrowing_and_widening_are_torchs():
    values = torch.cat([f32(0, 5000) * 10.0**e for e in (-30, -3, 0, 30)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8])])  # and ties
    expected = values.bfloat16()
    zeros = torch.zeros(1, len(values))
    one, none = np.float32(1), np.empty(0, np.float32)
    kernels.add_rows(zeros.numpy(), as_array(expected[None]), none, none, one, one, 1)
    assert torch.equal(zeros[0], expected.float())
    # as the biases of a value head whose product is 0
    heads = [torch.empty(1, 1, d, dtype=torch.bfloat16) for d in (2, 2, len(values), 2, 2)]
    raw = torch.zeros(1, 4 + len(values), dtype=torch.bfloat16)
    angle = np.zeros((1, 1), np.float32)
    weights = HeadWeights(none, none, values.numpy(), none, none, none)
    form, outs = (False, False, 2, len(values)), tuple(map(as_array, heads))
    kernels.split_heads(as_array(raw), weights, one, angle, angle, angle[0], form, outs, 1)
    assert torch.equal(heads[2][0, 0], expected)


@pytest.fixture(
    scope="module",
    params=product(["llama", "qwen2", "qwen3", "granite", "mistral3", "phi3", "qwen35"], TOLERANCE),
)
def rows(request, tmp_path_factory):
    """(sequence, torch rows, fused rows) of a tiny model: rotation by pairs, biases, q/k norms."""
    path = tmp_path_factory.mktemp("rows") / "tiny.gguf"
    arch, dtype = request.param
    make_model(path, arch=arch)
    sequence = open_sequence(path, Full(), SessionConfig(prefill_dtype="f32", threads=1))
    decoder = sequence.model.decoder
    decoder.rope.reserve(400)
    h, architecture = sequence.model.hparams, decoder.architecture
    plain = TorchChunkSteps(h, decoder.rope.full, architecture.rope_interleaved, dtype)
    fused = FusedBF16ChunkSteps if dtype == torch.bfloat16 else FusedChunkSteps
    yield sequence, plain, fused(h, decoder.rope, architecture, 2)
    sequence.model.gguf.close()


@pytest.mark.parametrize("n_rows", [1, 2, 63])
def test_rows_of_a_layer(rows, n_rows):
    sequence, plain, fused = rows
    h, layer = sequence.model.hparams, sequence.model.decoder.weights.layers[1]
    x = f32(0, n_rows, h.n_embd)
    expected = plain.norm(x, layer.attn_norm)
    dtype = expected.dtype
    stream = fused.stream(x.numpy())
    close(as_tensor(fused.norm(stream, layer.attn_norm)), expected)
    close(
        as_tensor(fused.last_norm(stream, layer.attn_norm)),
        plain.last_norm(plain.stream(x.numpy()), layer.attn_norm),
    )

    sizes = h.layers[1]
    n_q = sizes.n_head * (1 + sizes.output_gate)
    width = (n_q + sizes.n_head_kv) * sizes.head_dim + sizes.n_head_kv * sizes.value_dim
    raw = f32(1, n_rows, width).to(dtype)
    got = fused.heads(as_array(raw), layer, sizes, 300)
    expected = plain.heads(raw, layer, sizes, 300)
    assert got.pos == expected.pos == 300
    for a, b in zip(map(as_tensor, got[:5]), expected[:5], strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        # a rotation may cancel; what f32 loses there is a step of its terms, not of the result
        torch.testing.assert_close(a.float(), b.float(), rtol=TOLERANCE[dtype], atol=1e-5)

    if sizes.output_gate:
        attended = f32(4, n_rows, sizes.n_attended).to(dtype)
        gated = fused.gate_heads(as_array(attended), as_array(raw), sizes)
        close(as_tensor(gated), plain.gate_heads(attended, raw, sizes))

    gate_up = 3 * f32(2, n_rows, 2 * sizes.n_ff).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    gated = as_tensor(fused.gate(as_array(gate_up)))
    close(gated, torch.nn.functional.silu(gate) * up)

    y = f32(3, n_rows, h.n_embd).to(dtype)
    other = x.clone()
    fused.add(stream, as_array(y))
    plain.add(other, y)
    assert torch.equal(x, other) or h.residual_scale != 1
    torch.testing.assert_close(x, other)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [1, 15, 17, 100])
def test_gate_of_widths_that_fill_no_vector(n, dtype, activation):
    gate_up = torch.cat([30 * f32(0, 4, n), 10 * f32(1, 4, n)], dim=1).to(dtype)
    out, kind = torch.empty(4, n, dtype=dtype), ACTIVATIONS[activation]
    kernels.gate_rows(as_array(gate_up), kind, as_array(out), 2)
    halves = [half.double().numpy() for half in gate_up.chunk(2, dim=1)]
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(gate_ref(kind, *halves))
    close(out, expected)


def test_gates_are_torchs():
    gate, up = f32(0, 1000).double() * 4, f32(1, 1000).double()
    functions = torch.nn.functional
    silu, gelu = functions.silu(gate) * up, functions.gelu(gate, approximate="tanh") * up
    for name, expected in (("silu", silu), ("gelu", gelu)):
        found = gate_ref(ACTIVATIONS[name], gate.numpy(), up.numpy())
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_added_may_have_a_bias_and_a_norm(dtype):
    y, bias, norm = f32(0, 5, 40).to(dtype), f32(1, 40), f32(2, 40)
    none, eps, scale = np.empty(0, np.float32), np.float32(1e-5), np.float32(0.5)
    for b, w in ((bias, None), (None, norm), (bias, norm)):
        x = torch.ones(5, 40)
        given = (each.numpy() if each is not None else none for each in (b, w))
        kernels.add_rows(x.numpy(), as_array(y), *given, eps, scale, 2)
        expected = y.float() + (0 if b is None else b)
        if w is not None:
            expected = expected * (expected.square().mean(1, keepdim=True) + 1e-5).rsqrt() * w
        torch.testing.assert_close(x, 1 + 0.5 * expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n_head", "d"), [(1, 15), (3, 17), (2, 64)])
def test_gate_of_heads_that_fill_no_vector(n_head, d, dtype):
    raw, attended = 3 * f32(0, 5, 2 * n_head * d + 7), f32(1, 5, n_head * d)
    raw, attended, out = raw.to(dtype), attended.to(dtype), torch.empty(5, n_head * d, dtype=dtype)
    kernels.gate_heads(as_array(attended), as_array(raw), d, as_array(out), 2)
    gates = raw[:, : 2 * n_head * d].unflatten(1, (n_head, 2, d))[:, :, 1].flatten(1)
    close(out, attended.float() * gates.float().sigmoid())


@pytest.mark.parametrize(("n_head", "n_kv", "d", "half"), [(6, 2, 40, 20), (3, 3, 72, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_over_all_heads(n_head, n_kv, d, half, has_bias):
    """They give what rows give that had the norms before."""
    n_rows, eps, one = 5, np.float32(1e-6), np.ones(5, np.float32)
    sizes = (n_head * d, n_kv * d)
    raw = f32(0, n_rows, sum(sizes) + n_kv * d).numpy()
    norms = [1 + 0.3 * f32(i, n).numpy() for i, n in enumerate(sizes, 1)]
    none = np.empty(0, np.float32)
    biases = [f32(i, n).numpy() if has_bias else none for i, n in enumerate(sizes, 3)]
    angles = f32(5, n_rows, half).numpy()

    def heads(rows, biases, norms):
        counts = n_head, n_kv, n_kv, n_head, n_kv
        outs = tuple(np.empty((n, n_rows, d), np.float32) for n in counts)
        weights, form = HeadWeights(*biases, none, *norms, none), (False, False, d, d)
        turns = np.cos(angles), np.sin(angles)
        kernels.split_heads(rows, weights, eps, *turns, one, form, outs, 2)
        return outs

    normed, first = raw.copy(), 0
    for size, norm, bias in zip(sizes, norms, biases, strict=True):
        part = raw[:, first : first + size] + (bias if has_bias else 0)
        mean = (part.astype(np.float64) ** 2).mean(1, keepdims=True)
        normed[:, first : first + size] = part / np.sqrt(mean + eps) * norm
        first += size
    expected = heads(normed, [none, none], [none, none])
    for found, wanted in zip(heads(raw, biases, norms), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
