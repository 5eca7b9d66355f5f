"""A layer's experts on a device: the kernels of a decode step, and torch's products of a prefill.

A pair is a row and one of its experts. A step multiplies each pair by the packed matrix of its
expert. A prefill orders its pairs by expert, and multiplies all rows of an expert at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from sparsekv_cli.device.layers.rows import DeviceRows
from sparsekv_cli.device.layers.stack import GatedStacks, Stack
from sparsekv_cli.kernels.experts.routing import Routing, Shared, add_biases, mix, route
from sparsekv_cli.kernels.weights import dot
from sparsekv_cli.kernels.weights.matvec import PairChoice
from sparsekv_cli.kernels.weights.packed import PackedMatrix

Products = Mapping[str, Any]  # by name: a product of a shared expert, or matrices (E, rows, n)


class ExpertStack:
    """Matrices of E experts that share an input: each expert's rows are stacked.

    parts: each has the matrices of all experts, one after another.
    """

    def __init__(self, parts: Sequence[PackedMatrix], n_expert: int) -> None:
        self.parts, self.n_expert = tuple(parts), n_expert
        self.n_rows = sum(part.n_rows for part in parts) // n_expert  # of an expert

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def apply(self, x: torch.Tensor, chosen: torch.Tensor, n_choice: int) -> torch.Tensor:
        """Returns the products of pairs, f32 (pairs, rows); x f32 (vectors, columns)."""
        choice = PairChoice(chosen, n_choice, self.n_expert)
        out = torch.empty(len(chosen), self.n_rows, dtype=torch.float32, device=x.device)
        at = 0
        for part in self.parts:
            n_rows = part.n_rows // self.n_expert
            dot.multiply_chosen(part, x, choice, out[:, at : at + n_rows])
            at += n_rows
        return out

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrices (E, rows, columns) in ``dtype``."""
        each = [Stack([part]).dense(dtype).unflatten(0, (self.n_expert, -1)) for part in self.parts]
        return each[0] if len(each) == 1 else torch.cat(each, dim=1)


@dataclass(frozen=True)
class DeviceExperts:
    """A router and its experts.

    router: f32 (E, n_embd). With a gate of the shared expert, its vector is row E. biases: f32 (E,
    rows) of gate_up, and (E, n_embd) of down, or None. shared: the expert that all rows use, or
    None.
    """

    router: torch.Tensor
    routing: Routing
    gate_up: ExpertStack
    down: ExpertStack
    biases: tuple[torch.Tensor, torch.Tensor] | None
    shared: GatedStacks | None
    norms: Any = None  # an ExpertNorms of tensors; None: the layer's norm

    @property
    def nbytes(self) -> int:
        of_shared = 0 if self.shared is None else self.shared.nbytes
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes + of_shared

    def step(
        self, x: torch.Tensor, normed: torch.Tensor, rows: DeviceRows, out: torch.Tensor
    ) -> None:
        """See ``GatedStacks``."""
        router_input, given = normed, normed
        if self.norms is not None:
            router_input = rows.last_norm(x, self.norms.router)
            given = rows.last_norm(x, self.norms.experts)
        logits, chosen, weights = self._route(router_input)
        pairs = chosen.flatten()
        hidden = self.gate_up.apply(given, pairs, chosen.shape[1])
        of_results = self._add_biases(hidden, pairs)
        results = self.down.apply(rows.gate(hidden), pairs, 1)
        of_all = None
        if self.shared is not None:
            of_all = torch.empty_like(out)
            self.shared.step(x, normed, rows, of_all)
        self._mix(results, chosen, weights, logits, of_all, rows, bias=of_results, out=out)

    def dense(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns what ``prefill`` multiplies by, in the prefill's type."""
        made: dict[str, Any] = {
            "gate_up": self.gate_up.dense(dtype),
            "down": self.down.dense(dtype),
        }
        if self.shared is not None:
            of_shared = self.shared.dense(dtype)
            made |= {f"shared_{name}": product for name, product in of_shared.items()}
        return made

    def prefill(
        self, x: torch.Tensor, norm: torch.Tensor | None, products: Products, rows: DeviceRows
    ) -> torch.Tensor:
        """Returns the output f32 (T, n_embd) for rows x f32 (T, n_embd). norm: of the layer."""
        of_router, of_experts = norm, norm
        if self.norms is not None:
            of_router, of_experts = self.norms.router, self.norms.experts
        logits, chosen, weights = self._route(rows.last_norm(x, of_router))
        given, pairs, n_used = rows.norm(x, of_experts), chosen.flatten(), chosen.shape[1]
        order = torch.argsort(pairs, stable=True)
        places = torch.empty_like(pairs)
        places[order] = torch.arange(len(pairs), dtype=torch.int32, device=pairs.device)
        ends = torch.bincount(pairs, minlength=self.gate_up.n_expert).cumsum(0).tolist()
        hidden = _grouped(given[order // n_used], products["gate_up"], ends)
        of_results = self._add_biases(hidden, pairs[order])
        results = _grouped(rows.gate(hidden), products["down"], ends)
        of_all = None
        if self.shared is not None:
            normed = given if self.norms is None else rows.norm(x, norm)
            of_all = products["shared_down"](rows.gate(products["shared_gate_up"](normed)))
        return self._mix(
            results, chosen, weights, logits, of_all, rows, bias=of_results,
            places=places.view_as(chosen),
        )  # fmt: skip

    def _route(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns all products of the router, and each row's experts and weights."""
        logits = linear(normed, self.router)
        return logits, *route(logits[:, : self.gate_up.n_expert], self.routing)

    def _add_biases(self, hidden: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor | None:
        """Adds the biases of gate and up in place. Returns those of down."""
        if self.biases is None:
            return None
        add_biases(hidden, pairs, self.biases[0])
        return self.biases[1]

    def _mix(
        self,
        results: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        logits: torch.Tensor,
        of_all: torch.Tensor | None,
        rows: DeviceRows,
        **options: Any,
    ) -> torch.Tensor:
        """Returns the sum of the experts' results and of the shared one's output, ``of_all``."""
        n_expert = self.gate_up.n_expert
        shared = None
        if of_all is not None and self.norms is None:
            shared = Shared(of_all, logits[:, n_expert] if logits.shape[1] > n_expert else None)
        out = mix(results, chosen, weights, shared=shared, **options)
        if self.norms is not None:
            rows.join_normed(out, self.norms.after, of_all, self.norms.shared)
        return out


def _grouped(x: torch.Tensor, matrices: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Returns the product of rows x (pairs, n), ordered by expert, with (E, rows, n).

    ends: for each expert the number of pairs up to its last.
    """
    out = torch.empty(len(x), matrices.shape[1], dtype=x.dtype, device=x.device)
    first = 0
    for matrix, end in zip(matrices, ends, strict=True):
        if end > first:
            torch.mm(x[first:end], matrix.T, out=out[first:end])
        first = end
    return out
