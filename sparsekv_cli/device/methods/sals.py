"""SALS on a device (methods/sals.py): latents and packed values are the only copy of old rows.

While budget, sinks and window cover the context, and during a prefill, K and V lie whole in
``store``. Otherwise every row has a latent and packed values, which are written when the row comes.
The sinks and the last rows also have exact copies. The copies of the last rows lie in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparsekv_cli.cache.spec import AttnInput, LayerSpec, Memory
from sparsekv_cli.cpu.sals.queries import ROPE_BLOCK, damping
from sparsekv_cli.device.cache import CachePlan, DeviceCache, DeviceInput, attend_all, count_dense
from sparsekv_cli.device.layers.store import DeviceStore
from sparsekv_cli.kernels.attention import decode as attention
from sparsekv_cli.kernels.attention import select
from sparsekv_cli.kernels.attention.merge import merge
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.sals import attention as latent_attention
from sparsekv_cli.kernels.sals import latent, scores
from sparsekv_cli.kernels.weights import dot
from sparsekv_cli.kernels.weights.packed import PackedMatrix

ENCODED_AT_ONCE = 4096  # rows that are encoded or reconstructed at a time


class _Start(NamedTuple):
    """The contents of a cache at the end of a prefill of n rows.

    exact: copies of the exact keys and values; None while all rows are in ``store``. rows: all
    rows, if later steps have compressed them.
    """

    n: int
    ring_from: int = 0
    exact: tuple[torch.Tensor, torch.Tensor] | None = None
    rows: DeviceStore | None = None


class _Matrices(NamedTuple):
    """The matrices that all sequences share. score: a part of the basis as a matrix of products."""

    basis: latent.DeviceBasis
    score: PackedMatrix
    damp: torch.Tensor


class DeviceSALS(DeviceCache):
    """Latents, packed values, exact rows and basis of one layer. method: methods/sals.py SALS."""

    takes_softcap = False

    def __init__(self, spec: LayerSpec, device: torch.device, method: Any) -> None:
        super().__init__(spec, device, method)
        self._rank, self._score_rank = method.ranks(spec)
        self._made: _Matrices | None = None
        self._first = method.sinks if method.exact_sinks else 0
        self._ring = method.window + method.undo
        self._announced = 0  # the number of rows that ``reserve`` announced
        self._forget()

    @property
    def _matrices(self) -> _Matrices:
        """This layer's matrices, made when they are first needed."""
        if self._made is None:
            spec, damp = self.spec, damping(self.spec.theta, ROPE_BLOCK) * self.spec.rope_scale
            vectors, weights = self.method.basis_of(spec)
            basis = latent.make_basis(
                vectors, weights, spec.theta, spec.rope_scale, spec.n_head_kv, self.device
            )
            size = spec.n_head_kv * spec.head_dim
            self._made = _Matrices(
                basis,
                PackedMatrix("F16", self._score_rank, size, basis.decode[: self._score_rank]),
                torch.from_numpy(damp.astype("f4")).to(self.device),
            )
        return self._made

    @property
    def _basis(self) -> latent.DeviceBasis:
        return self._matrices.basis

    def share_constants(self, other: DeviceSALS) -> None:
        self._made = other._matrices

    def _forget(self) -> None:
        """Drops all rows, in every form."""
        self.store = DeviceStore(self.spec, self.device)
        self._is_compressed = False
        self._latents, self._values = self._empty_latents(0)
        self._exact: latent.Exact | None = None
        self._n = 0  # rows in latents
        self._ring_from = 0  # position of the oldest row in the ring
        self._start = _Start(0)

    @property
    def n(self) -> int:
        return max(self.store.n, self._n)

    def reserve(self, n: int) -> None:
        self._announced = n
        if not self._is_compressed:
            super().reserve(n)

    # --- from rows to latents, and back for a later prefill ---------------------------------------

    def extend(self, x: AttnInput) -> Any:
        if self._is_compressed and self.store.n == 0:
            self._restore(max(self._n + x.k.shape[1], self._announced))
        return super().extend(x)

    def finish_prefill(self) -> None:
        if self._is_compressed or not self.method.is_dense_at(self.store.n):
            self._compress()
        self._start = _Start(self.n)
        if self._exact is not None:
            exact = self._exact.k.clone(), self._exact.v.clone()
            self._start = _Start(self.n, self._ring_from, exact)

    def _empty_latents(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns room for the latents f16 (1, n, r) and values uint8 (1, n, G, head bytes)."""
        size = latent.head_bytes(self.spec.value_dim, self.method.bits)
        latents = torch.zeros(1, n, self._rank, dtype=torch.float16, device=self.device)
        shape = (1, n, self.spec.n_head_kv, size)
        return latents, torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def _reserve_latents(self, n: int) -> None:
        """Makes room for ``n`` rows. If it has to grow, it grows by at least a sixteenth."""
        capacity = self._latents.shape[1]
        if n <= capacity:
            return
        if self._n:
            n = max(n, capacity + capacity // 16 + 256)
        grown = self._empty_latents(n)
        for new, old in zip(grown, (self._latents, self._values), strict=True):
            new[:, : self._n] = old[:, : self._n]
        self._latents, self._values = grown

    def _compress(self) -> None:
        """Moves the rows of ``store`` to latents and exact rows. It keeps existing latents."""
        store, n, first = self.store, self.store.n, self._first
        if self._exact is None:
            sizes = self.spec.head_dim, self.spec.value_dim
            self._exact = latent.empty_exact(
                1, self.spec.n_head_kv, sizes, first, self.method.window, self._ring, self.device
            )
            self._ring_from = first
        self._reserve_latents(self.bound(max(n + 1, self._announced)))
        for start in range(self._n, n, ENCODED_AT_ONCE):
            rows = slice(start, min(n, start + ENCODED_AT_ONCE))
            at = torch.arange(rows.start, rows.stop, device=self.device)
            self._latents[0, rows] = latent.encode_rows(store.k[0, :, rows], at, self._basis)
            values = store.v[0, :, rows].transpose(0, 1)  # (rows, G, d_v)
            self._values[0, rows] = latent.quantize_values(values, self.method.bits)
        self.ledger.counts["rows_encoded"] += n - self._n
        self._ring_from = max(self._ring_from, n - self._ring)
        slots = self._slots(self._ring_from, n)
        for target, source in ((self._exact.k, store.k), (self._exact.v, store.v)):
            target[:, :, :first] = source[:, :, :first]
            target[:, :, slots] = source[:, :, self._ring_from : n]
        self._exact.floor.fill_(self._ring_from)
        self._n, self.store = n, DeviceStore(self.spec, self.device)
        self._is_compressed = True

    def _slots(self, start: int, stop: int) -> torch.Tensor:
        """Returns the slots of the positions start .. stop in the ring."""
        return self._first + torch.arange(start, stop, device=self.device) % self._ring

    def _restore(self, room: int) -> None:
        """Fills ``store`` with all rows: exact ones as they are, the others reconstructed."""
        n, first, exact = self._n, self._first, self._exact
        assert exact is not None
        store = DeviceStore(self.spec, self.device)
        store.reserve(room)
        for start in range(first, n, ENCODED_AT_ONCE):
            rows = slice(start, min(n, start + ENCODED_AT_ONCE))
            at = torch.arange(rows.start, rows.stop, device=self.device)
            store.k[0, :, rows] = latent.reconstruct_rows(self._latents[0, rows], at, self._basis)
            values = latent.dequantize_values(
                self._values[0, rows], self.spec.value_dim, self.method.bits
            )
            store.v[0, :, rows] = values.transpose(0, 1)
        # The ring may also have older exact rows, one for each step.
        exact_from = self._exact_from(n)
        slots = self._slots(exact_from, n)
        for target, source in ((store.k, exact.k), (store.v, exact.v)):
            target[:, :, :first] = source[:, :, :first]
            target[:, :, exact_from:n] = source[:, :, slots]
        store.n, self.store = n, store
        self.ledger.counts["rows_restored"] += n - first

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        self._n_max = n_max
        if not self._is_compressed and self.method.is_dense_at(n):
            until = n_max if self.method.is_dense_at(n_max) else n
            return CachePlan(("dense", super().begin_step(n, n_max).key), until)
        if not self._is_compressed:
            self._start = self._start._replace(rows=self.store.copy(self._start.n))
            self._compress()
        self._reserve_latents(n_max)
        start = self._exact_from(n)
        self._n_back = max(0, start - max(self._first, n - self.method.window))
        self._n_front = self.method.sinks - self._first
        self._k_max = self.method.budget.rows(n_max) + self._n_back
        return CachePlan(
            ("latents", n_max, self._n_back, self._k_max), n if self._n_back else n_max
        )

    def tensors(self) -> list[torch.Tensor]:
        if not self._is_compressed:
            return super().tensors()
        assert self._exact is not None
        return [self._latents, self._values, *self._exact]

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        if not self._is_compressed:
            super().replace_tensors(tensors)
            return
        self._latents, self._values, *exact = tensors
        self._exact = latent.Exact(*exact)

    def _exact_from(self, n: int) -> int:
        """Returns the position of the first row after the latents, at ``n`` rows."""
        return max(n - self.method.window, self._ring_from, self._first)

    def decode(self, x: Any, out: torch.Tensor | None = None) -> Any:
        spec, step = self.spec, x.step
        tensors = self.batch_tensors(len(x.q))
        self.attended = None
        if not self._is_compressed:
            k, v = tensors
            return attend_all(x, k, v, self._n_max, self.softmax, out)
        latents, values, *parts = tensors
        exact, basis, bits = latent.Exact(*parts), self._basis, self.method.bits
        latent.append_latent(
            x.k_nope, NewRow(x.k, x.v), step.pos, step.budget, latents, values, exact, basis, bits,
            self._first, self.method.window, self._n_back,
        )  # fmt: skip
        n_row, n_kv, m = len(x.q), spec.n_head_kv, self._n_front + self._k_max
        n_exact = attention.count_splits(
            n_row, n_kv, spec.head_dim, spec.value_dim, exact.listed.shape[2]
        )
        pieces = latent_attention.empty_pieces(
            n_row, spec.n_head, n_kv, spec.value_dim, m, n_exact, self.device
        )
        of_exact = attention.AttendScratch(*(part[-n_exact:] for part in pieces))
        attention.attend_pieces(
            x.q, exact.k, exact.v, exact.listed, exact.counts, self.softmax, of_exact
        )
        tops = select.empty_tops(n_row, 1, self._n_max, self._k_max, self.device)
        importance = self._importance(x, latents, exact, of_exact.lse, tops)
        idx, counts = self._choose(importance, exact, tops)
        if self.records_attended:
            self._note_positions(idx, counts, int(step.n[0]))
        latent_attention.attend_latents(
            x.q, idx, counts, latents, values, basis, bits, spec.value_dim, self.softmax.scale,
            self._first, pieces,
        )  # fmt: skip
        return merge(*pieces, out)

    def _note_positions(self, idx: torch.Tensor, counts: torch.Tensor, n: int) -> None:
        """Does ``keep_attended`` for chosen latents and exact rows, at n rows of a sequence."""
        exact = [*range(min(self._first, n)), *range(self._exact_from(n), n)]
        rows = torch.tensor([[exact]], dtype=torch.int32, device=self.device)
        self.keep_attended(torch.cat([rows, idx + self._first], dim=2), counts + len(exact))

    def _importance(
        self,
        x: DeviceInput,
        latents: torch.Tensor,
        exact: latent.Exact,
        exact_lse: torch.Tensor,
        tops: select.GroupTops | None,
    ) -> torch.Tensor:
        """Returns the scores by which latents are chosen, f32 (B, 1, n_max); fills ``tops``."""
        if self.method.score == "brope":
            return scores.score_latents(
                x.q, self._matrices.damp, self._basis, latents, self._score_rank, exact.n_latent,
                self._n_max, float(self.spec.scale), self._first, exact_lse, x.step.arrived, tops,
            )  # fmt: skip
        summed = x.q_nope.unflatten(1, (self.spec.n_head_kv, -1)).sum(2).flatten(1)  # (B, G d)
        query = dot.multiply(self._matrices.score, summed)
        return scores.score_summed(query, latents, exact.n_latent, self._n_max, self._first, tops)

    def _choose(
        self, importance: torch.Tensor, exact: latent.Exact, tops: select.GroupTops | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the chosen latents, counted from the first: idx int32 (B, 1, m), and counts."""
        return select.select_largest(
            importance, exact.n_latent, self._n_max, exact.k_latent, self._k_max, self._n_front,
            self._n_back, tops=tops,
        )  # fmt: skip

    def end_step(self, n: int) -> None:
        if not self._is_compressed:
            self.store.n = n
            count_dense(self, n, sparse=True)
            return
        spec, method, counts = self.spec, self.method, self.ledger.counts
        start = self._exact_from(n)
        n_latent, n_exact = start - self._first, min(self._first, n) + n - start
        self._n, self._ring_from = n, max(self._ring_from, n - self._ring)
        wanted = min(self._n_front, n_latent) + self._n_back + method.budget.rows(n)
        chosen = min(n_latent, wanted)
        counts["rows_encoded"] += 1
        counts["rows_reconstructed"] += chosen
        n_bytes = n_latent * 2 * self._score_rank
        n_bytes += chosen * (2 * self._rank + self._values[0, 0].nbytes)
        n_bytes += n_exact * spec.n_head_kv * 2 * (spec.head_dim + spec.value_dim)
        n_bytes += self._basis.nbytes
        scored = n_latent * (spec.n_head if method.score == "brope" else 1)
        attended = spec.n_head * (n_exact + chosen)
        self.ledger.step(spec.n_head * n, scored, attended, n_bytes, True)

    def truncate(self, n: int) -> int:
        """Also goes back a few rows, while the rows of the earlier window are still exact."""
        start = self._start
        if not self._is_compressed:
            self._start = start._replace(n=min(start.n, n))
            return super().truncate(n)
        self.store = DeviceStore(self.spec, self.device)  # drops an interrupted prefill
        if n >= self._n:
            return self._n
        if 0 < n == start.n:
            self._restart(start)
            return n
        if self.method.is_dense_at(n) or self._ring_from > max(n - self.method.window, self._first):
            return 0
        if n < start.n:
            self._start = _Start(0)
        self._n = n
        return n

    def _restart(self, start: _Start) -> None:
        """Goes back to the end of the last prefill."""
        if start.rows is not None:
            self._forget()
            self.store, self._start = start.rows, start._replace(rows=None)
            return
        assert self._exact is not None and start.exact is not None
        self._exact.k.copy_(start.exact[0])
        self._exact.v.copy_(start.exact[1])
        self._n, self._ring_from = start.n, start.ring_from
        self._exact.floor.fill_(self._ring_from)

    def memory(self) -> Memory:
        """Returns the rows in every form. ``index`` is E and D, which sequences share."""
        parts = [self._latents, self._values]
        if self._exact is not None:
            parts += [self._exact.k, self._exact.v]
        parts += self._start.exact or ()
        rows = self.store.nbytes + sum(part.nbytes for part in parts)
        rows += self._start.rows.nbytes if self._start.rows is not None else 0
        return Memory(device=rows, index=self._basis.nbytes)
