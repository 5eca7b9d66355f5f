"""FAEDKV: "Infinite-Window Fourier Transform for Unbiased KV Cache Compression" (Li et al.).

Between the sinks and the recent tokens, K and V are kept as some of their frequencies along the
tokens. The coefficients are their only copy. An ablation study, done once a model, decides which
frequencies a layer keeps, and how many.

| paper | here |
|---|---|
| eq 4, DFT of the middle segment | BlockSpectrum.append (cpu/faedkv/blocks.py) |
| section 3.2, eq 6, 7: importance of chunks | study_frequencies (calibration/faedkv.py) |
| section 4.2.1, the chunks B* that are kept | kept_bins (cpu/faedkv/frequencies.py) |
| eq 9, 12, IWDFT update of aged tokens | Spectrum.append, Spectrum.add (cpu/faedkv/spectrum.py) |
| eq 5, 11, 13, sparse IDFT and attention | attend_blocks (blocks.py), Spectrum.attend |

Departures; docs/methods.md has their reasons and figures:
(1) Eq 9 as printed reverses time and puts new tokens on the indices of old ones.
    ``update=additive`` adds X[k] += x_n e^(-2 pi i k n / N) in a basis of fixed length N. It works
    in f32, eight tokens at a time. It begins a new basis when one is full. It is slow, in numpy.
    ``update=block`` (default) keeps aged tokens exact until a block of them is transformed at once,
    in f16.
(2) Eq 13's second K~ is V~.
(3) rfft bins, so that conjugate pairs stay together, in N_CHUNKS chunks.
(4) ``importance=kld`` ranks chunks by the KLD that leaving them out causes.
(5) ``allocation=layers`` gives each layer its own share. It covers all layers, so none is dense by
    default. Layers that the user makes dense do not count.
(6) A share of 100% transforms nothing.
(7) Additive segments have lengths that suit an FFT. Aged tokens stay exact until a block of them,
    or 8 of them (additive), can be transformed.
(8) In half of the rows that the study scores, the text repeats a passage of the prefix.
``preset=paper``: ppl, uniform, additive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cache.store import KVStore, padded
from sparsekv_cli.calibration.allocation import layer_share
from sparsekv_cli.calibration.faedkv import arrays_of_frequencies, study_frequencies
from sparsekv_cli.calibration.run import CALIBRATION, CalibrationArray, CalibrationRun
from sparsekv_cli.cpu.faedkv import frequencies
from sparsekv_cli.cpu.faedkv.blocks import BlockSpectrum
from sparsekv_cli.cpu.faedkv.frequencies import FourierBasis
from sparsekv_cli.cpu.faedkv.spectrum import Mark, Spectrum
from sparsekv_cli.methods.base import DENSE_HELP, Method
from sparsekv_cli.settings.option import option

SINKS, RECENT = 10, 50  # paper, section 5.1
MOST_ROWS = 1 << 20  # exact rows
LONG = 512  # from so many aged tokens on, one additive basis takes all of them
AGED_TOGETHER = 8  # tokens of one additive update, which reads and writes all coefficients once


@dataclass(frozen=True)
class FAEDKV(Method):
    """Options of FAEDKV; symbols as in the paper."""

    paper: ClassVar[str] = "FAEDKV: Infinite-Window Fourier Transform (Li et al.)"
    description: ClassVar[str] = "keeps K and V as some of their frequencies along the tokens"
    use: ClassVar[str] = "the gist and single facts of a text in a quarter of the memory"
    holds_all_rows: ClassVar[bool] = False
    needs: ClassVar[str] = CALIBRATION
    cache_types: ClassVar[tuple[str, ...]] = ("f16",)
    needs_values: ClassVar[str] = "it would store spectra of V apart from those of K"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tuned": {},
        "paper": {"importance": "ppl", "allocation": "uniform", "update": "additive"},
    }

    dense_layers: tuple[int, ...] = option((), DENSE_HELP)
    preset: str = option("tuned", "a set of values; -o overrides them", choices=tuple(presets))
    budget: Budget = option(
        Budget(share=0.25), "r: share of the frequencies kept: P%, or N of the transformed tokens"
    )
    importance: str = option("kld", "what ranks frequencies; ppl: eq 7", choices=("kld", "ppl"))
    allocation: str = option(
        "layers", "share of each layer: by calibration, or uniform", choices=("layers", "uniform")
    )
    update: str = option(
        "block", "aged tokens: by blocks, or added (eq 9)", choices=("block", "additive")
    )
    block: int = option(
        128,
        "tokens of a block, and spare tokens of an additive basis",
        at_least=16,
        at_most=256,
        multiple_of=4,
    )
    sinks: int = option(SINKS, "S: first tokens, kept exact", at_least=0, at_most=MOST_ROWS)
    recent: int = option(RECENT, "R: last tokens, kept exact", at_least=1, at_most=MOST_ROWS)

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return FAEDKVCache(spec, self)

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """Runs the ablation study, always with the paper's numbers of sinks and recent tokens."""
        return study_frequencies(run, SINKS, RECENT)

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
        return arrays_of_frequencies(specs)


