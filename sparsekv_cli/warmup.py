"""Compiles the CPU kernels before their first use, and reports it.

numba compiles a kernel when it is first called and keeps it on disk. Markers next to that cache
tell which kernels are there. With them a first run can report its long steps, and other runs start
at once. ``sparsekv-cli warmup`` runs all tasks of this file. A model runs the tasks that it needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import FULL, STATE, AttnInput, Budget, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.methods.base import Method
from sparsekv_cli.methods.full import Full

if TYPE_CHECKING:
    from sparsekv_cli.models.decoder import Decoder
    from sparsekv_cli.models.weights import Weights

OnCompile = Callable[[str, int, int], None]  # the kernel, steps done, all steps
N_PROMPT = 256  # rows of the trial sequence, more than a method's smallest budget
N_LOAD = 64  # rows that every prefill takes as many


def kernel_folder() -> Path | None:
    """Returns the folder of the CPU's kernels, or None if they are not kept."""
    from sparsekv_cli.cpu.jit.compiling import kernel_cache

    return kernel_cache.STORE.folder


class CompileTask(NamedTuple):
    """One thing to compile. Tasks with the same marker are done when all of them are."""

    marker: str
    what: str
    call: Callable[[], object]


def compile_weight_kernels(
    weights: Weights, dtype: str, n_planes: int, repacks: bool, report: OnCompile | None
) -> None:
    """Compiles the dot product and the dequantisation of every weight format of a model.

    dtype: type of the prefill's products, f32, bf16 or int8. n_planes: bytes of decode's
    activations. repacks: whether decode reads repacked weights.
    """
    from sparsekv_cli.cpu.weights.interleaved import can_repack
    from sparsekv_cli.models.decoder import FEW_PLANES
    from sparsekv_cli.models.weights import ExpertWeights

    linears = [linear for layer in weights.layers for linear in layer.linears()]
    linears.append(weights.output)
    routers = [layer.ffn.router for layer in weights.layers if isinstance(layer.ffn, ExpertWeights)]
    codes = {linear.code for linear in [*linears, *routers, weights.token_embd]}
    decoded = {(w.code, repacks and can_repack(w.code, w.n_rows // w.n_matrices)) for w in linears}
    planes = {n_planes} if dtype == "f32" else {n_planes, FEW_PLANES}
    _run(list(_format_steps(codes, decoded, {dtype, "f32"}, planes)), report)


def compile_common_kernels(report: OnCompile | None) -> int:
    """Compiles kernels that need no model. Returns the number of new tasks.

    These are the probe of ``bench``, and every weight format, dequantised to every type of a
    prefill.
    """
    import numpy as np

    from sparsekv_cli.cpu import bandwidth
    from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
    from sparsekv_cli.cpu.weights.interleaved import GROUP, can_repack
    from sparsekv_cli.models.decoder import FEW_PLANES, cpu_prefill_dtype
    from sparsekv_cli.settings.config import SessionConfig

    decoded = [(code, False) for code in FORMAT_OF_CODE]
    decoded += [(code, True) for code in FORMAT_OF_CODE if can_repack(code, GROUP)]
    dtypes = {"f32", "bf16", cpu_prefill_dtype("auto", 2)}
    planes = {int(SessionConfig.activations) // 8, FEW_PLANES}
    probe = partial(bandwidth.sum_parts, np.ones(16, np.float32), 1)
    steps = [
        *_format_steps(FORMAT_OF_CODE, decoded, dtypes, planes),
        CompileTask("bandwidth", "bandwidth", probe),
    ]
    return _run(steps, report)


def _format_steps(
    codes: Collection[int],
    decoded: Collection[tuple[int, bool]],
    dtypes: Collection[str],
    planes: Collection[int],
) -> Iterator[CompileTask]:
    """Yields tasks: dot products of formats by ggml type number, kernels of prefills in ``dtypes``.

    decoded: formats of decode, and whether they are repacked. planes: the numbers of bytes of
    activations.
    """
    import numpy as np

    from sparsekv_cli.cpu.layer import choice, matmul_int8
    from sparsekv_cli.cpu.weights import dot, interleaved
    from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE

    for code in sorted(codes):
        format_ = FORMAT_OF_CODE[code]
        call: Callable[[], object] = partial(choice.few_rows_kernel, code)
        yield CompileTask(f"format-{code}", format_.name, call)
        targets = {"f32": dot.TO_F32, "bf16": dot.TO_BF16}
        for dtype, to in targets.items():
            if dtype in dtypes:
                call = partial(dot.dequantize_address, code, to)
                yield CompileTask(f"format-{code}-to-{to}", format_.name, call)
        if "int8" in dtypes and choice.many_rows_kernels([code], "int8", "f32"):
            products = partial(matmul_int8.kernel_addresses, code)
            yield CompileTask(f"format-{code}-products", format_.name, products)
    repacking = {}  # by the size of the moved elements, which decides the kernel
    for code, is_repacked in sorted(decoded):
        format_ = FORMAT_OF_CODE[code]
        if format_.decode is None:
            continue
        for n_planes in sorted(planes):
            call = partial(choice.few_rows_kernel, code, n_planes, is_repacked)
            name = f"format-{code}-{n_planes}" + "-repacked" * is_repacked
            yield CompileTask(name, format_.name, call)
        if is_repacked:
            group = np.zeros((interleaved.GROUP, format_.n_bytes), np.uint8)
            packed = group.copy()
            group.flags.writeable = False  # as a file's are
            size = interleaved.scales_of(format_).size
            repacking[size] = partial(interleaved.repack, code, group, packed)
    for size, repack in repacking.items():
        yield CompileTask(f"repacking-{size}", "repacking", repack)


def compile_method_kernels(
    decoder: Decoder, method: Method, specs: Sequence[LayerSpec], report: OnCompile | None
) -> int:
    """Compiles the kernels of a prefill and a decode step with ``method``, by a trial run.

    specs: the decoder's layers, calibrated if the method needs it. Returns how many tasks were not
    done yet.
    """
    return _run(list(_trial(decoder, method, specs)), report)


def compile_for_gpus_host(path: Path, method: Method, on_host: bool) -> None:
    """Compiles ``method``'s kernels on the host of a GPU, the first time, in a separate process.

    A process with torch compiles one kernel after another (cpu/jit/ahead.py), and a model on a
    GPU needs torch. on_host: K and V of all methods lie on the host. A failure costs time only: the
    model's process compiles what is missing.
    """
    from sparsekv_cli.cpu.jit.compiling import kernel_cache
    from sparsekv_cli.methods import METHODS

    kinds = {entry.partition(":")[2]: name for name, entry in METHODS.items()}
    name = kinds.get(type(method).__name__)
    on_device = bool(method.device_cache) and not on_host
    if name is None or on_device or not kernel_cache.STORE.may_write():
        return
    if kernel_cache.is_marked(f"host-of-gpu-{name}"):
        return
    command = [sys.executable, "-P", "-m", "sparsekv_cli", "warmup", "-m", str(path)]
    done = subprocess.run([*command, "--method", name], check=False, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        kernel_cache.mark(f"host-of-gpu-{name}")


def _trial(decoder: Decoder, method: Method, specs: Sequence[LayerSpec]) -> Iterator[CompileTask]:
    """Yields a prefill and decode steps with ``method`` and with the methods that it uses."""
    for each in method.used():
        yield from _trial(decoder, each, specs)
    caches = trial_caches(method, specs)
    prompt = [token % decoder.hparams.n_vocab for token in range(N_PROMPT)]
    marker = f"method-{type(method).__name__}-{_kind(decoder)}"
    if decoder.hparams.has_experts:
        for n in prompt_lengths(decoder):
            tokens, dense = [0] * n, trial_caches(Full(), first_layers(specs))
            yield CompileTask(marker, "prefill", partial(decoder.forward, tokens, 0, dense))
    yield CompileTask(marker, "prefill", lambda: decoder.forward(prompt, 0, caches))
    yield CompileTask(marker, "decode", lambda: decoder.decode_batch([0], [N_PROMPT], [caches]))
    yield CompileTask(marker, "decode", lambda: decoder.decode_batch([0], [N_PROMPT + 1], [caches]))


def _kind(decoder: Decoder) -> str:
    """Returns a text that is equal for decoders whose steps call the same kernels."""
    name = f"{type(decoder).__name__}-{decoder.prefill_dtype}"
    if any(spec.kind == STATE for spec in decoder.layer_specs()):
        name += f"-{decoder.architecture.recurrence}"
    if decoder.architecture.latent:
        name += "-latent"
    return f"{name}-experts" if decoder.hparams.has_experts else name


def first_layers(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Returns the fewest first layers that have every kind."""
    kinds = [spec.kind for spec in specs]
    return list(specs[: 1 + max(kinds.index(kind) for kind in set(kinds))])


def prompt_lengths(decoder: Decoder) -> tuple[int, ...]:
    """Returns prompt lengths that call all kernels except those of ``compile_few_rows``."""
    return (N_LOAD, max(N_LOAD, decoder.least_many)) if decoder.hparams.has_experts else (N_LOAD,)


def compile_few_rows(decoder: Decoder, report: OnCompile | None) -> int:
    """Compiles and loads what a prefill of a few rows calls where it is not that of many.

    Returns how many tasks were not done yet.
    """
    caches = trial_caches(Full(), first_layers(decoder.layer_specs()))
    marker = f"few-rows-{_kind(decoder)}"
    task = CompileTask(marker, "prefill", lambda: decoder.forward([0], 0, caches))
    n_missing = _run([task], report)
    if not n_missing:
        task.call()
    return n_missing


def load_kernels(decoder: Decoder, method: Method, specs: Sequence[LayerSpec]) -> None:
    """Loads from disk the kernels of a prefill and decode steps with ``method``.

    Timings of the first steps then do not include the loading. Only the first layers take part,
    with the fewest rows of a long prefill. This costs a fraction of a step.
    """
    for n in prompt_lengths(decoder):
        dense = trial_caches(Full(), first_layers(specs))
        prompt = [token % decoder.hparams.n_vocab for token in range(n)]
        decoder.forward(prompt, 0, dense)
    decoder.decode_batch([0], [n], [dense])
    load_method_kernels(method, full_layers(specs)[-1:], decoder.rows_dtype)


def load_method_kernels(method: Method, specs: Sequence[LayerSpec], rows_dtype: str) -> None:
    """Loads the kernels of ``compile_method_kernels``, with a layer of random rows for each spec.

    The timing of a method's first step then does not include the loading.
    """
    for each in method.used():
        load_method_kernels(each, specs, rows_dtype)
    for spec in specs:
        (cache,) = trial_caches(method, [spec])
        _load_layer_kernels(cache, spec, rows_dtype)


def _load_layer_kernels(cache: LayerCache, spec: LayerSpec, rows_dtype: str) -> None:
    import numpy as np

    rng, n = np.random.default_rng(0), N_PROMPT
    rows: list[Any] = []
    for heads, d in (
        (spec.n_head, spec.head_dim),
        (spec.n_head_kv, spec.head_dim),
        (spec.n_head_kv, spec.value_dim),
    ):
        rows.append(np.zeros((heads, n + 2, padded(d)), np.float32))
        rows[-1][..., :d] = rng.standard_normal((heads, n + 2, d))
    sizes = (spec.head_dim, spec.head_dim, spec.value_dim)
    q, k, v = (array[:, :n, :d].copy() for array, d in zip(rows, sizes, strict=True))
    if rows_dtype == "bf16":  # as a prefill on the CPU gives them to a cache
        q, k, v = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v))
    attend_causal(q, cache.extend(AttnInput(q, k, v, q, k, 0)), spec)
    cache.finish_prefill()
    for pos in (n, n + 1):
        q, k, v = (array[:, pos : pos + 1].copy() for array in rows)
        cache.decode(AttnInput(q, k, v, q, k, pos))


def trial_caches(method: Method, specs: Sequence[LayerSpec]) -> list[LayerCache]:
    """Returns caches of the method at its smallest budget, so that a short trial is sparse.

    Only the first full layer is dense, whatever layers the user names. So both kinds are compiled.
    """
    full = [i for i, spec in enumerate(specs) if spec.kind == FULL]
    if any(field.name == "budget" for field in fields(method)):
        method = replace(method, budget=Budget(tokens=8))  # type: ignore[call-arg]
    method = replace(method, dense_layers=(full[0],) if len(full) > 1 else ())
    return [method.layer(spec) for spec in specs]


def _run(steps: Sequence[CompileTask], report: OnCompile | None) -> int:
    """Runs the tasks whose marker does not exist, and sets it. Returns their number."""
    from sparsekv_cli.cpu.jit.compiling import ahead, kernel_cache
    from sparsekv_cli.cpu.jit.install import install

    install()
    markers = dict.fromkeys(step.marker for step in steps)
    done = {name for name in markers if kernel_cache.is_marked(name)}
    missing = [step for step in steps if step.marker not in done]
    if ahead.compile_ahead([step.call for step in missing], report):
        report = None
    for i, step in enumerate(missing):
        if report is not None:
            report(step.what, i, len(missing))
        step.call()
    if missing and report is not None:
        report("done", len(missing), len(missing))
    for name in markers:
        if name not in done:
            kernel_cache.mark(name)
    return len(missing)
