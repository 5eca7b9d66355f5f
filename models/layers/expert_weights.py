"""The tensors of a layer's experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.gguf.linear import GatedWeights, Linear
from sparsekv_cli.models.gguf.tensors import TensorReader
from sparsekv_cli.models.layers.expert_params import ExpertParams


@dataclass(frozen=True)
class ExpertNorms:
    """Weights f32 (n_embd,) of Gemma 4's RMS norms around experts and shared feed-forward."""

    router: np.ndarray  # norm of the router's input
    experts: np.ndarray  # norm of the experts' input
    after: np.ndarray  # norm of the experts' sum
    shared: np.ndarray  # norm of the shared feed-forward's output


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a router and its experts (models/experts.py)."""

    params: ExpertParams
    router: Linear  # (experts, n_embd)
    experts: GatedWeights  # one Linear holds the matrices of all experts
    shared: GatedWeights | None  # the expert that all tokens use
    # w f32 (n_embd,): ``shared`` has the weight sigmoid(w x); None: weight 1
    shared_gate: np.ndarray | None
    # f32 (experts, 2 n_ff) of gate and up, and (experts, n_embd) of down
    biases: tuple[np.ndarray, np.ndarray] | None = None
    choice_bias: np.ndarray | None = None  # f32 (experts,), see Mixture
    norms: ExpertNorms | None = None  # None: the layer's norms
    scales: np.ndarray | None = None  # f32 (experts,): factors of the outputs

    def linears(self) -> tuple[Linear, ...]:
        """Returns the matrices that may be repacked: all except the router's."""
        shared = () if self.shared is None else self.shared.linears()
        return (*self.experts.linears(), *shared)

    def bytes_a_step(self, n_rows: int) -> int:
        """Returns the expected bytes that a step of n_rows reads.

        A step reads each chosen expert once. The rows are assumed to choose independently.
        """
        left_out = (1 - self.params.n_expert_used / self.params.n_expert) ** n_rows
        shared = 0 if self.shared is None else self.shared.n_bytes
        return self.router.data.nbytes + round((1 - left_out) * self.experts.n_bytes) + shared

    def mapped(self, change: Callable[[Linear], Linear]) -> ExpertWeights:
        shared = None if self.shared is None else self.shared.mapped(change)
        return replace(self, experts=self.experts.mapped(change), shared=shared)


def read_mixture(
    reader: TensorReader, at: str, n_embd: int, params: ExpertParams, architecture: Architecture
) -> ExpertWeights:
    """Returns the router and experts of a layer whose tensor names begin with ``at``."""
    has_biases = architecture.mixture is not None and architecture.mixture.biases
    prefix, tensors = f"{at}ffn_", reader.file.tensors
    old = f"{prefix}gate.0.weight"
    if old in tensors:
        raise SparseKVError(
            f"{reader.file.path}: tensor {old}: its experts are separate tensors, an old form of "
            "such files; convert or download the model again"
        )
    n_expert, n_ff, n_shared = params.n_expert, params.n_ff_expert, params.n_ff_shared
    down = reader.stack(f"{prefix}down_exps", n_expert, n_embd, n_ff)
    if params.normed and f"{prefix}gate_up_exps.weight" in tensors:
        parts = {"gate_up": 2 * n_ff}
    else:
        parts = dict.fromkeys(architecture.gate_up, n_ff)
    gate_up = (reader.stack(f"{prefix}{x}_exps", n_expert, n, n_embd) for x, n in parts.items())
    experts = GatedWeights(tuple(gate_up), down)
    biases = None
    if has_biases:
        sizes = (("gate", n_ff), ("up", n_ff), ("down", n_embd))
        of_gate, of_up, of_down = (
            reader.table(f"{prefix}{name}_exps.bias", n_expert, n) for name, n in sizes
        )
        biases = np.concatenate([of_gate, of_up], axis=1), of_down
    shared_gate, suffix = f"{prefix}gate_inp_shexp.weight", "" if params.normed else "_shexp"
    scales = f"{prefix}down_exps.scale"
    factors = np.full(n_expert, params.scale, np.float32) if params.scale != 1.0 else None
    return ExpertWeights(
        params=params,
        router=reader.linear(f"{prefix}gate_inp", n_expert, n_embd, bias=has_biases or None),
        experts=experts,
        shared=reader.gated(at, architecture.gate_up, n_embd, n_shared, suffix)
        if n_shared
        else None,
        shared_gate=reader.table(shared_gate, n_embd) if params.shared_gate else None,
        biases=biases,
        choice_bias=reader.vector(f"{at}exp_probs_b.bias", n_expert, params.choice_bias == "needed")
        if params.choice_bias
        else None,
        norms=_read_norms(reader, at, n_embd) if params.normed else None,
        scales=reader.vector(scales, n_expert, required=False) if params.normed else factors,
    )


def _read_norms(reader: TensorReader, at: str, n_embd: int) -> ExpertNorms:
    """Reads the norms. The router's weight is the file's scale divided by sqrt(n_embd)."""
    scale = reader.floats(f"{at}ffn_gate_inp.scale", (n_embd,))
    experts, after, shared = (
        reader.floats(f"{at}{name}.weight", (n_embd,))
        for name in ("pre_ffw_norm_2", "post_ffw_norm_2", "post_ffw_norm_1")
    )
    return ExpertNorms(scale / np.float32(np.sqrt(n_embd)), experts, after, shared)
