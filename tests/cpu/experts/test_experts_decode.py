"""A decode step through experts: against numpy, for one row and several, and bits of each alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numba import njit
from tiny_models import random_rows, tensor_rng

from sparsekv_cli.cpu.experts import decode, routing
from sparsekv_cli.cpu.experts.state import MixtureState
from sparsekv_cli.cpu.layer import choice, products
from sparsekv_cli.cpu.layer.state import LayerState
from sparsekv_cli.cpu.vector.views import view
from sparsekv_cli.cpu.weights import dot, integer, interleaved
from sparsekv_cli.models.experts import ExpertSteps, expert_matrices
from sparsekv_cli.models.gguf.linear import GatedWeights, Linear
from sparsekv_cli.models.layers.expert_params import ExpertParams
from sparsekv_cli.models.layers.expert_weights import ExpertNorms, ExpertWeights

N_EMBD, N_EXPERT, N_USED, SCALE = 96, 6, 3, 0.25


def linear(name: str, n_rows: int, n_columns: int, wtype: str, n: int = 1, repacks: bool = False):
    """A Linear of n matrices and its values, f64 (n, rows, columns)."""
    rows = random_rows(tensor_rng(0, name), wtype, n * n_rows, n_columns, 0.2)
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(n * n_rows, -1)
    code = int(GGMLQuantizationType[wtype])
    values = dot.dequantize(code, data, n_columns).reshape(n, n_rows, n_columns)
    is_repacked = repacks and interleaved.can_repack(code, n_rows)
    if is_repacked:
        packed = np.empty_like(data)
        interleaved.repack(code, data, packed)
        data = packed
    weights = Linear(code, data, n_columns, repacked=is_repacked, n_matrices=n)
    return weights, values.astype(np.float64)


class Mixture:
    """A layer of random experts, its records for ``capacity`` rows, and what numpy says of it."""

    def __init__(
        self, capacity: int, wtype: str = "F32", *, n_ff: int = 64, n_shared: int = 0,
        is_gated: bool = False, normalised: bool = True, repacks: bool = False, n_planes: int = 2,
        has_norms: bool = False,
    ) -> None:  # fmt: skip
        sizes = {"gate": (n_ff, N_EMBD), "up": (n_ff, N_EMBD), "down": (N_EMBD, n_ff)}
        experts = {k: linear(k, *v, wtype, N_EXPERT, repacks) for k, v in sizes.items()}
        router, self.router = linear("router", N_EXPERT, N_EMBD, "F32")
        shared, gate = None, None
        self.experts = [values for _, values in experts.values()]
        self.normalised, self.shared = normalised, None
        if n_shared:
            sizes = {"g": (n_shared, N_EMBD), "u": (n_shared, N_EMBD), "d": (N_EMBD, n_shared)}
            parts = {k: linear(k, *v, wtype, 1, repacks) for k, v in sizes.items()}
            *gate_up, down = (weights for weights, _ in parts.values())
            shared = GatedWeights(tuple(gate_up), down)
            self.shared = [values for _, values in parts.values()]
            if is_gated:
                gate = np.random.default_rng(5).standard_normal(N_EMBD).astype(np.float32)
        self.gate, self.kept = gate, (router, experts, shared)
        params = ExpertParams(N_EXPERT, N_USED, n_ff, n_shared, is_gated, normalised)
        *gate_up, down = (weights for weights, _ in experts.values())
        stacks = GatedWeights(tuple(gate_up), down)
        self.norms, self.scales = None, None
        if has_norms:  # and gate and up are one matrix
            both, values = linear("gate_up", 2 * n_ff, N_EMBD, wtype, N_EXPERT, repacks)
            stacks = GatedWeights((both,), down)
            self.experts[:2] = np.split(values, 2, axis=1)
            drawn = np.random.default_rng(6).uniform(0.5, 2, (5, N_EMBD)).astype(np.float32)
            self.norms, self.scales = ExpertNorms(*drawn[:4]), drawn[4, :N_EXPERT].copy()
        ffn = ExpertWeights(
            params, router, stacks, shared, gate, norms=self.norms, scales=self.scales
        )
        self.kept += (stacks,)
        q, _ = linear("q", 16, N_EMBD, "F32")
        layer: Any = SimpleNamespace(ffn=ffn, attention=lambda: [q] * 4)
        weights: Any = SimpleNamespace(layers=[layer], token_embd=router)
        self.steps = ExpertSteps(weights, capacity, n_planes)
        self.table = expert_matrices(layer, n_planes)
        self.regions = products.matrix_regions([self.table, self.table])
        self.x, self.normed = np.zeros((2, capacity, N_EMBD), np.float32)
        self.quantized = np.zeros((capacity, integer.quantized_stride(N_EMBD)), np.uint8)
        unused, ones = np.zeros((capacity, 1), np.float32), np.ones(N_EMBD, np.float32)
        self.layer = LayerState(
            n_inputs=3, residual_scale=SCALE, matrices=self.table, regions=self.regions, x=self.x,
            normed=self.normed, quantized=self.quantized, attn_norm=ones, ffn_norm=ones,
            q_scale=unused[:, 0].copy(),
            **dict.fromkeys(("cos", "sin", "projected", "packed", "hidden"), unused),
        )  # fmt: skip

    def run(self, normed: np.ndarray, n_threads: int = 2) -> np.ndarray:
        """What a step of these rows adds to x."""
        n_rows = len(normed)
        x = 2 * normed[:, ::-1] if self.norms else 0
        self.x[:n_rows], self.normed[:n_rows] = x, normed
        decode.add_experts(self.layer.at, self.steps.states[0].at, n_rows, n_threads)
        return self.x[:n_rows] - x

    def expected(self, normed: np.ndarray) -> np.ndarray:
        rows = normed.astype(np.float64)
        routed, given, norms = rows, rows, self.norms
        if norms is not None:
            routed, given = (rms(rows[:, ::-1]) * norm for norm in (norms.router, norms.experts))
        out = decode.experts_ref(
            routed, self.router[0], *self.experts, N_USED, self.normalised, given=given,
            scale=self.scales,
        )  # fmt: skip
        out = out if norms is None else rms(out) * norms.after
        if self.shared is not None:
            one = np.zeros((1, N_EMBD))  # a router of one expert that all rows take
            shared = decode.experts_ref(rows, one, *self.shared, 1, True)
            gate = 1 if self.gate is None else 1 / (1 + np.exp(-(rows @ self.gate)))[:, None]
            shared = shared if norms is None else rms(shared) * norms.shared
            out = out + gate * shared
        return SCALE * out


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(1, keepdims=True))


def rows(n: int) -> np.ndarray:
    """Rows of which some choose the same experts."""
    rng = np.random.default_rng(n)
    base = rng.standard_normal((1, N_EMBD))
    return (base + 0.5 * rng.standard_normal((n, N_EMBD))).astype(np.float32)


@pytest.mark.parametrize("n_rows", [1, 2, 7])
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(
    ("wtype", "options"),
    [
        ("F32", {"n_ff": 33, "normalised": False}),
        ("F16", {"n_shared": 50}),
        ("Q8_0", {"n_shared": 160, "is_gated": True}),
        ("Q4_1", {"n_shared": 32, "is_gated": True, "repacks": True}),
        ("Q4_0", {"n_planes": 1}),
        ("Q8_0", {"n_shared": 64, "has_norms": True, "repacks": True}),
    ],
)
def test_against_numpy(wtype, options, n_threads, n_rows):
    mixture, normed = Mixture(8, wtype, **options), rows(n_rows)
    found, expected = mixture.run(normed, n_threads), mixture.expected(normed)
    limit = 3e-2 if options.get("n_planes") == 1 else 1e-3
    np.testing.assert_allclose(found, expected, atol=limit * np.abs(expected).max())


@pytest.mark.parametrize("wtype", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("repacks", [False, True])
def test_a_row_has_the_same_bits_whatever_the_others_are(wtype, repacks):
    mixture = Mixture(7, wtype, n_shared=32, repacks=repacks)
    normed = rows(7)
    normed[3] = normed[0]
    expected = np.concatenate([mixture.run(row[None], 1) for row in normed])
    for n_threads in (1, 2, 3):
        np.testing.assert_array_equal(mixture.run(normed, n_threads), expected)


@njit
def set_jobs(at, mixture_at, offsets, rows, n_rows, jobs):
    layer, mixture = view(LayerState, at), view(MixtureState, mixture_at)
    given = layer.normed.ctypes.data, layer.quantized.ctypes.data
    return decode.gate_and_up(layer, mixture, given, offsets, rows, n_rows, jobs)


def test_weights_of_an_expert_are_read_once_for_all_rows():
    """Rows that choose the same experts make no more jobs than one of them."""
    mixture = Mixture(4, "Q8_0")
    at, mixture_at = mixture.layer.at, mixture.steps.states[0].at
    for n_rows in (1, 4):
        jobs = np.zeros((2 * N_EXPERT, products.N_COLUMNS), np.int64)
        chosen = np.array([[2, 0, 5]] * n_rows)
        offsets, taken, _ = routing.group_ref(chosen, N_EXPERT)
        n = set_jobs(at, mixture_at, offsets, taken, n_rows, jobs)
        assert n == 2 * N_USED
        np.testing.assert_array_equal(jobs[:n, products.N_INPUTS], n_rows)


@pytest.mark.parametrize("n_threads", [1, 2, 5, 64])
def test_jobs_are_shared_out_to_the_last_row(n_threads):
    """Jobs of any length, one of them of several inputs, some of no whole group of rows."""
    parts = [linear(str(n), n, 64, "F32") for n in (5, 16, 33, 1)]
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    counts, jobs = (1, 3, 2, 1), np.zeros((4, products.N_COLUMNS), np.int64)
    table = choice.matrix_table([weights for weights, _ in parts], 2)
    outs = [
        np.full((n, len(w[0])), np.nan, np.float32) for n, (_, w) in zip(counts, parts, strict=True)
    ]
    for job, matrix, n, out in zip(jobs, table, counts, outs, strict=True):
        job[: products.SOURCE] = matrix
        job[products.SOURCE :] = dot.address(x), x.strides[0], n, dot.address(out), out.strides[0]
    products.run_jobs(jobs, n_threads)
    for n, out, (_, values) in zip(counts, outs, parts, strict=True):
        np.testing.assert_allclose(out, x[:n] @ values[0].T, atol=1e-4)
