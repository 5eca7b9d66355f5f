"""The decoder on a device: prefill by dense matrix products, decode by kernels over the weights.

A decode step of B sequences is one program of launches, captured in CUDA graphs. A layer with a
cache on the host interrupts the program. Letters as in cache/spec.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from sparsekv_cli.cache.layer import ChunkAttention, LayerCache
from sparsekv_cli.cache.spec import AttnInput
from sparsekv_cli.device.batching import Planner, Run, StepPlan, end_rows, rows_of_step
from sparsekv_cli.device.cache import DeviceCache, DeviceInput, StepNumbers
from sparsekv_cli.device.choosing import Choosing, settings_of
from sparsekv_cli.device.graphs import Piece, Steps, in_order
from sparsekv_cli.device.host import HostCache
from sparsekv_cli.device.layers.experts import DeviceExperts
from sparsekv_cli.device.layers.prefill import attend_causal
from sparsekv_cli.device.layers.rope import tables_on
from sparsekv_cli.device.layers.rows import DeviceRows
from sparsekv_cli.device.layers.store import DeviceStore
from sparsekv_cli.device.step import StepBuffers
from sparsekv_cli.device.streams import join_all
from sparsekv_cli.device.weights import DeviceWeights
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.kernels.attention.decode import Attended
from sparsekv_cli.kernels.layer.rows import Added
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.forward import Copies, Forward, OnHidden, OnPart, OnRows, Product, Progress
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.weights import Weights
from sparsekv_cli.sampling.plain import Outcome, PlainSampler

Result = TypeVar("Result")


class DeviceDecoder(Forward):
    """A model's forward pass on a device.

    foreign: takes a cache that was not made for the device, and returns one that can be prefilled.
    wait: waits until the host has all rows that are on their way to it.
    """

    least_many = 0  # experts have the same products for any number of rows
    rows: DeviceRows
    foreign: Callable[[LayerCache], HostCache]
    wait: Callable[[], None]

    def __init__(
        self,
        hparams: HParams,
        architecture: Architecture,
        weights: Weights,
        device_weights: DeviceWeights,
        *,
        n_threads: int,
        chunk: int,
    ) -> None:
        self.hparams = hparams
        self.architecture = architecture
        self.weights = weights
        self.n_threads = n_threads
        self.chunk = chunk
        self.device = device_weights.device
        self.dtype = device_weights.dtype
        self.prefill_dtype = self.rows_dtype = "f32" if self.dtype == torch.float32 else "bf16"
        is_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if is_gpu else str(self.device)
        self.gpu = name, torch.__version__, device_weights.mode, chunk
        self._on_device = device_weights
        self.rope = tables_on(self.device, hparams, weights)
        self.layers = [layer.vectors for layer in device_weights.layers]
        self.output_norm = device_weights.output_norm
        self.rows = DeviceRows(hparams, self.rope, architecture, self.dtype)
        self._planner = Planner()
        self._steps = Steps(self.device)
        self._buffers = StepBuffers(hparams, 1, self.device)
        # Steps with a draft, by their rows. They alternate with other steps, whose captures stay.
        self._for_drafts: dict[int, tuple[StepBuffers, Steps]] = {}
        self._has_draft = False  # whether the step that runs has one
        # Position and caches of each sequence in the step that runs.
        self._positions: Sequence[int] = ()
        self._caches: Sequence[Sequence[LayerCache]] = ()

    # --- many rows, layer by layer ----------------------------------------------------------------

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
        """Does Forward.forward_steps. At its end every cache has its rows, on the host too."""
        self._planner.forget()
        mine = self._known(caches)
        logits = yield from super().forward_steps(
            ids, pos, mine, all_logits=all_logits,
            attend=attend and (lambda cache, x: cache.attend(attend, x)), grid=grid,
            on_rows=on_rows, on_part=on_part, on_hidden=on_hidden, copies=copies,
            vocabulary=vocabulary,
        )  # fmt: skip
        self.wait()
        return logits

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return super().embed(ids).to(self.device)

    def products(self, i: int) -> dict[str, Product]:
        return self._on_device.layers[i].dense(self.dtype)

    def feed_forward(self, i: int, products: Any, x: torch.Tensor) -> torch.Tensor:
        ffn = self._on_device.layers[i].ffn
        if not isinstance(ffn, DeviceExperts):
            return super().feed_forward(i, products, x)
        return ffn.prefill(x, self.layers[i].ffn_norm, products, self.rows)

    def attend(self, cache: LayerCache, x: AttnInput) -> torch.Tensor:
        rows: DeviceStore = cache.extend(x)
        return attend_causal(x.q, rows.keys(), rows.values(), cache.spec)

    def add_inputs(self, i: int, products: Any, x: torch.Tensor, inputs: Any, pos: int) -> None:
        if (scale := self.layers[i].scale) != 1.0:
            x *= scale

    def end_layer(self, i: int) -> None:
        """Does nothing, because the weights stay on the device."""

    def output(self, normed: torch.Tensor, vocabulary: np.ndarray | None) -> np.ndarray:
        step = 64  # rows at a time: a vocabulary is wide
        tokens: Any = slice(None)
        if vocabulary is not None:
            tokens = torch.from_numpy(vocabulary).to(self.device)
        head, rows = self._on_device.output, normed.float().split(step)
        return torch.cat([head.apply(part)[:, tokens].cpu() for part in rows]).numpy()

    def plan_for(self, n_rows: int) -> None:
        """Makes later steps launch what they launch for so many rows at least, for a warm-up."""
        self._planner.least_rows = n_rows
        self._planner.forget()

    # --- a row a sequence -------------------------------------------------------------------------

    def decode_batch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        caches: Sequence[Sequence[LayerCache]],
    ) -> np.ndarray:
        """See Decoder.decode_batch: a token for each sequence. Returns logits (B, n_vocab)."""
        none, known = [None] * len(tokens), [self._known(layers) for layers in caches]
        return self._run_step(tokens, positions, known, none, StepBuffers.logits)

    def _known(self, caches: Sequence[LayerCache]) -> list[LayerCache]:
        """Returns the caches, each that this engine did not make in a HostCache."""
        return [c if isinstance(c, DeviceCache | HostCache) else self.foreign(c) for c in caches]

    def choose_batch(
        self,
        samplers: Sequence[PlainSampler | None],
        tokens: Sequence[int],
        positions: Sequence[int],
        caches: Sequence[Sequence[LayerCache]],
    ) -> list[Outcome]:
        """Does ``decode_batch``, then samplers choose the tokens. The logits stay on the device.

        samplers: one for each sequence. A sequence without one gets its logits, f32 (n_vocab,).
        """
        are_chosen = [sampler is not None for sampler in samplers]
        found = self._run_step(
            tokens, positions, caches, samplers,
            lambda buffers, order: buffers.outcomes(order, are_chosen),
        )  # fmt: skip
        for sampler in samplers:
            if sampler is not None:
                sampler.drawn()
        return found

    def decode_draft(
        self,
        tokens: Sequence[int],
        pos: int,
        caches: Sequence[DeviceCache],
        sampler: PlainSampler | None = None,
    ) -> list[Outcome]:
        """Adds the tokens of one sequence from ``pos`` on, in one step. All but one are a draft.

        ``most_rows`` allows so many. Returns an outcome after each token. sampler: chooses the best
        token. ``keep`` takes rows back.
        """
        n_rows = rows_of_step(len(tokens))
        if n_rows not in self._for_drafts:
            buffers = StepBuffers(self.hparams, n_rows, self.device)
            self._for_drafts[n_rows] = buffers, Steps(self.device)
        before = self._buffers, self._steps
        self._buffers, self._steps = self._for_drafts[n_rows]
        samplers = [sampler] * n_rows
        padded = [*tokens, *[tokens[-1]] * (n_rows - len(tokens))]
        try:
            return self._run_step(
                padded, range(pos, pos + n_rows), [caches] * n_rows, samplers,
                lambda buffers, order: buffers.outcomes(order, [sampler is not None] * n_rows),
                n_drafted=len(tokens) - 1,
            )[: len(tokens)]  # fmt: skip
        finally:
            self._planner.forget()
            self._buffers, self._steps = before

    def _run_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        caches: Sequence[Sequence[LayerCache]],
        samplers: Sequence[PlainSampler | None],
        result: Callable[[StepBuffers, Sequence[int]], Result],
        n_drafted: int = 0,
    ) -> Result:
        """Runs a step of B sequences. samplers: choose tokens; None: the logits come to the host.

        result: waits for the step and returns the outcomes. It gets the order of the sequences.
        n_drafted: if it is not 0, all rows are of one sequence: a row, a draft of so many, padding.
        """
        n_rows = rows_of_step(len(tokens))
        order = range(n_rows) if n_drafted else self._planner.order(positions, caches)
        choosing = Choosing.of(samplers)
        if n_rows != self._buffers.n_rows:
            self._buffers = StepBuffers(self.hparams, n_rows, self.device)
        positions, caches = [positions[b] for b in order], [caches[b] for b in order]
        buffers, self._positions, self._caches = self._buffers, positions, caches
        on_device = [[c for c in layers if isinstance(c, DeviceCache)] for layers in caches]
        self.rope.reserve(max(positions) + 1)
        for row, (b, pos) in enumerate(zip(order, positions, strict=True)):
            self.embed_row(tokens[b], buffers.host_x[row].numpy())
            budgets = [cache.budget_rows(pos + 1) for cache in on_device[row]]
            buffers.set_numbers(row, pos, min(budgets, default=pos + 1))
            if choosing.drawing is not None:
                buffers.set_chain(row, settings_of(samplers[b]))
        try:
            self._has_draft = n_drafted > 0
            plan = self._planner.begin(positions, caches, is_draft=self._has_draft)
            for row in range(len(order), n_rows):
                buffers.set_numbers(row, plan.n_padded - 1, 1)
            self._steps.run(
                [buffers, *plan.owners(caches)],
                (len(self.rope.full.cos), plan.key, choosing),
                lambda: list(self._program(caches, plan, choosing)),
                watched=any(c.on_step is not None for layers in on_device for c in layers),
            )
            end_rows(on_device, positions, n_drafted)  # while the device works
            found = result(buffers, order)
        except BaseException as error:  # such as Ctrl-C: the step does not count
            for layers, pos in reversed([*zip(on_device, positions, strict=True)]):
                for cache in layers:
                    cache.drop_step(pos)
            if isinstance(error, torch.OutOfMemoryError):
                raise SparseKVError(
                    f"the GPU has no memory for a step after {max(positions)} tokens; use a "
                    "smaller --ctx-size, or --kv host"
                ) from None
            raise
        finally:
            self._caches = ()
        self._planner.end(plan, positions)
        return found

    def _program(
        self, caches: Sequence[Sequence[LayerCache]], plan: StepPlan, choosing: Choosing
    ) -> Iterator[Piece]:
        """Computes a step, from the embedding in the buffers to the logits there, or a token."""
        buffers, runs = self._buffers, plan.runs_of(caches)
        on_device = [c for layers in caches for c in layers if isinstance(c, DeviceCache)]
        join = partial(join_all, [c.side for c in on_device if c.side is not None])
        calls: list[Callable[[], None]] = [buffers.upload]
        beside: Callable[[], None] | None = None
        for i, on_host in enumerate(plan.on_host):
            calls.append(partial(self._project, i))
            calls += [partial(self._attend, i, run) for run in runs[i]]
            if on_host:
                yield Piece(in_order([*calls, buffers.download_inputs, join]), False, beside)
                yield Piece(partial(self._attend_on_host, i, on_host), True)
                calls = [partial(self._take_in, i, on_host)]
                beside = partial(self._end_on_host, i, on_host)
            calls.append(partial(self._finish, i))
        yield Piece(in_order([*calls, partial(self._output, choosing), join]), False, beside)

    def _project(self, i: int) -> None:
        """Writes layer i's q, k, v to the buffers, from the residual stream."""
        self._split(i, self._normed(i), self._buffers.inputs(i))

    def _normed(self, i: int) -> torch.Tensor:
        """Adds what layer i - 1 has left to add. Returns the input of layer i's projections."""
        return self._norm(self.layers[i].attn_norm, self._left_by(i - 1))

    def _left_by(self, i: int) -> Added | None:
        """Returns what layer i has left to add to the residual stream, or None for i = -1."""
        if i < 0:
            return None
        layer = self.layers[i]
        return self.rows.added(self._buffers.y, layer.ffn_post_norm, factor=layer.scale)

    def _norm(self, weight: Any, added: Added | None) -> torch.Tensor:
        """Returns the norm of the residual stream after ``added``, in f32."""
        return self.rows.last_norm(self._buffers.x, weight, added)

    def _split(self, i: int, normed: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """Splits layer i's projections of ``normed`` f32 (B, n_embd): q, k, v, q_nope, k_nope."""
        raw = self._on_device.layers[i].qkv.apply(normed)
        self.rows.split(raw, self.layers[i], self.hparams.layers[i], self._buffers.pos, inputs)

    def _step(self, rows: slice) -> StepNumbers:
        buffers = self._buffers
        parts = buffers.pos, buffers.n, buffers.budget, buffers.arrived
        return StepNumbers(*(part[rows] for part in parts))

    def _attend(self, i: int, run: Run) -> None:
        """Writes the attention of a run's rows to the buffers."""
        buffers, rows = self._buffers, slice(run.first, run.last)
        x = DeviceInput._make((*(t[rows] for t in buffers.inputs(i)), self._step(rows)))
        if self._has_draft:
            run.cache.store_draft(x)
        run.cache.decode(x, buffers.attended(i)[rows])
        if run.cache.on_step is not None:
            run.cache.on_step(x)

    def _attend_on_host(self, i: int, rows: Sequence[int]) -> None:
        """Writes the attention of rows whose caches lie on the host to the host's buffers."""
        attended, lse = (x.numpy() for x in self._buffers.from_host(i))
        for b, cache in self._host_caches(i, rows):
            x = AttnInput._make((*self._buffers.host_inputs(i, b), self._positions[b]))
            out = cache.decode(x)
            attended[b] = out[:, : self.hparams.layers[i].value_dim]
            if cache.has_device_part:
                lse[b] = cache.lse

    def _end_on_host(self, i: int, rows: Sequence[int]) -> None:
        """Ends the step of layer i's caches on the host. Their output is already being copied."""
        for b, cache in self._host_caches(i, rows):
            cache.end_step(self._positions[b] + 1)

    def _host_caches(self, i: int, rows: Sequence[int]) -> Iterator[tuple[int, HostCache]]:
        """Yields the rows that are no padding, with their caches of layer i."""
        for b in rows:
            if b < len(self._caches):
                cache = self._caches[b][i]
                assert isinstance(cache, HostCache)
                yield b, cache

    def _take_in(self, i: int, rows: Sequence[int]) -> None:
        """Takes the host's results of layer i, and merges the device's parts with them."""
        buffers = self._buffers
        q, out = buffers.inputs(i)[0], buffers.attended(i)
        in_parts = {b: cache for b, cache in self._host_caches(i, rows) if cache.has_device_part}
        for b in (b for b in rows if b not in in_parts):
            buffers.upload_attended(i, b)
        if in_parts:
            seen = buffers.upload_part(i)
            for b, cache in in_parts.items():
                row = slice(b, b + 1)
                cache.attend_on_device(q[row], Attended(seen.out[row], seen.lse[row]), out[row])

    def _finish(self, i: int) -> None:
        """Computes the rest of layer i, after its attention. Its last output stays in ``y``."""
        layer, buffers, vectors = self._on_device.layers[i], self._buffers, self.layers[i]
        layer.o.apply(buffers.attended(i).flatten(1), buffers.y)
        added = self.rows.added(buffers.y, vectors.attn_post_norm, vectors.o.bias)
        normed = self._norm(vectors.ffn_norm, added)
        layer.ffn.step(buffers.x, normed, self.rows, buffers.y)

    def _output(self, choosing: Choosing) -> None:
        left = self._left_by(self.hparams.n_layer - 1)
        logits = self._on_device.output.apply(self._norm(self.output_norm, left))
        if softcap := self.hparams.logit_softcap:
            logits.div_(softcap).tanh_().mul_(softcap)
        if choosing.drawing is not None:
            self._buffers.choose(logits, choosing.drawing)
        if choosing.downloads:
            self._buffers.download_logits(logits)