class _Start(NamedTuple):
    """The state of a cache at the end of a prefill of n rows, to which ``truncate`` can go back."""

    n: int
    n_exact: int
    share: float
    rows: KVStore | None = None  # a copy of the exact rows; None: they are still in ``store``
    mark: Mark | None = None  # mark of the spectrum; None: there was no spectrum


class FAEDKVCache(LayerCache):
    """The rows of one layer: exact rows in ``store``, all others as coefficients in ``spectrum``.

    ``store`` has the sinks, then rows that wait for their transform, then the recent rows.
    """

    attends_to_some = False
    queries_read = 0

    def __init__(self, spec: LayerSpec, method: FAEDKV) -> None:
        super().__init__(spec)
        self.method = method
        self._importance = spec.calibration[f"imp_{method.importance}"]  # (C,)
        self._share = method.budget.share or 0.0  # r of this layer; 0: not known yet
        if self._share and method.allocation == "layers":
            self._share = self._share_of_layer(self._share)
        self.spectrum: Spectrum | BlockSpectrum | None = None  # None: all rows are exact
        self._whole: KVStore | None = None  # all rows, in a prefill after a spectrum exists
        self._expected = 0  # rows that ``reserve`` announced
        self._n_absorbed = 0  # rows of the sequence when the spectrum last changed
        self._start = _Start(0, 0, self._share)

    def _share_of_layer(self, share: float) -> float:
        return layer_share(share, self.spec.calibration["layer_budget"])

    @property
    def n(self) -> int:
        if self._whole is not None:
            return self._whole.n
        return self.store.n + (0 if self.spectrum is None else self.spectrum.n_tokens)

    def reserve(self, n: int) -> None:
        self._expected = n
        if self.spectrum is None:
            super().reserve(n)

    # --- prefill ------------------------------------------------------------------------------

    def extend(self, x: AttnInput) -> Any:
        """See PrefillContract. For rows in the spectrum, the store has their reconstruction."""
        if self.spectrum is None:
            return super().extend(x)
        if self._whole is None:
            self._whole = self._reconstructed(self.spectrum)
        self._whole.append(x.k, x.v)
        return self._whole

    def _reconstructed(self, spectrum: Spectrum | BlockSpectrum) -> KVStore:
        """Returns a store with all rows: exact ones, and those reconstructed from the spectrum.

        It has room for the rows that ``reserve`` announced.
        """
        whole, n_sinks = KVStore(self.spec), self.method.sinks
        whole.reserve(max(self.n, self._expected))
        first_exact = n_sinks + spectrum.n_tokens
        for target, exact, tokens in zip(
            (whole.k, whole.v), (self.store.k, self.store.v), spectrum.tokens(), strict=True
        ):
            target[:, :n_sinks] = exact[:, :n_sinks]
            target[:, n_sinks:first_exact] = tokens
            target[:, first_exact : self.n] = exact[:, n_sinks : self.store.n]
        whole.n = self.n
        return whole

    def finish_prefill(self) -> None:
        rows = self.store if self._whole is None else self._whole
        n_before = 0 if self.spectrum is None else self.spectrum.n_tokens
        self._whole = None
        self._start = _Start(0, 0, self._share)
        self._absorb(rows, self.method.sinks + n_before)
        self._start = _Start(self.n, self.store.n, self._share)

    # --- aging --------------------------------------------------------------------------------

    def _absorb(self, rows: KVStore, first: int) -> None:
        """Moves aged rows from ``rows`` into the spectrum. The other exact rows go to ``store``.

        first: the first row of ``rows`` that is neither a sink nor in the spectrum.
        """
        method, n_sinks = self.method, self.method.sinks
        taken = self._transform(rows, first, rows.n - method.recent - first)
        if self.spectrum is None or (rows is self.store and not taken):
            return
        n = rows.n - first - taken
        store = self.store
        if rows is not store or store.capacity > self._most_exact_rows():
            store = KVStore(self.spec)
            store.reserve(max(self._most_exact_rows(), n_sinks + n))
        for target, source in ((store.k, rows.k), (store.v, rows.v)):
            target[:, :n_sinks] = source[:, :n_sinks]
            target[:, n_sinks : n_sinks + n] = source[:, first + taken : rows.n].copy()
        store.n = n_sinks + n
        self.store = store
        if taken:
            self._n_absorbed = self.n

    def _most_exact_rows(self) -> int:
        return self.method.sinks + self.method.recent + self._most_waiting() + 1

    def _most_waiting(self) -> int:
        return self.method.block if self.method.update == "block" else AGED_TOGETHER

    def _transform(self, rows: KVStore, first: int, n_aged: int) -> int:
        """Moves some of the n_aged rows from ``first`` on into the spectrum. Returns their number.

        In block mode these are whole blocks: with n_aged = 300 and blocks of 128, it returns 256.
        """
        block = self.method.block
        if n_aged < self._most_waiting() or not self._may_transform(n_aged):
            return 0
        start = self._start
        if start.n and start.rows is None:
            mark = None if self.spectrum is None else self.spectrum.mark()
            self._start = start._replace(rows=self.store.copy(start.n_exact), mark=mark)
        if self.spectrum is None:
            self.spectrum = self._new_spectrum()
        spectrum = self.spectrum
        if isinstance(spectrum, BlockSpectrum):
            taken = n_aged // block * block
            spectrum.append(*_floats(rows, first, taken))
            return taken
        taken = 0
        while left := n_aged - taken:
            length, count = 0, min(left, spectrum.room)
            if not count:
                long = frequencies.length_above(left + block)
                length = block if left < LONG else long
                count = min(left, length)
            k, v = _floats(rows, first + taken, count)
            if length:
                basis = spectrum.block if length == block else self._basis(length)
                spectrum.append(k, v, basis)
            else:
                spectrum.add(k, v)
            taken += count
        return taken

    def _new_spectrum(self) -> Spectrum | BlockSpectrum:
        kind = BlockSpectrum if self.method.update == "block" else Spectrum
        widths = padded(self.spec.head_dim), padded(self.spec.value_dim)
        return kind(self.spec.n_head_kv, *widths, self._basis(self.method.block))

    def _may_transform(self, n_aged: int) -> bool:
        """Returns whether the layer's share of frequencies is below 1: then rows are transformed.

        A budget in tokens becomes a share here, once there are twice as many aged rows.
        """
        tokens = self.method.budget.tokens
        if tokens is not None and not self._share:
            if n_aged < 2 * tokens:  # with fewer rows the share would stay near 1
                return False
            self._share = tokens / n_aged
            if self.method.allocation == "layers":
                self._share = self._share_of_layer(self._share)
        return self._share < 1

    def _basis(self, n: int) -> FourierBasis:
        return FourierBasis(n, frequencies.kept_bins(n, self._share, self._importance))

    # --- decode -------------------------------------------------------------------------------

    def decode(self, x: AttnInput) -> np.ndarray:
        spec, n_sinks = self.spec, self.method.sinks
        self.store.append_row(x.k, x.v)
        self._absorb(self.store, n_sinks)
        store, spectrum = self.store, self.spectrum
        if spectrum is None:
            return self.attend_all(x.q)
        out = spectrum.attend(
            x.q[:, 0], store, spec.scale, spec.softcap, spec.sinks, spec.n_threads
        )
        rows = spec.n_head * (store.n + spectrum.n_rows)
        n_bytes = spec.n_head_kv * (
            store.n * store.row_bytes + spectrum.n_rows * spectrum.row_bytes
        )
        self.ledger.step(spec.n_head * self.n, rows, rows, n_bytes, True)
        return out

    def most_rows(self, n: int) -> int:
        """See StepContract. A draft ends before a transform, which cannot be undone."""
        method, least = self.method, self._most_waiting()
        if self._share >= 1:
            return n
        if method.budget.tokens is not None and not self._share:
            least = max(least, 2 * method.budget.tokens)
        n_aged = self.store.n + 1 - method.recent - method.sinks
        return 1 if n_aged >= least else min(n, least - n_aged)

    def truncate(self, n: int) -> int:
        """See StoreContract. It can also go back to lengths after the last transform."""
        self._whole = None
        start = self._start
        if 0 < n == start.n:
            self._share = start.share
            if start.rows is not None:
                self._restart(start.rows, start.mark)
        elif n < self._n_absorbed:
            return 0
        elif n < start.n:
            self._start = _Start(0, 0, start.share)
        self.store.truncate(n - (0 if self.spectrum is None else self.spectrum.n_tokens))
        return self.n

    def _restart(self, rows: KVStore, mark: Mark | None) -> None:
        """Goes back to the end of the last prefill. rows, mark: its exact rows and its spectrum."""
        self.store, self._n_absorbed = rows, self._start.n
        if mark is None:
            self.spectrum = None
        else:
            assert self.spectrum is not None
            self.spectrum.go_back(mark)
        self._start = self._start._replace(rows=None, mark=None)

    def held_bytes(self, n: int) -> int:
        share = self._share or (self.method.budget.tokens or n) / n
        if share >= 1:
            return super().held_bytes(n)
        exact = super().held_bytes(self._most_exact_rows())
        return exact + super().held_bytes(int(share * n))  # coefficients are f16, too

    def memory(self) -> Memory:
        spectrum, mark = self.spectrum, self._start.mark
        index = 0 if spectrum is None else spectrum.nbytes
        stores = self.store, self._whole, self._start.rows
        rows = sum(store.nbytes for store in stores if store is not None)
        copied = spectrum.copied_bytes(mark) if spectrum is not None and mark is not None else 0
        return Memory(host=rows + index + copied)

    def counters(self) -> Mapping[str, int]:
        counts = self.ledger.counts.copy()
        if self.spectrum is not None:
            counts["tokens_transformed"] += self.spectrum.n_tokens
            counts["coefficient_rows"] += self.spectrum.n_rows
        return counts


def _floats(rows: KVStore, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns K and V of ``count`` rows from ``first`` on, f32 (G, count, width)."""
    k, v = (each[:, first : first + count].astype(np.float32) for each in (rows.k, rows.v))
    return k, v
