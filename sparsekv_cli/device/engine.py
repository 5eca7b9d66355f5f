"""The engine on a GPU: the device, the decoder, and the place of each cache."""

from collections.abc import Callable, Container, Hashable, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.row_sizes import Sizes
from sparsekv_cli.cache.spec import WINDOW, LayerSpec
from sparsekv_cli.device.cache import LEAST_STEP, DeviceCache
from sparsekv_cli.device.cuda import report_compiling
from sparsekv_cli.device.decoder import DeviceDecoder
from sparsekv_cli.device.host import HostCache, HostWorker, rows_on_host
from sparsekv_cli.device.layers.store import ROW_TYPES
from sparsekv_cli.device.methods import dense_cache, device_cache, host_cache
from sparsekv_cli.device.weights import DeviceWeights, resident_bytes
from sparsekv_cli.device.window import DeviceWindow
from sparsekv_cli.engine import DecoderEngine
from sparsekv_cli.errors import NoRoomError, OptionError, SparseKVError
from sparsekv_cli.kernels.attention.rows import UNIT, row_items
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.weights import Weights
from sparsekv_cli.sampling.plain import Outcome, PlainSampler
from sparsekv_cli.sequence import Sample
from sparsekv_cli.sequence import Sequence as SequenceOfModel
from sparsekv_cli.settings.config import SessionConfig

GIB = 1 << 30
CHUNK = 2048  # least prompt tokens a chunk: a GPU wants more rows than a CPU
SPARE = 0.05  # share of the free memory that stays free: for fragments, and for the libraries


