"""Where a model runs: on the CPU or on a GPU, and the engine that is opened there."""

from collections.abc import Callable, Container
from typing import Any

from sparsekv_cli import warmup
from sparsekv_cli.cache.row_sizes import check_memory, fitting_context, token_bytes
from sparsekv_cli.engine import DecoderEngine, HostEngine
from sparsekv_cli.errors import NoRoomError, OptionError, SparseKVError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.repack import OnLoad
from sparsekv_cli.models.weights import Weights
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.system.gpu import lacking_packages, may_have_device
from sparsekv_cli.system.memory import available_memory
from sparsekv_cli.warmup import OnCompile


def find_device(name: str) -> tuple[Any, str]:
    """Returns the GPU for ``auto``, ``cpu`` or ``cuda``, a torch.device or None, and a user's note.

    None is the CPU. Raises SparseKVError for cuda where there is none.
    """
    if name == "cpu" or (name == "auto" and not may_have_device()):
        return None, ""
    lacks = lacking_packages()
    if lacks:
        if name == "cuda":
            raise SparseKVError(f"--device cuda: {lacks}")
        return None, f"the GPU is not used, {lacks}"
    from sparsekv_cli.device.cuda import find_cuda, problem_of

    device = find_cuda(name)
    problem = "" if device is None else problem_of(device)
    if problem and name == "cuda":
        raise SparseKVError(f"--device cuda: {problem}; use --device cpu")
    return (None, f"the GPU is not used: {problem}") if problem else (device, "")


def open_engine(
    hparams: HParams,
    architecture: Architecture,
    weights: Weights,
    method: Method,
    config: SessionConfig,
    n_threads: int,
    n_ctx: int,
    on_compile: OnCompile | None,
    ends: Callable[[], Container[int]] = frozenset,
    draft_bytes: int = 0,
    on_load: OnLoad | None = None,
) -> DecoderEngine:
    """Returns the engine that ``config.device`` names; for auto the CPU's if the GPU has no room.

    ends: returns the tokens that end a message. draft_bytes: bytes of the rows of a draft model.
    on_load: as load_model takes it. Raises SparseKVError if there is no such device or no room.
    """
    host_only = hparams.host_only
    if config.device == "auto" and host_only:
        device, note = None, f"the GPU is not used: {host_only} run on the CPU" * may_have_device()
    else:
        device, note = find_device(config.device)
    if device is not None:
        if config.speculate not in ("auto", "off", "ngram") or config.draft_model:
            what = "--draft-model" if config.draft_model else f"--speculate {config.speculate}"
            raise OptionError(f"{what} works on the CPU only so far: use --device cpu")
        if config.prefill_attention == "sparse":
            what = "--prefill-attention sparse"
            raise OptionError(f"{what} works on the CPU only so far: use --device cpu")
        if device.type == "cuda" and not host_only:
            warmup.compile_for_gpus_host(weights.file.path, method, config.kv == "host")
        from sparsekv_cli.device.engine import open_device_engine

        try:
            return open_device_engine(
                device, hparams, architecture, weights, method, config, n_threads, n_ctx,
                on_compile, ends,
            )  # fmt: skip
        except NoRoomError as error:
            if config.device != "auto":
                raise
            note = f"the GPU is not used: {str(error).partition(';')[0]}"
    blocks = [hparams.next_block] if config.speculate == "mtp" and hparams.next_block else []
    if config.ctx_size:
        more = token_bytes(blocks, "f16", "f16") + -(-draft_bytes // config.ctx_size)
        _check_context(hparams, method, config.ctx_size, more)
    from sparsekv_cli.models.decoder import Decoder, cpu_prefill_dtype
    from sparsekv_cli.models.reading.sparse_prefill import shortest_prompt
    from sparsekv_cli.models.repack import wants_repacking

    dtype = cpu_prefill_dtype(config.prefill_dtype, hparams.head_dim)
    n_planes = int(config.activations) // 8
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
        prefill_budget=config.sparse_budget or 0,
        sparse_prompt=shortest_prompt(config.prefill_attention),
        on_load=on_load,
    )
    if not blocks:
        return HostEngine(decoder, note, n_ctx, ends, on_compile)
    from sparsekv_cli.models.next_token.decoder import NextTokenDecoder
    from sparsekv_cli.models.next_token.weights import read_next_token

    block = read_next_token(weights, hparams, architecture)
    warmup.compile_weight_kernels(block.model, dtype, n_planes, repacks, on_compile)
    return HostEngine(decoder, note, n_ctx, ends, on_compile, NextTokenDecoder(decoder, block))


def _check_context(hparams: HParams, method: Method, n_ctx: int, more: int) -> None:
    """Raises SparseKVError if a context that the user states exceeds the machine's memory.

    more: bytes a token of the layers that make drafts.
    """
    if not method.holds_all_rows:
        return
    size = token_bytes(hparams.layers, *method.kv_types) + more
    mend = f"take at most {fitting_context(available_memory() or 0, size)} tokens"
    if method.kv_types == ("f16", "f16") and "q4_0" in method.cache_types:
        mend += ", or smaller rows: --cache-type-k q8_0 --cache-type-v q8_0, or q4_0"
    check_memory(f"K and V of {n_ctx} tokens", n_ctx * size, mend)
