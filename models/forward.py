"""The dense forward pass of a prompt, layer by layer. Every prefill uses it, on CPU and device.

Thousands of rows go through one layer before the next layer. So each layer's matrices are
dequantised once for all rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import ChunkAttention, LayerCache
from sparsekv_cli.cache.spec import FULL, NO_SINKS, AttnInput, LayerSpec, StateInput
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chunk_steps import ChunkSteps
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.identity import DENSE, ModelIdentity, RowsIdentity, identify
from sparsekv_cli.models.rope import RopeTables
from sparsekv_cli.models.weights import Weights

OnProgress = Callable[[int, int], None]  # called with finished rows and all rows
OnRows = Callable[[int, LayerCache], None]
OnPart = Callable[[int], None]
OnHidden = Callable[[int, np.ndarray], None]
Product = Callable[[Any], Any]
Part = dict[tuple[int, int], Any]  # by layer and position: rows that later layers read
ROWS_AT_ONCE = 4096  # rows of a part; dequantising takes 1 to 2 % of their time


class Progress(NamedTuple):
    """The progress of a forward pass."""

    done: int  # rows
    total: int  # rows
    ends_layer: bool  # whether another forward pass may run before the next step


def drain(
    steps: Generator[Progress, None, np.ndarray], progress: OnProgress | None = None
) -> np.ndarray:
    """Runs a forward pass to its end and returns the logits."""
    with closing(steps):
        while True:
            try:
                at = next(steps)
            except StopIteration as end:
                return end.value
            if progress is not None and not at.ends_layer:
                progress(at.done, at.total)


def cuts_of(n: int, unit: int, pos: int = 0) -> list[int]:
    """Returns the ends of pieces of n rows, from 0 on: ``unit`` rows, counted from row -pos on."""
    return [0, *range(unit - pos % unit, n, unit), n]


@dataclass
class Copies:
    """Copies of some rows. Each joins a forward pass at its layer.

    A first pass, without copies, records the residual stream of the rows. In a later pass a copy
    starts before its layer, with the stream that was recorded there.
    """

    # the residual stream before each layer, (T, n_embd)
    streams: list[Any] = field(default_factory=list)
    joining: Sequence[int] = ()  # number of copies that join before each layer; empty: first pass

    def begin(self, x: Any) -> Any:
        """Returns the rows before the first layer, from the embeddings x."""
        return x[:0] if self.joining else x

    def ahead(self, i: int, x: Any, rows: ChunkSteps) -> Any:
        """Returns the rows that go through layer i. x: the rows after layer i - 1."""
        if not self.joining:
            self.streams.append(rows.join([x]))
            return x
        n_new = self.joining[i]
        return rows.join([x, *[self.streams[i]] * n_new]) if n_new else x


class Forward(ABC):
    """A model's forward pass over rows. It has weights and scratch, but no state of a sequence."""

    hparams: HParams
    weights: Weights
    rope: RopeTables  # with arrays, or with tensors
    n_threads: int
    chunk: int
    prefill_dtype: str  # the type of the products: f32, bf16 or int8
    rows_dtype: str  # the type of the rows between the products: f32 or bf16
    gpu: tuple[Any, ...] = ()  # of a GPU: see RowsIdentity
    n_planes: int = 0  # bytes of an input of decode's products, and of few rows; 0: not rounded
    rows: ChunkSteps  # the steps between the products, for arrays or for tensors
    layers: Sequence[Any]  # for each layer the norms and biases for ``rows``
    output_norm: Any  # f32 (n_embd,)

    @cached_property
    def model_identity(self) -> ModelIdentity:
        return identify(self.weights.file, self.hparams, self.rope)

    def identity_of(self, types: tuple[str, str]) -> RowsIdentity:
        """Returns the identity of rows that it makes. types: of K and of V."""
        products = self.prefill_dtype, str(self.n_planes)
        made = self.model_identity, types, products, self.rows_dtype, self.reading
        return RowsIdentity(*made, gpu=self.gpu)

    @property
    def reading(self) -> tuple[int, ...]:
        """Returns how prompts are read, as ``RowsIdentity`` has it."""
        return DENSE

    def sparse_budget(self, n: int) -> int | None:
        """Returns the past rows that a prompt of n rows attends to; None: it is dense."""
        return None

    def attention_of(self, n: int) -> tuple[ChunkAttention | None, int]:
        """Returns ``attend`` and ``grid`` of ``forward_steps`` for a prompt that ends at row n."""
        return None, 0

    @abstractmethod
    def products(self, i: int) -> Mapping[str, Product]:
        """Returns layer i's products by name, valid until the next layer's are requested.

        The products are qkv and o. Layers without experts also have gate_up and down, for
        ``feed_forward``. Recurrent layers may also have gates.

        A product maps rows of the compute type, (T, columns), to (T, rows of the matrix). Its
        result is valid until it is called again.
        """

    @abstractmethod
    def attend(self, cache: LayerCache, x: AttnInput) -> Any:
        """Adds a chunk's rows to a cache. Returns their attention (H, T, d_v), of x.q's type."""

    def feed_forward(self, i: int, products: Mapping[str, Product], x: Any) -> Any:
        """Returns the output of layer i's feed-forward for x f32 (T, n_embd), before its scale."""
        normed = self.rows.norm(x, self.layers[i].ffn_norm)
        return products["down"](self.rows.gate(products["gate_up"](normed)))

    def begin_part(self, ids: Sequence[int], x: Any, pos: int) -> Any:
        """Returns the per-layer inputs for rows from ``pos`` on with embeddings x, or None."""
        return None

    def add_inputs(  # noqa: B027 - most models have none
        self, i: int, products: Mapping[str, Product], x: Any, inputs: Any, pos: int
    ) -> None:
        """Adds the result of layer i's per-layer input to x, and scales x, in place."""

    @abstractmethod
    def end_layer(self, i: int) -> None:
        """Ends layer i. Called when the last row has gone through it."""

    @abstractmethod
    def output(self, normed: Any, vocabulary: np.ndarray | None) -> np.ndarray:
        """Returns logits f32 (T, n_vocab) of normed f32 (T, n_embd), or only of ``vocabulary``."""

    def cap(self, logits: np.ndarray) -> np.ndarray:
        """Applies the model's softcap to logits, in place, and returns them."""
        softcap = np.float32(self.hparams.logit_softcap)
        if softcap:
            np.tanh(np.divide(logits, softcap, out=logits), out=logits)
            logits *= softcap
        return logits

    def prepare(self, n_rows: int) -> None:  # noqa: B027 - most have all from the start
        """Prepares ``forward`` of n_rows rows. Its time is not counted as prefill time."""

    def is_few(self, n_rows: int) -> bool:
        """Returns whether ``forward`` of n_rows rows uses the kernels for few rows."""
        return False

    def embed(self, ids: Sequence[int]) -> Any:
        """Returns the tokens' embeddings f32 (T, n_embd) as the residual stream of ``rows``."""
        embedding = self.weights.token_embd
        rows = np.ascontiguousarray(embedding.data[np.asarray(ids)])
        values = dot.dequantize(embedding.code, rows, embedding.n_columns)
        if self.hparams.embedding_scale != 1.0:
            values *= np.float32(self.hparams.embedding_scale)
        return self.rows.stream(values)

    def embed_row(self, token: int, out: np.ndarray) -> None:
        """Writes one token's embedding, f32 (n_embd,), to ``out``."""
        table = self.weights.token_embd
        row = table.data[token : token + 1]
        dot.dequantize_into(
            table.code, row, table.n_columns, dot.address(out), out.nbytes, dot.TO_F32
        )
        if self.hparams.embedding_scale != 1.0:
            out *= np.float32(self.hparams.embedding_scale)

    def layer_specs(self) -> list[LayerSpec]:
        all_sinks = [getattr(layer, "sinks", None) for layer in self.weights.layers]
        is_full = [layer.kind == FULL for layer in self.hparams.layers]
        return [
            LayerSpec(
                layer=i,
                n_layer=self.hparams.n_layer,
                n_head=layer.n_head,
                n_head_kv=layer.n_head_kv,
                head_dim=layer.head_dim,
                value_dim=layer.value_dim,
                n_threads=self.n_threads,
                theta=self.rope.of(layer.kind).theta[: layer.n_rot // 2],
                rope_scale=self.rope.of(layer.kind).magnitude if layer.n_rot else 1.0,
                attention_scale=layer.attention_scale,
                softcap=np.float32(layer.softcap),
                kind=layer.kind,
                window=layer.window,
                sinks=NO_SINKS if sinks is None else sinks,
                recurrence=getattr(self.weights.layers[i], "recurrence", None),
                source=layer.source,
                v_is_k=layer.v_is_k,
                shares_input=layer.shares_input,
                n_full=sum(is_full),
                full_place=sum(is_full[:i]),
            )
            for i, (layer, sinks) in enumerate(zip(self.hparams.layers, all_sinks, strict=True))
        ]

    def forward(
        self,
        ids: Sequence[int],
        pos: int,
        caches: Sequence[LayerCache],
        *,
        progress: OnProgress | None = None,
        all_logits: bool = False,
        attend: ChunkAttention | None = None,
        grid: int = 0,
        copies: Copies | None = None,
        vocabulary: np.ndarray | None = None,
    ) -> np.ndarray:
        """Runs ``forward_steps`` to its end and returns the logits."""
        steps = self.forward_steps(
            ids, pos, caches, all_logits=all_logits, attend=attend, grid=grid, copies=copies,
            vocabulary=vocabulary,
        )  # fmt: skip
        return drain(steps, progress)

    def forward_steps(
        self,
        ids: Sequence[int],
        pos: int,
        caches: Sequence[LayerCache],
        *,
        all_logits: bool = False,
        attend: ChunkAttention | None = None,
        grid: int = 0,
        on_rows: OnRows | None = None,
        on_part: OnPart | None = None,
        on_hidden: OnHidden | None = None,
        copies: Copies | None = None,
        vocabulary: np.ndarray | None = None,
    ) -> Generator[Progress, None, np.ndarray]:
        """Runs the forward pass of T rows from position ``pos`` on. Yields after chunks and layers.

        Returns logits f32 (n_vocab,) of the last row, or with ``all_logits`` (T, n_vocab) of all
        rows. Every cache gets the rows in chunks, then ``finish_prefill``. attend: how chunks
        attend, if not densely. grid: chunks end at multiples of it, instead of a chunk's size after
        pos; 0: not. on_rows: called before ``finish_prefill`` with each layer and its
        cache, which has all rows. on_part: called after each part but the last, with the rows that
        all caches hold then. on_hidden: called with ascending positions, and the output head's
        inputs f32 (T, n_embd) from each position on. A long prompt goes through the layers in parts
        of ROWS_AT_ONCE rows, so its residual stream never exists as a whole. It is not cut if a
        cache forbids that (``can_prefill_in_parts``), or with ``all_logits``. copies: with
        ``all_logits`` only. Its rows join the pass, and ids are the ids of all copies. vocabulary:
        the tokens whose logits are returned, int64; None: all.
        """
        n, n_layer = len(ids), self.hparams.n_layer
        self.prepare(n)
        self.rope.reserve(pos + n)
        unit = grid or self.chunk
        cuts = [0, n]
        if not all_logits and all(cache.can_prefill_in_parts for cache in caches):
            cuts = cuts_of(n, max(1, ROWS_AT_ONCE // unit) * unit, pos if grid else 0)
        for first, last in pairwise(cuts):
            x = self.embed(ids[first:last])  # (T, n_embd) f32
            if len(x) > self.chunk:  # frees pages of the table that the layers do not need
                self.weights.file.release(self.weights.token_embd.data)
            inputs, part = self.begin_part(ids[first:last], x, pos + first), Part()
            if copies is not None:
                assert all_logits
                x = copies.begin(x)
            for i, cache in enumerate(caches):
                if copies is not None:
                    x = copies.ahead(i, x, self.rows)
                before = first * n_layer + i * len(x)  # rows times layers
                for done in self._forward_layer(
                    i, x, pos + first, cache, attend or self.attend, grid, inputs, part
                ):
                    yield Progress((before + done) // n_layer, n, False)
                if last == n:
                    if len(x) and not math.isfinite(float(x[-1].sum())):
                        raise SparseKVError(
                            f"layer {i} gives values that are not finite: the weights are damaged; "
                            "'sparsekv-cli inspect --check-tensors' names the tensor"
                        )
                    if on_rows is not None:
                        on_rows(i, cache)
                    cache.finish_prefill()
                yield Progress((before + len(x)) // n_layer, n, True)
                self.prepare(n)  # another forward pass may have run between two steps
            if on_hidden is not None:
                for at in range(0, len(x), ROWS_AT_ONCE):
                    hidden = self.rows.last_norm(x[at : at + ROWS_AT_ONCE], self.output_norm)
                    on_hidden(pos + first + at, hidden)
            if on_part is not None and last < n:
                on_part(pos + last)
            normed = self.rows.last_norm(x if all_logits else x[-1:], self.output_norm)
            del x  # before the next part comes
        logits = self.cap(self.output(normed, vocabulary))
        return logits if all_logits else logits[0]

    def _forward_layer(
        self,
        i: int,
        x: Any,
        pos: int,
        cache: LayerCache,
        attend: ChunkAttention,
        grid: int,
        inputs: Any,
        part: Part,
    ) -> Iterator[int]:
        """Runs one layer over x f32 (T, n_embd) in place; yields the number of finished rows."""
        if not len(x):  # copies join later
            return
        products = self.products(i)
        for start, stop in pairwise(cuts_of(len(x), grid or self.chunk, pos if grid else 0)):
            rows = x[start:stop]
            self.forward_chunk(i, products, rows, pos + start, cache, attend, part)
            self.add_inputs(i, products, rows, inputs, pos + start)
            yield stop
        self.end_layer(i)

    def forward_chunk(
        self,
        i: int,
        products: Mapping[str, Product],
        x: Any,
        pos: Any,
        cache: LayerCache,
        attend: ChunkAttention,
        part: Part,
    ) -> None:
        """Runs one layer over a chunk x f32 (T, n_embd) in place. pos: see ``ChunkSteps.heads``."""
        layer, sizes, rows = self.layers[i], self.hparams.layers[i], self.rows
        if sizes.shares_input:
            normed = part.pop((i - 1, pos))
        else:
            normed = rows.norm(x, layer.attn_norm)
        if i + 1 < self.hparams.n_layer and self.hparams.layers[i + 1].shares_input:
            part[i, pos] = normed
        mixed = self.mix(i, products, normed, pos, cache, attend, part)
        rows.add(x, products["o"](mixed), layer.attn_post_norm, layer.o.bias)
        if sizes.has_ffn:
            rows.add(x, self.feed_forward(i, products, x), layer.ffn_post_norm)

    def mix(
        self,
        i: int,
        products: Mapping[str, Product],
        normed: Any,
        pos: Any,
        cache: LayerCache,
        attend: ChunkAttention,
        part: Part,
    ) -> Any:
        """Returns the input (T, n_attended) of layer i's output projection, for normed (T, n_embd).

        It is the attention of the rows, or the output of a recurrence.
        """
        sizes, raw = self.hparams.layers[i], products["qkv"](normed)
        if sizes.state is not None:
            gates = products["gates"](normed) if "gates" in products else raw[:, :0]
            state: Any = cache
            return state.extend(StateInput(raw, gates))
        heads = self.attention_inputs(i, products, raw, pos)
        if sizes.source >= 0:
            heads = part[sizes.source, pos]._replace(q=heads.q, q_nope=heads.q_nope)
        elif i in self.hparams.sources:
            part[i, pos] = heads
        attended = attend(cache, heads)
        mixed = attended.swapaxes(0, 1).reshape(len(normed), sizes.n_attended)
        return self.rows.gate_heads(mixed, raw, sizes) if sizes.output_gate else mixed

    def attention_inputs(
        self, i: int, products: Mapping[str, Product], raw: Any, pos: Any
    ) -> AttnInput:
        """Returns the queries and rows of layer i. raw: the result of the product qkv."""
        return self.rows.heads(raw, self.layers[i], self.hparams.layers[i], pos)