class DeviceEngine(DecoderEngine):
    """One GPU and its host.

    on_host: whether all caches lie on the host. Otherwise only the caches of methods that have no
    cache for a device lie there.
    """

    decoder: DeviceDecoder
    shares_prefill = False
    draft_sources = ("ngram",)
    first_steps = 3  # one as it is, one that is captured, one that replays the capture first
    records_attended = False

    def __init__(
        self,
        decoder: DeviceDecoder,
        *,
        on_host: bool,
        n_ctx: int,
        room: int | None = None,
        note: str = "",
        ends: Callable[[], Container[int]] = frozenset,
    ) -> None:
        super().__init__(note, n_ctx, ends)
        self.room = room
        self.decoder = decoder
        self.on_host = on_host
        self.device = decoder.device
        if self.device.type == "cuda":
            self.gpu = torch.cuda.get_device_name(self.device)
        self._worker = HostWorker(decoder.device)
        self._made: WeakValueDictionary[Hashable, DeviceCache] = (
            WeakValueDictionary()
        )  # one a layer
        decoder.foreign = lambda cache: HostCache(cache, self._worker)
        decoder.wait = self._worker.wait

    def layer(self, method: Method, spec: LayerSpec) -> LayerCache:
        spec = method.layer_spec(spec)
        dense = method.is_dense(spec)
        own = device_cache(method)
        if self.on_host or not (dense or own):
            wrapper: type[HostCache] = HostCache if dense else host_cache(method)
            return wrapper(method.layer(spec), self._worker)
        check_types(spec, (spec.cache_type_k, spec.cache_type_v))
        of_kind = DeviceWindow if spec.kind == WINDOW else dense_cache()
        made = of_kind(spec, self.device) if dense else own(spec, self.device, method)
        if spec.softcap and not made.takes_softcap:
            raise SparseKVError(
                f"{method.name}: on a GPU it does not choose by capped scores; use --kv host or "
                "--device cpu"
            )
        # Kernels are compiled for such numbers of rows.
        made.n_ctx = -(-self.n_ctx // LEAST_STEP) * LEAST_STEP
        tensors = spec.calibration.values()
        of_layer = method, spec.layer, *(x.ctypes.data for x in tensors)
        made.to_host = partial(rows_on_host, self._worker)
        made.share_constants(self._made.setdefault(of_layer, made))
        return made

    def decodes_on_host(self, method: Method) -> bool:
        return self.on_host or device_cache(method) is None

    def load_kernels(self, method: Method, specs: Sequence[LayerSpec]) -> None:
        """Does nothing: a sequence's ``first_steps`` capture the CUDA graphs of its caches."""

    def _decode(
        self,
        sequences: Sequence[SequenceOfModel],
        rows: Sequence[Sequence[int]],
        samples: Sequence[Sample],
        failed: dict[int, Exception],
    ) -> list[list[Outcome]]:
        """Runs a step for each sequence with a draft, and one step for all others."""
        samplers: list[PlainSampler | None] = [None] * len(rows)
        for b, sample in enumerate(samples):
            samplers[b] = sample if isinstance(sample, PlainSampler) else None
        found: list[list[Outcome]] = [[] for _ in rows]
        single = [b for b, new in enumerate(rows) if len(new) == 1]
        if single:
            step = (
                [rows[b][0] for b in single],
                [len(sequences[b].tokens) for b in single],
                [sequences[b].caches for b in single],
            )
            chosen = [samplers[b] for b in single]
            outcomes: Sequence[Outcome]
            if any(chosen):
                outcomes = self.decoder.choose_batch(chosen, *step)
            else:
                outcomes = list(self.decoder.decode_batch(*step))
            for b, outcome in zip(single, outcomes, strict=True):
                found[b].append(outcome)
        for b, new in enumerate(rows):
            if len(new) > 1:
                sampler = samplers[b]
                # A rejected token must draw no random number.
                greedy = sampler if sampler is not None and sampler.chain.is_greedy else None
                sequence = sequences[b]
                caches = [cache for cache in sequence.caches if isinstance(cache, DeviceCache)]
                found[b] = self.decoder.decode_draft(new, len(sequence.tokens), caches, greedy)
        return found


def open_device_engine(
    device: torch.device,
    hparams: HParams,
    architecture: Architecture,
    weights: Weights,
    method: Method,
    config: SessionConfig,
    n_threads: int,
    n_ctx: int,
    on_compile: Callable[[str, int, int], None] | None = None,
    ends: Callable[[], Container[int]] = frozenset,
) -> DeviceEngine:
    """Loads the weights and decides the place of the KV cache. on_compile: see device/cuda.py.

    Raises SparseKVError, with the numbers, for a model that does not fit. If ``config.kv`` is auto,
    a KV cache that does not fit stays on the host. Then the engine's note says so.
    """
    if host_only := hparams.host_only:
        raise SparseKVError(
            f"architecture {hparams.architecture} with {host_only} does not run on a GPU; use "
            "--device cpu"
        )
    if config.prefill_dtype == "int8":
        raise SparseKVError("--prefill-dtype int8 is for a CPU; a GPU takes bf16 or f32")
    torch.set_num_threads(n_threads)
    torch.set_grad_enabled(False)
    mode = "quantized" if config.gpu_weights == "auto" else config.gpu_weights
    dtype = torch.float32 if config.prefill_dtype == "f32" else torch.bfloat16
    chunk = max(config.chunk, CHUNK)
    room = free_bytes(device, config.vram_limit)
    on_host, note, cache = config.kv == "host", "", 0
    if not on_host and device_cache(method) is not None:
        cache = cache_bytes(hparams, method.kv_types, n_ctx)
    if room is not None:
        fixed = resident_bytes(weights, mode) + scratch_bytes(hparams, chunk)
        parts = f"weights ({mode}) and scratch {fixed / GIB:.1f} GiB"
        if fixed > room:
            raise NoRoomError(
                f"the GPU has {room / GIB:.1f} GiB to use, but {parts} are needed; use --device cpu"
            )
        if fixed + cache > room:
            parts += f", KV cache of {n_ctx} tokens {cache / GIB:.1f} GiB"
            if config.kv == "device":
                raise NoRoomError(
                    f"the GPU has {room / GIB:.1f} GiB to use, but {parts} are needed; use --kv "
                    "host, or a smaller --ctx-size"
                )
            has = f"the GPU has {room / GIB:.1f} GiB to use"
            note = f"the KV cache stays on the host: {has} ({parts})"
            on_host = True
        room = None if on_host else room - fixed
    if config.speculate == "ngram" and (on_host or not takes_drafts(method)):
        where = "with K and V on the host" if on_host else f"for method {method.name}"
        raise OptionError(
            f"--speculate ngram makes no drafts on a GPU {where}; use --speculate off, or "
            "--device cpu"
        )
    if on_compile is not None:
        report_compiling(on_compile)
    decoder = DeviceDecoder(
        hparams, architecture, weights, DeviceWeights(weights, device, mode, dtype),
        n_threads=n_threads, chunk=chunk,
    )  # fmt: skip
    return DeviceEngine(decoder, on_host=on_host, n_ctx=n_ctx, room=room, note=note, ends=ends)


def takes_drafts(method: Method) -> bool:
    """Returns whether a step of a sequence on a GPU can have several rows."""
    own = device_cache(method)
    return getattr(own, "takes_drafts", False)  # a function makes the cache of a few methods


def check_types(layer: Sizes, types: tuple[str, str]) -> None:
    """Raises SparseKVError if kernels cannot read the layer's rows of K and V on a GPU."""
    named = f"--cache-type-k {types[0]} and --cache-type-v {types[1]}"
    for name, d in zip(types, (layer.head_dim, layer.value_dim), strict=True):
        if name not in ROW_TYPES:
            raise SparseKVError(
                f"{named}: caches on a GPU are {' or '.join(ROW_TYPES)}; use --kv host or "
                "--device cpu"
            )
        if name == "q8_0" and d % UNIT:
            raise SparseKVError(
                f"{named}: q8_0 on a GPU needs heads of a multiple of {UNIT} elements, and they "
                f"have {d}; use --kv host or --device cpu"
            )


def cache_bytes(hparams: HParams, types: tuple[str, str], n_ctx: int) -> int:
    """Returns the bytes of K and V of n_ctx tokens on a GPU.

    They include a layer's rows as f16, which a prefill reads, if the rows have another type.
    """
    total = widest = 0
    for layer in hparams.layers:
        check_types(layer, types)
        as_f16 = layer.kv_bytes(n_ctx)
        sizes = zip((layer.head_dim, layer.value_dim), types, strict=True)
        row = sum(row_items(d, ROW_TYPES[name]) * ROW_TYPES[name].itemsize for d, name in sizes)
        total += as_f16 * row // (2 * (layer.head_dim + layer.value_dim))
        widest = max(widest, as_f16)
    return total + (0 if types == ("f16", "f16") else widest)


def free_bytes(device: torch.device, limit: float) -> int | None:
    """Returns the bytes of the device's memory to use. limit: in GiB, 0: none. None: no GPU."""
    if device.type != "cuda":
        return int(limit * GIB) or None
    torch.cuda.empty_cache()  # torch keeps the memory of closed models
    free = int(torch.cuda.mem_get_info(device)[0] * (1 - SPARE))
    return min(free, int(limit * GIB)) if limit else free


def scratch_bytes(hparams: HParams, chunk: int) -> int:
    """Returns about the bytes that a chunk needs next to weights and cache.

    These are a layer's bf16 matrices and the chunk's rows.
    """
    n_embd, most = hparams.n_embd, 0
    for layer in hparams.layers:
        heads = (layer.n_head + layer.n_head_kv) * (layer.head_dim + layer.value_dim)
        n_ff, of_rows = layer.n_ff, layer.n_ff
        if layer.experts is not None:  # all matrices, and the rows of all pairs
            of_experts = layer.experts
            n_ff = of_experts.n_expert * of_experts.n_ff_expert + of_experts.n_ff_shared
            of_rows = of_experts.n_expert_used * (of_experts.n_ff_expert + n_embd)
        matrices = 2 * n_embd * (heads + 3 * n_ff)
        rows = 2 * chunk * (4 * n_embd + 3 * heads + 4 * of_rows)
        most = max(most, matrices + rows)
    return most
