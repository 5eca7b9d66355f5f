"""What a session computes with: the CPU's decoder or a GPU's (device/), and their caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sparsekv_cli import warmup
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.row_sizes import check_memory, fitting_context, token_bytes
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.gpu import lacking_packages, may_have_device
from sparsekv_cli.memory import available_memory
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.weights import Weights
from sparsekv_cli.warmup import OnCompile

if TYPE_CHECKING:
    from sparsekv_cli.models.decoder import Decoder


class Engine(Protocol):
    """One model on one machine."""

    decoder: Any  # of models/decoder.py, or one with its methods
    note: str  # what the user should know of how it runs
    shares_prefill: bool  # whether one can fill caches of several methods (evaluation/prefill.py)
    first_steps: int  # of a sequence's decode steps, those that take longer than later ones
    chooses_tokens: bool  # whether the decoder has choose_batch (device/decoder.py)
    records_attended: bool  # whether caches can keep which rows a step attended to

    def layer(self, method: Method, spec: LayerSpec) -> LayerCache:
        """The cache of one layer."""

    def decodes_on_host(self, method: Method) -> bool:
        """Whether a step with ``method`` runs kernels of cpu/."""

    def load_kernels(self, method: Method, specs: Sequence[LayerSpec]) -> None:
        """Loads what the first steps with ``method`` run, as far as that can be done ahead."""


class HostEngine:
    """The CPU alone."""

    def __init__(self, decoder: Decoder, note: str) -> None:
        self.decoder = decoder
        self.note = note
        self.shares_prefill = True
        self.first_steps = 1
        self.chooses_tokens = False
        self.records_attended = True

    def layer(self, method: Method, spec: LayerSpec) -> LayerCache:
        return method.layer(spec)

    def decodes_on_host(self, method: Method) -> bool:
        return True

    def load_kernels(self, method: Method, specs: Sequence[LayerSpec]) -> None:
        warmup.load_kernels(self.decoder, method, specs)


def find_device(name: str) -> tuple[Any, str]:
    """The GPU for ``auto``, ``cpu`` or ``cuda``, a torch.device or None, and a note for the user.

    None is the CPU. SparseKVError for cuda where there is none.
    """
    if name == "cpu" or (name == "auto" and not may_have_device()):
        return None, ""
    lacks = lacking_packages()
    if lacks:
        if name == "cuda":
            raise SparseKVError(f"--device cuda: {lacks}")
        return None, f"the GPU is not used, {lacks}"
    from sparsekv_cli.device.cuda import find_cuda

    return find_cuda(name), ""


def open_engine(
    hparams: HParams,
    architecture: Architecture,
    weights: Weights,
    method: Method,
    config: SessionConfig,
    n_threads: int,
    n_ctx: int,
    on_compile: OnCompile | None,
) -> Engine:
    """The engine that ``config.device`` names; SparseKVError where there is none or no room."""
    host_only = hparams.host_only or architecture.host_only
    if config.device == "auto" and host_only:
        device, note = None, f"the GPU is not used: {host_only} run on the CPU" * may_have_device()
    else:
        device, note = find_device(config.device)
    if device is not None:
        from sparsekv_cli.device.engine import open_device_engine

        return open_device_engine(
            device, hparams, architecture, weights, method, config, n_threads, n_ctx, on_compile
        )
    if config.ctx_size:
        _check_context(hparams, method, config.ctx_size)
    from sparsekv_cli.cpu.weights.integer import activation_planes
    from sparsekv_cli.models.decoder import Decoder, cpu_prefill_dtype
    from sparsekv_cli.models.repack import wants_repacking

    dtype = cpu_prefill_dtype(config.prefill_dtype, hparams.head_dim)
    n_planes = activation_planes(config.activations)
    repacks = wants_repacking(weights, config.repack)
    warmup.compile_weight_kernels(weights, dtype, n_planes, repacks, on_compile)
    decoder = Decoder(
        hparams,
        architecture,
        weights,
        n_threads=n_threads,
        prefill_dtype=dtype,
        chunk=config.chunk,
        repack=config.repack,
        n_planes=n_planes,
    )
    return HostEngine(decoder, note)


def _check_context(hparams: HParams, method: Method, n_ctx: int) -> None:
    """SparseKVError if a context that the user asks for is larger than the machine's memory."""
    if not method.holds_all_rows:
        return
    types = method.cache_type_k, method.cache_type_v
    size = token_bytes(hparams.layers, *types)
    mend = f"take -c {fitting_context(available_memory() or 0, size)} or less"
    if types == ("f16", "f16") and "q4_0" in method.cache_types:
        mend += ", or smaller rows: --cache-type-k q8_0 --cache-type-v q8_0, or q4_0"
    check_memory(f"K and V of {n_ctx} tokens (-c)", n_ctx * size, mend)
