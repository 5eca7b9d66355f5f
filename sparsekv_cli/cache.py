"""What a KV-cache method is: the interface of one layer's cache, and the parts methods share.

Letters: T new rows, H query heads, G kv heads, d head size, n context. Data flows one way: the
decoder hands a layer's q, k, v to its LayerCache and gets the attention's output back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from sparsekv_cli.cpu.tensors import as_tensor
from sparsekv_cli.kv_store import CACHE_TYPES, KVStore
from sparsekv_cli.kv_store import padded as padded
from sparsekv_cli.ledger import Ledger

N_SINKS = 4  # METHODS.md: the first tokens, always attended


class AttnInput(NamedTuple):
    """One layer, T new rows of one sequence.

    Prefill: (heads, T, d), arrays of f32 or bf16 (cpu/tensors.py), or torch tensors; ``in_torch``
    gives tensors. Decode (T = 1): numpy f32 views (heads, 1, d padded to 16), valid during the call
    only.
    """

    q: Any  # (H, T, d), rotated
    k: Any  # (G, T, d), rotated
    v: Any  # (G, T, d_v)
    q_nope: Any  # (H, T, d), before RoPE (after bias and q/k norm)
    k_nope: Any  # (G, T, d)
    pos: int  # absolute position of the first row

    def in_torch(self) -> AttnInput:
        """The same as tensors, which share the memory of arrays."""
        return AttnInput._make((*map(as_tensor, self[:5]), self.pos))


@dataclass(frozen=True)
class LayerSpec:
    """Sizes of one layer, and how many threads its kernels may use.

    theta: rotation in radians a position of each RoPE pair (i, i + n_rot/2), f64 (n_rot/2,).
    rope_scale: factor of the rotated dims (YaRN's magnitude). calibration: this layer's tensors of
    the method's sidecar, by name (see calibration.py); empty for methods that need none.
    cache_type_k, cache_type_v: types of the rows, as in kv_store.py.
    """

    layer: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    n_threads: int
    theta: np.ndarray = field(default_factory=lambda: np.empty(0), compare=False)
    rope_scale: float = 1.0
    calibration: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.n_head // self.n_head_kv

    @property
    def scale(self) -> np.float32:
        """Softmax scale 1/sqrt(d)."""
        return np.float32(self.head_dim**-0.5)


@dataclass(frozen=True)
class Memory:
    """Resident bytes of one layer's cache, by place; ``index`` is what the method adds."""

    host: int = 0
    device: int = 0
    index: int = 0


class Backend(Protocol):
    """The operations that methods call by name; cpu/ops.py on the host."""

    def dense_prefill(self, store: KVStore, x: AttnInput, spec: LayerSpec) -> Any: ...
    def append_row(self, store: KVStore, x: AttnInput) -> None: ...
    def attend_dense(self, store: KVStore, q: np.ndarray, spec: LayerSpec) -> np.ndarray: ...
    def attend_rows(
        self, store: KVStore, q: np.ndarray, idx: np.ndarray, counts: np.ndarray, spec: LayerSpec
    ) -> np.ndarray: ...
    def score_rows(self, store: KVStore, q: np.ndarray, spec: LayerSpec) -> np.ndarray: ...
    def dense_step(self, store: KVStore, spec: LayerSpec) -> Any: ...


class LayerCache(ABC):
    """The mutable state of one layer of one sequence.

    selects: whether a step attends to some rows exactly and leaves the others out, so that it can
    be asked which (``attended``). Not so in a cache that attends to all, exactly or roughly. What
    it is after a prefill holds for the steps that follow.
    keeps_rows: whether the rows of a prefill take as much memory before ``finish_prefill`` as after
    it. A prompt then takes the layers in parts; otherwise a layer is finished before the next.
    """

    selects: bool = True
    keeps_rows: ClassVar[bool] = False

    def __init__(self, spec: LayerSpec, backend: Backend) -> None:
        self.spec = spec
        self.backend = backend
        self.store = KVStore(spec)
        self.ledger = Ledger()
        self.traced = False  # whether ``attended`` must be kept
        # Rows of the last decode step, int32 (H or G, m) with counts int64; None: all of them.
        self.attended: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def n(self) -> int:
        """Rows of the sequence that the cache holds, in whatever form."""
        return self.store.n

    def prefill(self, x: AttnInput) -> Any:
        """Stores a chunk's K and V; returns its dense causal attention (H, T, d_v), as x.q is."""
        self.store.append(x.k, x.v)
        return self.backend.dense_prefill(self.store, x, self.spec)

    def finish_prefill(self) -> None:  # noqa: B027 - most methods have nothing to do here
        """Called once after the last chunk: build indexes, evict, compress."""

    @abstractmethod
    def decode(self, x: Any) -> Any:
        """Adds the row of an AttnInput; its attention f32 (H, >= d_v), valid until the next call.

        A cache on a device takes and gives what device/cache.py says.
        """

    def begin(self) -> tuple[int, int] | None:
        """The next step as compiled code (cpu/chain.py), where it needs no Python; else ``decode``.

        What a caller sees does not change before ``end``, which follows if the code has run. A
        class that changes ``decode`` must change both.
        """
        return None

    def end(self) -> None:  # noqa: B027 - nothing has begun
        """The step of ``begin`` is done."""

    def reserve(self, n: int) -> None:
        """Announces that ``n`` rows in all are coming."""
        self.store.reserve(n)

    def truncate(self, n: int) -> int:
        """Forgets all but the first n rows if it can; returns how many are kept (n or 0).

        The index goes with the rows: the next prefill, or else the next decode, builds a new one.
        """
        self.store.truncate(n)
        return self.store.n

    def memory(self) -> Memory:
        return Memory(host=self.store.nbytes)

    def counters(self) -> Mapping[str, int]:
        """The ledger's counts so far."""
        return self.ledger.counts


class DenseCache(LayerCache):
    """Attends to every row: the method ``full``, and the dense layers of every other method."""

    selects = False
    keeps_rows = True

    def __init__(self, spec: LayerSpec, backend: Backend) -> None:
        super().__init__(spec, backend)
        self._step: Any = None  # made when it is wanted

    def decode(self, x: AttnInput) -> np.ndarray:
        self.backend.append_row(self.store, x)
        self._count()
        return self.backend.attend_dense(self.store, x.q[:, 0], self.spec)

    def begin(self) -> tuple[int, int] | None:
        store, n = self.store, self.store.n + 1
        store.reserve(n)
        if self._step is None:
            self._step = self.backend.dense_step(store, self.spec)
        return self._step.at(store.layout, n)

    def end(self) -> None:
        self.store.n += 1
        self._count()

    def _count(self) -> None:
        store, spec = self.store, self.spec
        rows = spec.n_head * store.n
        self.ledger.step(rows, rows, rows, spec.n_head_kv * store.n * store.row_bytes, False)


class SelectingCache(LayerCache):
    """append -> select -> attend over the selected rows; a method writes ``select`` only."""

    keeps_rows = True

    def decode(self, x: AttnInput) -> np.ndarray:
        store, spec = self.store, self.spec
        self.backend.append_row(store, x)
        q, n = x.q[:, 0], store.n
        rows = spec.n_head * n
        if self.selects_all(n):
            n_bytes = spec.n_head_kv * n * store.row_bytes
            self.ledger.step(rows, rows, rows, n_bytes, True)
            self.attended = None
            return self.backend.attend_dense(store, q, spec)
        idx, counts, scored = self.select(q, n)
        self.attended = (idx, counts)
        self._count_selected(counts, scored)
        return self.backend.attend_rows(store, q, idx, counts, spec)

    def _count_selected(self, counts: np.ndarray, scored: int) -> None:
        """Counts a step that attended to lists of ``counts`` rows, int64 (U,)."""
        n, n_head = self.store.n, self.spec.n_head
        attended = int(counts.sum()) * (n_head // len(counts))
        read = int(counts.sum()) * self.store.row_bytes + self.bytes_to_select(n)
        self.ledger.step(n_head * n, scored, attended, read, True)

    @abstractmethod
    def selects_all(self, n: int) -> bool:
        """Whether the budget covers a context of n rows, so that attention is dense."""

    @abstractmethod
    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows for q f32 (H, d) among n: idx int32 (U, m), counts int64 (U,), rows scored.

        U is H (a list a query head) or G (a list a kv head); rows in any order, without repeats.
        """

    def bytes_to_select(self, n: int) -> int:
        """Bytes that one ``select`` reads."""
        return 0


@dataclass(frozen=True)
class Budget:
    """Tokens attended a step: a number, or a share of the context. ``512`` or ``5%``.

    floor, ceiling: least and most rows of a share. Defaults have them, so that short chats stay
    coherent and the work of a step stops growing with the context; a share that the user states is
    taken as stated.
    """

    tokens: int | None = None
    share: float | None = None
    floor: int = 1
    ceiling: int = 1 << 62

    @staticmethod
    def parse(text: str) -> Budget:
        """ValueError unless ``text`` is a whole number >= 1 or a percentage in (0, 100]."""
        wrong = ValueError(f"budget = {text!r}: must be a number of tokens or a share such as 5%")
        try:
            if text.endswith("%"):
                share = float(text[:-1]) / 100
                if not 0 < share <= 1:
                    raise wrong
                return Budget(share=share)
            if int(text) < 1:
                raise wrong
            return Budget(tokens=int(text))
        except ValueError:
            raise wrong from None

    def rows(self, n: int) -> int:
        """Rows of a context of n that may be attended, at least 1."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return min(self.ceiling, max(self.floor, round(self.share * n)))

    def at_least(self, n: int) -> Budget:
        """The same, of n rows where it is less."""
        if self.tokens is not None:
            return Budget(tokens=max(self.tokens, n))
        return replace(self, floor=max(self.floor, n), ceiling=max(self.ceiling, n))

    def __str__(self) -> str:
        if self.share is None:
            return str(self.tokens)
        limits = f" ({self.floor} to {self.ceiling} rows)" if self.floor > 1 else ""
        return f"{100 * self.share:g}%{limits}"


DEFAULT_BUDGET = Budget(share=0.05, floor=64, ceiling=512)


def parse_layers(text: str) -> tuple[int, ...]:
    """``0,1``, ``none`` or empty -> layer numbers; negative ones count from the last layer."""
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"dense_layers = {text!r}: must be layer numbers such as 0,1 or -1, or none"
        ) from None


CALIBRATION = "calibration"  # Method.needs of methods that read a sidecar


@dataclass(frozen=True)
class CalibrationRun:
    """What a method gets to calibrate itself: a model, a text, and a way to run one over it.

    specs: one a layer, ``calibration`` empty. ids: the text. forward(ids, pos, caches, all_logits):
    a dense forward pass of rows from ``pos`` on through one LayerCache a layer, which may be of the
    method's own making and keep what they are shown; logits f32 (n_vocab,), or (T, n_vocab).
    progress: told the share that is done, 0 to 1.
    """

    specs: Sequence[LayerSpec]
    backend: Backend
    ids: Sequence[int]
    forward: Callable[[Sequence[int], int, Sequence[LayerCache], bool], np.ndarray]
    progress: Callable[[float], None]


_CACHE_TYPE_HELP = "type of {} in the cache: f16, or q8_0 with methods that read it"


@dataclass(frozen=True)
class Method(ABC):
    """An immutable KV-cache method; its fields are its options, checked in __post_init__."""

    paper: ClassVar[str]
    description: ClassVar[str]
    needs: ClassVar[str] = ""  # what must exist before it runs, such as a calibration
    cache_types: ClassVar[tuple[str, ...]] = ("f16",)  # of K and of V that it can read
    # Its cache on a GPU, module:class of device/; a method without one keeps its rows on the host.
    device_cache: ClassVar[str] = ""

    dense_layers: tuple[int, ...] = (0, 1)
    cache_type_k: str = field(default="f16", metadata={"help": _CACHE_TYPE_HELP.format("K")})
    cache_type_v: str = field(default="f16", metadata={"help": _CACHE_TYPE_HELP.format("V")})

    def check_cache_types(self, name: str) -> None:
        """ValueError for a type that does not exist, or that this method, ``name``, cannot read."""
        for key in ("cache_type_k", "cache_type_v"):
            value = getattr(self, key)
            if value not in CACHE_TYPES:
                raise ValueError(f"{key} = {value!r}: must be {' or '.join(CACHE_TYPES)}")
            if value not in self.cache_types:
                only = " or ".join(self.cache_types)
                raise ValueError(f"{key} = {value!r}: method {name} keeps its rows as {only} only")

    def layer_spec(self, spec: LayerSpec) -> LayerSpec:
        """``spec`` with this method's types of the rows."""
        self.check_cache_types(type(self).__name__)
        return replace(spec, cache_type_k=self.cache_type_k, cache_type_v=self.cache_type_v)

    def is_dense(self, spec: LayerSpec) -> bool:
        """Whether the user or the default wants that layer dense (see ``dense_layer``)."""
        return spec.layer in {
            i % spec.n_layer for i in self.dense_layers if -spec.n_layer <= i < spec.n_layer
        }

    def layer(self, spec: LayerSpec, backend: Backend) -> LayerCache:
        """The cache of one layer."""
        spec = self.layer_spec(spec)
        make = self.dense_layer if self.is_dense(spec) else self.sparse_layer
        return make(spec, backend)

    def dense_layer(self, spec: LayerSpec, backend: Backend) -> LayerCache:
        """The cache of a dense layer on the host; a method may have its own for long contexts."""
        return DenseCache(spec, backend)

    @abstractmethod
    def sparse_layer(self, spec: LayerSpec, backend: Backend) -> LayerCache:
        """The method's own cache of one layer."""

    def used(self) -> Sequence[Method]:
        """Other methods whose kernels it calls, to be compiled with its own."""
        return ()

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """What every layer's ``spec.calibration`` is to hold: arrays (n_layer, ...) by name.

        Called for methods whose ``needs`` is CALIBRATION. The arrays must not depend on the
        method's options: one sidecar serves them all.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The options as JSON-able values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Budget) else v for k, v in values.items()}
