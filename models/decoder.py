"""The CPU's decoder: prefill layer by layer in chunks of rows, decode in fused calls.

``forward`` (forward.py) is the prefill and, in f32, the reference; matmul.py has its products.
``decode`` runs the kernels of cpu/layer/decode.py on the quantised weights, with one row for each
sequence. tests/models/test_decoder.py compares the two.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import ChunkAttention, LayerCache, decode_caches
from sparsekv_cli.cache.spec import AttnInput, StateInput
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.cpu.layer import tiles_int8
from sparsekv_cli.cpu.layer.activation import ACTIVATIONS
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.chunk_steps import ChunkSteps, FusedBF16ChunkSteps, FusedChunkSteps
from sparsekv_cli.models.decode_step import DecodeStep
from sparsekv_cli.models.experts import prefill_experts
from sparsekv_cli.models.forward import Forward, Part, Product
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.identity import DENSE, rope_tables
from sparsekv_cli.models.layers.input_steps import PromptInputs
from sparsekv_cli.models.layers.latent_expanded import LEAST_ROWS, ExpandedRows
from sparsekv_cli.models.layers.latent_steps import LatentSteps
from sparsekv_cli.models.matmul import FewRowsProducts, ManyRowsProducts, stacks
from sparsekv_cli.models.reading import sparse_prefill
from sparsekv_cli.models.repack import OnLoad, repack_weights, wants_repacking
from sparsekv_cli.models.weights import ExpertWeights, LatentWeights, Weights

# A prompt of at most so many rows uses decode's products, with inputs of 16 bits. These lose
# nothing, so greedy text does not depend on the CPU's kind. With VNNI they take as long as the
# products for many rows. With AMX, or AVX2 alone, a short prompt takes some milliseconds more.
FEW_ROWS = 48
FEW_PLANES = 2
DEEP = 1024  # rows of context at which a few new rows spend as long on attention as on products
# Most mean rows of an expert for decode's products in a prompt, by the prefill's type. With few
# rows, decoding weights to panels takes longer than these products. With int8 both take the same
# time at 50 rows (Zen 5).
FEW_ROWS_AN_EXPERT = {"f32": 0, "bf16": 8, "int8": 32}
# Types of a prefill's products with which prompts of all lengths attend to latent rows.
LATENT_DTYPES = ("f32",)


def cpu_prefill_dtype(wanted: str, head_dim: int) -> str:
    """Returns the type of a prefill's products for --prefill-dtype ``wanted``.

    auto is bf16 if the CPU has tiles of it (AMX) and heads have an even size. Otherwise it is int8
    if the CPU has byte products, else f32. Raises SparseKVError for bf16 if products in bf16 do not
    work.
    """
    if wanted == "auto" and bf16.HAS_TILES and head_dim % 2 == 0:
        return "bf16"
    other = "int8" if tiles_int8.is_available() else "f32"
    if wanted == "bf16" and rows_dtype("bf16", head_dim) != "bf16":
        what = f"heads of {head_dim} elements" if bf16.is_available() else "this CPU"
        raise SparseKVError(f"--prefill-dtype bf16 does not work with {what}: use {other}")
    return other if wanted == "auto" else wanted


def rows_dtype(prefill_dtype: str, head_dim: int) -> str:
    """Returns the type of the rows between a prefill's products, and of its attention: f32 or bf16.

    Products in bf16 and int8 use rows in bf16 if the head size is even and the CPU multiplies bf16
    (AMX or AVX-512 BF16).
    """
    has_bf16 = prefill_dtype != "f32" and bf16.is_available() and head_dim % 2 == 0
    return "bf16" if has_bf16 else "f32"


def give_back_memory() -> None:
    """Returns freed memory to the system. glibc alone keeps some of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class Decoder(Forward):
    """The CPU's decoder."""

    def __init__(
        self,
        hparams: HParams,
        architecture: Architecture,
        weights: Weights,
        *,
        n_threads: int,
        prefill_dtype: str,
        chunk: int,
        repack: str = "auto",
        n_planes: int = 2,
        prefill_budget: int = 0,
        sparse_prompt: int = 0,
        on_load: OnLoad | None = None,
    ) -> None:
        """prefill_dtype: type of the products: ``f32``, ``bf16`` (see FEW_ROWS) or ``int8``.

        repack: ``auto``, ``on`` or ``off``: whether ``decode`` reads a repacked copy of the
        weights. n_planes: bytes of an activation in decode. prefill_budget: past rows that a chunk
        of a prompt attends to; 0: all. sparse_prompt: rows after the shortest prompt for which that
        holds. on_load: gets the progress of the copy.
        """
        self.hparams = hparams
        self.architecture = architecture
        self.weights = weights
        self.n_threads = n_threads
        self.prefill_dtype = prefill_dtype
        self.rows_dtype = rows_dtype(prefill_dtype, hparams.head_dim)
        self.chunk = chunk
        self.rope = rope_tables(hparams, weights.rope_freqs)
        self._model = (hparams, self.rope, architecture)
        self.layers, self.output_norm = weights.layers, weights.output_norm
        repacks = wants_repacking(weights, repack)
        self._decode_weights = repack_weights(weights, on_load) if repacks else weights
        self.n_planes = n_planes
        self.prefill_budget, self.sparse_prompt = prefill_budget, sparse_prompt
        self._few_products = FewRowsProducts(n_threads, FEW_PLANES)
        self._decode_products = FewRowsProducts(n_threads, n_planes)
        self._expanded_rows = ExpandedRows()
        self._step = self._new_step(1)

    @cached_property
    def _few(self) -> tuple[ChunkSteps, Any]:
        """The steps between a prefill's products, and the products, for few rows."""
        return FusedChunkSteps(*self._model, self.n_threads), self._few_products

    @cached_property
    def _many(self) -> tuple[ChunkSteps, Any]:
        """The steps between a prefill's products, and the products, for any number of rows."""
        is_bf16 = self.rows_dtype == "bf16"
        rows = (FusedBF16ChunkSteps if is_bf16 else FusedChunkSteps)(*self._model, self.n_threads)
        return rows, ManyRowsProducts(self.n_threads, self.prefill_dtype, self.rows_dtype)

    # --- a row a sequence, fused ----------------------------------------------------------------

    def decode_batch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        caches: Sequence[Sequence[LayerCache]],
        failed: dict[int, Exception] | None = None,
    ) -> np.ndarray:
        """Decodes B rows, which share every load of a weight; returns logits f32 (B, n_vocab).

        caches: for each row the caches of its sequence, one a layer. Rows of one sequence follow
        each other by position. ``keep`` can undo all of these but the first. A row's logits have
        the same bits as when it is decoded alone. failed: gets the error of a sequence whose cache
        fails, by its place. The others go on, and its logits are not valid. The error of the only
        sequence is raised.
        """
        step, n_rows = self._begin(tokens, positions), len(tokens)
        failed = {} if failed is None else failed
        logits = step.new_logits(n_rows)  # first, because no cache has changed yet
        firsts = [b for b in range(1, n_rows) if caches[b][0] is not caches[b - 1][0]]
        spans = list(pairwise([0, *firsts, n_rows]))  # of rows of one sequence
        for i in range(len(caches[0])):
            inputs: list[Any] = list(step.inputs[i][:n_rows])
            if self.hparams.layers[i].state is None:
                inputs = [AttnInput._make((*x, p)) for x, p in zip(inputs, positions, strict=True)]
            else:
                inputs = [StateInput._make(x) for x in inputs]
            of_layer = [caches[first][i] for first, _ in spans]
            rows = [inputs[first:last] for first, last in spans]
            step.finish(i, decode_caches(of_layer, rows, failed), n_rows)
        step.write_logits(logits)
        return self.cap(logits)

    def hidden(self, n_rows: int) -> np.ndarray:
        """Returns the hidden rows f32 (n_rows, n_embd) of the last ``decode_batch``."""
        return self._step.hidden(n_rows)

    def _begin(self, tokens: Sequence[int], positions: Sequence[int]) -> DecodeStep:
        """Embeds the tokens and projects the inputs of layer 0."""
        n_rows = len(tokens)
        if n_rows > self._step.capacity:
            self._step = self._new_step(max(n_rows, 2 * self._step.capacity))
        step = self._step
        self.rope.reserve(max(positions) + 1)
        for b, (token, pos) in enumerate(zip(tokens, positions, strict=True)):
            self.embed_row(token, step.x[b])
            step.set_position(b, pos, self.rope)
        step.begin(tokens)
        return step

    def _new_step(self, n_rows: int) -> DecodeStep:
        return DecodeStep(
            self.hparams, self._decode_weights, self.architecture, n_rows, self.n_planes,
            self.n_threads,
        )  # fmt: skip

    # --- many rows, layer by layer ----------------------------------------------------------------

    def prepare(self, n_rows: int) -> None:
        """Chooses the products for a prompt of n_rows rows."""
        self.rows, self._products = self._few if self.is_few(n_rows) else self._many
        self._has_few_an_expert = n_rows < self.least_many
        is_exact = self.prefill_dtype in LATENT_DTYPES
        self._has_many_rows = not is_exact and n_rows >= LEAST_ROWS
        self._expanded_rows.clear()

    def is_few(self, n_rows: int) -> bool:
        """See ``Forward``. f32 is the reference: it has the same products for any n_rows."""
        return self.prefill_dtype != "f32" and n_rows <= FEW_ROWS

    @property
    def least_many(self) -> int:
        """The fewest rows for which experts use the products for many rows; 0: no experts."""
        few = FEW_ROWS_AN_EXPERT[self.prefill_dtype]
        mixtures = [layer.experts for layer in self.hparams.layers if layer.experts is not None]
        return max((1 + few * m.n_expert // m.n_expert_used for m in mixtures), default=0)

    def output(self, normed: Any, vocabulary: np.ndarray | None) -> np.ndarray:
        """Returns logits f32 (T, n_vocab); few rows use products with quantised weights."""
        self._products.clear()  # the layers are done; a long prompt needs most memory here
        self._expanded_rows.clear()
        give_back_memory()
        head, rows = self.weights.output, np.ascontiguousarray(normed)
        if self.prefill_dtype != "f32" and len(rows) <= 4 and vocabulary is None:
            return self._few_products.of_stack("output", [self._decode_weights.output])(rows)
        step, exact = 8192, FewRowsProducts(self.n_threads)  # vocabulary rows at a time
        data = head.data if vocabulary is None else np.ascontiguousarray(head.data[vocabulary])
        n_tokens = head.n_rows if vocabulary is None else len(vocabulary)
        out = np.empty((len(rows), n_tokens), np.float32)
        for start in range(0, n_tokens, step):
            part = data[start : start + step]
            to = out[:, start : start + step]
            if len(rows) <= 4:
                to[:] = exact.of_stack("output", [replace(head, data=part)])(rows)
            else:
                weight = dot.dequantize(head.code, part, head.n_columns)
                with blas_threads(self.n_threads):
                    np.matmul(rows, weight.T, out=to)
            if self._decode_weights.output.repacked and vocabulary is None:  # decode reads the copy
                self.weights.file.release(part)
        return out

    def products(self, i: int) -> Mapping[str, Product]:
        is_few = self._products is self._few_products
        weights = self._decode_weights if is_few else self.weights
        return {
            name: self._products.of_stack(name, parts) for name, parts in stacks(weights.layers[i])
        }

    def feed_forward(self, i: int, products: Mapping[str, Product], x: Any) -> Any:
        layer = self.weights.layers[i]
        if not isinstance(layer.ffn, ExpertWeights):
            return super().feed_forward(i, products, x)
        if self._has_few_an_expert:
            decoded = self._decode_weights.layers[i].ffn
            assert isinstance(decoded, ExpertWeights)
            is_few = self._products is self._few_products
            few, rows = self._few_products if is_few else self._decode_products, self._few[0]
            return prefill_experts(decoded, layer.ffn_norm, x, few, rows, self.n_threads)
        return prefill_experts(
            layer.ffn, layer.ffn_norm, x, self._products, self.rows, self.n_threads
        )

    def attention_inputs(
        self, i: int, products: Mapping[str, Product], raw: Any, pos: Any
    ) -> AttnInput:
        if self.hparams.layers[i].latent is None:
            return super().attention_inputs(i, products, raw, pos)
        return self._latent(i).inputs(products, raw, pos)

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
        if self.hparams.layers[i].latent is None:
            return super().mix(i, products, normed, pos, cache, attend, part)
        latent, raw = self._latent(i), products["qkv"](normed)
        is_many = self._has_many_rows and attend == self.attend
        if is_many and self._expanded_rows.serves(cache, len(raw), latent):
            return self._expanded_rows.attend(cache, raw, products, pos, latent)
        return latent.values(attend(cache, latent.inputs(products, raw, pos)))

    def _latent(self, i: int) -> LatentSteps:
        """Returns the steps of layer i, which has latent attention."""
        is_few = self._products is self._few_products
        layer = (self._decode_weights if is_few else self.weights).layers[i]
        assert isinstance(layer, LatentWeights)
        return LatentSteps(
            layer.heads,
            self.hparams.layers[i],
            self.hparams.norm_eps,
            self.rope.full,
            self._products,
            self.rows,
            self.n_threads,
        )

    def begin_part(self, ids: Sequence[int], x: np.ndarray, pos: int) -> PromptInputs | None:
        embedding, eps = self.weights.inputs, np.float32(self.hparams.norm_eps)
        if embedding is None:
            return None
        return PromptInputs(embedding, ids, self.rows.rounded(x), pos, eps)

    def add_inputs(
        self,
        i: int,
        products: Mapping[str, Product],
        x: np.ndarray,
        inputs: PromptInputs | None,
        pos: int,
    ) -> None:
        layer, activation = self.weights.layers[i], ACTIVATIONS[self.architecture.activation]
        if inputs is not None and layer.input is not None:
            gate = products["input_gate"](self.rows.rounded(x))
            hidden = inputs.gated(i, products, gate, activation, pos, self.n_threads)
            self.rows.add(x, products["input_output"](hidden), layer.input.norm)
        if layer.scale != 1.0:
            x *= np.float32(layer.scale)

    def attend(self, cache: LayerCache, x: AttnInput) -> np.ndarray:
        """See ``Forward``. Few rows after DEEP or more rows attend in bf16, as many rows do."""
        store = cache.extend(x)
        if x.q.dtype != np.float32 or self.rows_dtype != "bf16" or store.n < DEEP:
            return attend_causal(x.q, store, cache.spec)
        q = self._many[0].rounded(x.q.reshape(-1, x.q.shape[2])).reshape(x.q.shape)
        return as_f32(attend_causal(q, store, cache.spec))

    @property
    def reading(self) -> tuple[int, ...]:
        budget = self.prefill_budget
        return (budget, sparse_prefill.CHUNK, sparse_prefill.N_DENSE) if budget else DENSE

    def sparse_budget(self, n: int) -> int | None:
        return self.prefill_budget or None if n >= self.sparse_prompt else None

    def attention_of(self, n: int) -> tuple[ChunkAttention | None, int]:
        budget = self.sparse_budget(n)
        if budget is None:
            return None, 0
        attend = sparse_prefill.SparseAttention(self.attend, budget, n, self.hparams.sources)
        return attend, sparse_prefill.CHUNK

    def end_layer(self, i: int) -> None:
        decoded = self._decode_weights.layers[i].linears()
        for in_file, copy in zip(self.weights.layers[i].linears(), decoded, strict=True):
            if copy.repacked:  # decode reads the copy
                self.weights.file.release(in_file.data)
