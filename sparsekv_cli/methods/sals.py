"""SALS: "Sparse Attention in Latent Space for KV Cache Compression" (Mu et al.).

The pre-RoPE keys of all kv heads of a token become one latent of rank r. Values become 4 or 2 bits.
A step scores the first r* columns of all latents. It reconstructs the best rows and rotates their
keys to their positions. It attends to these rows, to the sinks and to the recent, exact window.

| paper | here |
|---|---|
| section 4.2, C = K'K, its eigenvectors U | calibration/sals.py; cpu/sals/latent.py encode_rows |
| section 5.1, quantised values | cpu/sals/values.py |
| section 4.3, s_j = q~[:r*] . k~_j[:r*] | cpu/sals/scores.py importance, queries.py summed_query |
| Algorithm 1 lines 5 to 7, top-k, reconstruction, RoPE | select_largest, reconstruct_rows |
| eq 5, softmax over the selected rows | cpu/sals/step.py sals_step |

Departures; docs/methods.md has their reasons and figures:
(1) ``basis=diag`` weighs each RoPE pair of a kv head by its queries: weights commute with RoPE.
(2) ``score=brope``: latents are scored in blocks of 128 tokens, by bytes, with queries rotated to
    the block's distance. Each head has a softmax, which is summed over heads. The sums include the
    exact rows and a quarter of the latents.
(3) Sinks stay exact (``exact_sinks``).
(4) Values are quantised per token in groups of 32 channels.
(5) The window is exact, not half compressed.
(6) While budget, sinks and window cover the context, nothing is compressed.
(7) Layers have ranks of their own, with the same sum (``allocation``).
(8) For a later prefill all latents are reconstructed, so that it attends to all rows. They stay.
(9) Rows that a step chooses again are not made again. ``preset=paper`` undoes 1 to 3 and 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import LayerCache, rows_alike
from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.calibration.allocation import layer_count
from sparsekv_cli.calibration.run import CALIBRATION, CalibrationArray, CalibrationRun
from sparsekv_cli.calibration.sals import BASES, SHARES, arrays_of_keys, study_keys
from sparsekv_cli.cpu.attention import decode as attention
from sparsekv_cli.cpu.sals import latent, queries
from sparsekv_cli.cpu.sals.state import SALSState
from sparsekv_cli.cpu.sals.step import run_thread, sals_step
from sparsekv_cli.cpu.sals.values import BITS
from sparsekv_cli.cpu.vector.run import KernelStep
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import DENSE_HELP, Method
from sparsekv_cli.settings.option import option

SINKS, WINDOW = 16, 64  # rows that stay exact
SPARE = 16  # reconstructed rows that are kept in addition to the chosen ones
UNDO = 16  # rows by which a sequence can always go back, as after an interrupted step


@dataclass(frozen=True)
class SALS(Method):
    """Options of SALS; symbols as in the paper."""

    paper: ClassVar[str] = "SALS: Sparse Attention in Latent Space (Mu et al., 2025)"
    description: ClassVar[str] = "low-rank keys and 4-bit values, scored as latents"
    use: ClassVar[str] = (
        "long contexts in two fifths of the memory; it misses a few of many similar keys"
    )
    holds_all_rows: ClassVar[bool] = False
    needs: ClassVar[str] = CALIBRATION
    cache_types: ClassVar[tuple[str, ...]] = ("f16",)
    needs_values: ClassVar[str] = "its rows are latent already, and it would store V apart"
    device_cache: ClassVar[str] = "sals:DeviceSALS"
    undo: ClassVar[int] = UNDO
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tuned": {},
        "paper": {"basis": "pca", "score": "paper", "exact_sinks": False, "allocation": "uniform"},
    }

    dense_layers: tuple[int, ...] = option((0, 1, -1), DENSE_HELP)
    preset: str = option("tuned", "a set of values; -o overrides them", choices=tuple(presets))
    budget: Budget = option(Budget(tokens=432), "y: critical tokens: N or P%")
    rank: int = option(
        0, "r: columns of a latent, on average; 0 = 1/4 of all kv heads' dims", at_least=0
    )
    score_rank: int = option(0, "r*: columns that are scored; 0 = half the rank", at_least=0)
    allocation: str = option(
        "layers", "rank of each layer: by calibration, or uniform", choices=("layers", "uniform")
    )
    bits: int = option(4, "bits of a value; 16 is f16", choices=BITS)
    basis: str = option("diag", "basis; diag: keys are weighted by queries", choices=BASES)
    score: str = option(
        "brope", "brope: RoPE by blocks, for each head; paper: no RoPE, heads summed",
        choices=("brope", "paper"),
    )  # fmt: skip
    sinks: int = option(SINKS, "x: first tokens, always attended", at_least=0)
    exact_sinks: bool = option(True, "whether the sinks are kept as they are")
    window: int = option(WINDOW, "z: last tokens, always attended and kept as they are", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank and self.score_rank > self.rank:
            raise ValueError(f"score_rank = {self.score_rank}: must be at most the rank")

    def ranks(self, spec: LayerSpec) -> tuple[int, int]:
        """Returns (r, r*): the columns of a layer's latents, and how many of them are scored."""
        size = spec.n_head_kv * spec.head_dim
        rank = min(self.rank or max(1, round(size / 4)), size)
        if self.allocation == "layers":
            rank = layer_count(rank, size, _calibrated(spec, "rank_budget"), SHARES)
        return rank, min(self.score_rank or -(-rank // 2), rank)

    def basis_of(self, spec: LayerSpec) -> tuple[np.ndarray, np.ndarray]:
        """Returns U (G d, r) and weights w (G d,) of the calibration. The encoder is E = w U."""
        size = spec.n_head_kv * spec.head_dim
        weights = _calibrated(spec, "weights")[:size]
        if not (weights > 0).all():
            raise SparseKVError(
                f"calibration of sals: layer {spec.layer} has weights that are not positive; make "
                "a new one: `sparsekv-cli calibrate -m MODEL --method sals`"
            )
        vectors = _calibrated(spec, f"vectors_{self.basis}")[:size, : self.ranks(spec)[0]]
        return vectors, weights if self.basis == "diag" else np.ones_like(weights)

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return SALSCache(spec, self)

    def is_dense_at(self, n: int) -> bool:
        """Returns whether sinks, window and budget together cover a context of n rows."""
        return n <= self.sinks + self.window + self.budget.rows(n)

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """Returns both bases of every layer and the loss of each rank, for any options."""
        return study_keys(run, SALS().is_dense, SINKS, WINDOW)

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
        return arrays_of_keys(specs)


def _calibrated(spec: LayerSpec, name: str) -> np.ndarray:
    if name not in spec.calibration:
        raise SparseKVError(f"sals: layer {spec.layer} has no calibration")
    return spec.calibration[name]


class _Start(NamedTuple):
    """The state of a cache at the end of a prefill of n rows, to which ``truncate`` can go back."""

    n: int
    n_latent: int | None = None  # number of latents; None: the cache's ``store`` has all n rows
    ring_from: int = 0
    rows: KVStore | None = None  # a copy of the exact rows; None: they still lie in ``store``


NO_START = _Start(0)


class _Before(NamedTuple):
    """The fields of SALSCache before a step on latents.

    exact: K and V in the slot of the ring that the step overwrites. made: K and V of ``rows``.
    """

    n: int
    n_latent: int
    ring_from: int
    exact: tuple[np.ndarray, np.ndarray]
    rows: KVStore
    made: tuple[np.ndarray, np.ndarray]
    kept: np.ndarray


class SALSCache(LayerCache):
    """The rows of one layer: all exact, or most of them as latents.

    While attention is dense, and during a later prefill, ``store`` has all rows. Otherwise
    ``_exact`` has the sinks and the last rows, and ``_latents`` the rows between them.
    """

    queries_read = 0

    def __init__(self, spec: LayerSpec, method: SALS) -> None:
        super().__init__(spec)
        self.method = method
        self._rank, self._score_rank = method.ranks(spec)
        self._basis = latent.make_basis(
            *method.basis_of(spec), spec.theta, spec.rope_scale, spec.n_head_kv, spec.value_dim
        )
        self._blocks = queries.make_block_basis(self._basis, spec.theta, self._score_rank)
        of_basis, of_blocks = self._basis, self._blocks
        matrices = of_basis.encode, of_basis.decode, of_blocks.decode, of_blocks.scales
        self._basis_bytes = sum(matrix.nbytes for matrix in matrices)
        state = SALSState(
            basis=self._basis, blocks=self._blocks, scale=spec.scale, softcap=spec.softcap,
            sinks=spec.sinks if len(spec.sinks) else None, by_head=method.score == "brope",
            n_threads=spec.n_threads,
        )  # fmt: skip
        self._step = KernelStep(state, run_thread)
        self._first = method.sinks if method.exact_sinks else 0
        self._sinks = np.arange(self._first, dtype=np.int32)
        self._ring = method.window + UNDO
        self._slots = self._first + np.arange(2 * self._ring, dtype=np.int32) % self._ring
        self._announced = 0
        self._forget()

    def _forget(self) -> None:
        """Drops all rows: exact rows, latents and reconstructed rows."""
        self.store = KVStore(self.spec)
        self._latents: latent.LatentStore | None = None
        self._exact = KVStore(self.spec)
        self._rows = KVStore(self.spec)  # reconstructed rows of the last choice
        self._kept = np.zeros(0, np.int32)  # for each row of ``_rows``, the number of its latent
        self._n = 0  # rows in ``_latents`` and ``_exact``
        self._ring_from = 0  # position of the oldest row in the ring of ``_exact``
        self._start = NO_START

    @property
    def n(self) -> int:
        return max(self.store.n, self._n)

    def reserve(self, n: int) -> None:
        self._announced = n
        if self._latents is None and self.store.n:
            self.store.reserve(n)

    def extend(self, x: AttnInput) -> Any:
        if self.store.n == 0:
            self.store.reserve(max(self._n + x.k.shape[1], self._announced))
            if self._latents is not None:
                self._restore(self._latents)
        return super().extend(x)

    def finish_prefill(self) -> None:
        if self._latents is not None or not self.method.is_dense_at(self.store.n):
            self._compress()
        self._start = _Start(self.n)
        if self._latents is not None:
            rows = self._exact.copy(self._exact.capacity)
            self._start = _Start(self.n, self._latents.n, self._ring_from, rows)

    def _slots_of(self, start: int, stop: int) -> np.ndarray:
        """Returns the places in ``_exact`` of rows start .. stop - 1; these must fit the ring."""
        return self._slots[start % self._ring :][: stop - start]

    def _compress(self) -> None:
        """Moves the rows of ``store`` to ``_latents`` and ``_exact``. Existing latents stay."""
        store, n, first, latents = self.store, self.store.n, self._first, self._latents
        if latents is None:
            latents = latent.LatentStore(
                self._rank, self._score_rank, self.method.bits, first, self._basis
            )
            self._exact.reserve(first + self._ring)
            self._ring_from = first
        done = first + latents.n
        count = max(0, n - self.method.window - done)
        latents.reserve(max(latents.n + count, self._announced - first - self.method.window))
        latent.encode_range(store.layout, done, done, count, self._basis, latents.table, latents.n)
        self._ring_from = max(self._ring_from, n - self._ring)
        slots = self._slots_of(self._ring_from, n)
        for target, source in ((self._exact.k, store.k), (self._exact.v, store.v)):
            target[:, :first] = source[:, :first]
            target[:, slots] = source[:, self._ring_from : n]
        latents.n += count
        self._latents, self._n, self.store = latents, n, KVStore(self.spec)
        self.ledger.counts["rows_encoded"] += count

    def _restore(self, latents: latent.LatentStore) -> None:
        """Fills ``store`` with all rows: reconstructed from ``latents``, and the exact rows."""
        store, n, first = self.store, self._n, self._first
        latent.reconstruct_range(latents.n, self._basis, latents.table, store.layout, first)
        exact_from = first + latents.n  # the ring may still have rows that are latents
        slots = self._slots_of(exact_from, n)
        for target, source in ((store.k, self._exact.k), (store.v, self._exact.v)):
            target[:, :first] = source[:, :first]
            target[:, exact_from:n] = source[:, slots]
        store.n = n
        self.ledger.counts["rows_restored"] += latents.n

    def decode(self, x: AttnInput) -> np.ndarray:
        if self._latents is None:
            if self.method.is_dense_at(self.store.n + 1):
                self.store.append_row(x.k, x.v)  # bit for bit as the method ``full`` stores it
                return self.attend_all(x.q)
            if self._start.n_latent is None:
                self._start = self._start._replace(rows=self.store.copy(self._start.n))
            self._compress()
        assert self._latents is not None
        spec, method, latents, exact = self.spec, self.method, self._latents, self._exact
        n, first = self._n + 1, self._first
        self._ring_from = max(self._ring_from, n - self._ring)
        slot = int(self._slots[self._n % self._ring])
        attention.append_row(x.k[:, 0], x.v[:, 0], exact.layout, slot)
        n_latent, leaving = latents.n, -1
        if first + n_latent < n - method.window:  # a row leaves the window
            leaving = int(self._slots[(first + n_latent) % self._ring])
            n_latent += 1
            latents.reserve(n_latent)
            self.ledger.counts["rows_encoded"] += 1
        start = first + n_latent  # the first exact row after the latents
        exact_rows = np.concatenate([self._sinks, self._slots_of(start, n)])
        n_front = min(method.sinks - first, n_latent)
        n_back = max(0, start - max(first, n - method.window))
        chosen = np.empty(min(n_latent, n_front + n_back + method.budget.rows(n)), np.int32)
        if len(self._kept) < len(chosen):
            self._rows, self._kept = KVStore(spec), np.full(len(chosen) + SPARE, -1, np.int32)
            self._rows.reserve(len(self._kept))
        out = np.empty((spec.n_head, exact.v.shape[2]), np.float32)
        self._step.state.set(
            latents=latents.table, leaving=leaving, n_latent=n_latent, n_front=n_front,
            n_back=n_back, exact=exact.layout, rows=self._rows.layout, q=x.q, q_nope=x.q_nope,
            exact_rows=exact_rows, chosen=chosen, kept=self._kept, out=out,
        )  # fmt: skip
        sals_step(self._step.at)
        n_new = int(self._step.state.n_new[0])
        latents.n, self._n = n_latent, n
        if self.records_attended:
            rows = np.concatenate([self._sinks, first + chosen, np.arange(start, n)])
            self.attended = rows.astype(np.int32)[None], np.array([len(rows)])
        n_bytes = n_latent * latents.scored_bytes + n_new * latents.row_bytes
        n_attended = len(exact_rows) + len(chosen)
        n_bytes += n_attended * spec.n_head_kv * exact.row_bytes + self._basis_bytes
        scored = n_latent * (spec.n_head if method.score == "brope" else 1)
        self.ledger.step(spec.n_head * n, scored, spec.n_head * n_attended, n_bytes, True)
        self.ledger.counts["rows_reconstructed"] += n_new
        return out

    def most_rows(self, n: int) -> int:
        return n if self._latents else rows_alike(self.method.is_dense_at, self.store.n + 1, n)

    def save_own(self) -> _Before | None:
        if self._latents is None:
            return None
        slot, rows = self._slots[self._n % self._ring], self._rows
        exact = self._exact.k[:, slot].copy(), self._exact.v[:, slot].copy()
        made = rows.k.copy(), rows.v.copy()
        return _Before(
            self._n, self._latents.n, self._ring_from, exact, rows, made, self._kept.copy()
        )

    def take_back_own(self, own: _Before) -> None:
        assert self._latents is not None
        self._n, self._latents.n, self._ring_from, exact, self._rows, made, self._kept = own
        slot = self._slots[self._n % self._ring]
        self._exact.k[:, slot], self._exact.v[:, slot] = exact
        self._rows.k[:], self._rows.v[:] = made

    def truncate(self, n: int) -> int:
        """See StoreContract. It also goes back by UNDO rows if their window is still exact."""
        start, first = self._start, self._first
        if self._latents is None:
            self._start = start._replace(n=min(start.n, n))
            return super().truncate(n)
        self.store = KVStore(self.spec)  # drops an interrupted prefill
        if n >= self._n:
            return self._n
        if n == start.n and start.rows is not None:
            self._restart(start.rows)
            return n
        exact_from = max(n - self.method.window, first)
        if self.method.is_dense_at(n) or self._ring_from > exact_from:
            return 0
        if n < start.n:
            self._start = NO_START
        self._keep_latents(exact_from - first)
        self._n = n
        return n

    def _restart(self, rows: KVStore) -> None:
        """Goes back to the end of the last prefill. rows: a copy of its exact rows."""
        start = self._start
        if start.n_latent is None or self._latents is None:
            self._forget()
            self.store, self._start = rows, start._replace(rows=None)
            return
        self._exact = rows.copy(rows.n)
        self._keep_latents(start.n_latent)
        self._n, self._ring_from = start.n, start.ring_from

    def _keep_latents(self, n: int) -> None:
        """Drops all latents but the first n."""
        assert self._latents is not None
        self._latents.n = min(self._latents.n, n)
        self._kept[self._kept >= n] = -1

    def held_bytes(self, n: int) -> int:
        if self.method.is_dense_at(n):
            return super().held_bytes(n)
        empty = latent.LatentStore(
            self._rank, self._score_rank, self.method.bits, self._first, self._basis
        )
        exact = 2 * super().held_bytes(self._first + self._ring)  # and a copy of the prefill's end
        return exact + n * empty.row_bytes + self._basis_bytes

    def memory(self) -> Memory:
        """Returns the bytes of rows in every form. ``index`` is the bytes of E and D."""
        held = self.store, self._exact, self._rows, self._start.rows, self._latents
        return Memory(sum(each.nbytes for each in held if each), index=self._basis_bytes)
