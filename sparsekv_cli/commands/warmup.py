"""``sparsekv-cli warmup``: compiles all kernels now, so that later runs need not wait."""

import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from sparsekv_cli.commands.options.help_page import ModelCommand
from sparsekv_cli.commands.options.model import (
    MODEL_OPTION,
    build_method,
    find_model,
)
from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.progress import CalibrationProgress, CompileProgress
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.config import SessionConfig

GPU_PROMPT, GPU_STEPS = 1100, 3
GPU_BATCHES = (2, 4, 8)  # numbers of sequences that decode together in the trial
# Capacities of a cache, in rows, for which kernels differ.
GPU_ROWS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
TRIAL_CONTEXT = 64  # tokens; the trial sequence of warmup.py does not pass through an engine


@click.command(cls=ModelCommand)
@MODEL_OPTION
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="What to compile for; cuda: what the model needs on this GPU.",
)  # fmt: skip
@click.option(
    "--method", "chosen", metavar="NAMES", help="Methods, separated by commas; default: all.",
)  # fmt: skip
@verbose_option
def command(model: str | None, device: str, chosen: str | None) -> None:
    """Compile the kernels of every weight format and every method for this CPU.

    They are kept on disk; a run that finds them starts at once. Methods are tried on a model: -m,
    SPARSEKV_MODEL or smollm2 if that is installed. Any model gives the same kernels. Methods that
    must be calibrated are calibrated for this model, if they are not yet.

    With --device cuda the kernels are for this GPU, and they depend on the model. A prompt and some
    tokens run with each method. Contexts have up to 131072 tokens, if the GPU has room.
    """
    from sparsekv_cli import warmup
    from sparsekv_cli.methods import METHODS
    from sparsekv_cli.model import load_model

    names = [name.strip() for name in chosen.split(",")] if chosen else list(METHODS)
    made = {name: build_method(name, {}) for name in names}
    methods = ", ".join(names)
    path = trial_model(model)
    begin = time.perf_counter()
    if device == "cuda":
        n_rows = try_on_gpu(find_model(model) if path is None else path, made)
        say(f"kernels of the methods {methods} on the GPU: ready, for up to {n_rows} tokens")
        say(f"{time.perf_counter() - begin:.1f} s; kept where Triton keeps them")
        return
    with CompileProgress() as progress, CalibrationProgress() as calibrating:
        n_compiled = warmup.compile_common_kernels(progress)
        if path is not None:
            config = SessionConfig(ctx_size=TRIAL_CONTEXT, device="cpu")
            for method in made.values():
                loaded = load_model(path, method, config, progress, calibrating)
                loaded.close()
    seconds = time.perf_counter() - begin
    say(f"kernels of all weight formats: ready, {n_compiled} compiled")
    if path is None:
        say(
            "kernels of the methods: left out, because there is no model to try them on; give one "
            "with -m FILE, or get a small one with `sparsekv-cli models get smollm2`"
        )
    else:
        say(f"kernels of the methods {methods}: ready, tried on {path.name}")
    say(f"{seconds:.1f} s; kept in {warmup.kernel_folder()}")


def try_on_gpu(path: Path, methods: Mapping[str, Method]) -> int:
    """Runs a long prompt and some steps with each method, so that all kernels are compiled.

    The prompt is longer than any budget. Then it runs a step with each of GPU_BATCHES sequences. It
    also runs a step with the kernels of each of GPU_ROWS that fits. Returns the most rows that
    fitted.
    """
    with CompileProgress() as progress, CalibrationProgress() as calibrating:
        loaded, planned = _longest_model(path, progress)
        ids = [token % loaded.hparams.n_vocab for token in range(GPU_PROMPT)]
        for name, method in methods.items():
            attention = loaded.attention_of(method, None, progress, calibrating)
            sequence, batch = loaded.sequence(attention), list[Any]()
            loaded.decoder.plan_for(0)
            sequence.prefill(ids)
            for token in ids[:GPU_STEPS]:
                sequence.decode(token)
            for n in GPU_BATCHES:
                while len(batch) < n:
                    batch.append(loaded.sequence(attention))
                    batch[-1].prefill(ids)
                loaded.engine.decode(batch, [ids[:1]] * n)
            del batch
            for n_rows in planned:
                loaded.decoder.plan_for(n_rows)
                try:
                    sequence.decode(ids[0])
                except SparseKVError as error:
                    say(f"{name}: kernels for {n_rows} tokens and more are left out: {error}")
                    break
        loaded.close()
    return max(planned, default=len(ids))


def _longest_model(path: Path, progress: CompileProgress) -> tuple[Any, tuple[int, ...]]:
    """Returns a model on the GPU, and those of GPU_ROWS for which its cache fits."""
    from sparsekv_cli.methods import build_method
    from sparsekv_cli.model import load_model

    for n_planned in range(len(GPU_ROWS), -1, -1):
        planned = GPU_ROWS[:n_planned]
        n_ctx = max(planned, default=GPU_PROMPT + GPU_STEPS) * 5 // 4
        loaded = load_model(
            path, build_method("full", {}), SessionConfig(device="cuda", ctx_size=n_ctx), progress
        )
        if loaded.engine.note and planned:  # the cache does not fit
            loaded.close()
            del loaded
            gc.collect()  # the weights leave the GPU
            continue
        break
    return loaded, planned


def trial_model(name: str | None) -> Path | None:
    """Returns the path of the model ``name`` or of the default model; None without any."""
    if name is not None or os.environ.get("SPARSEKV_MODEL"):
        return find_model(name)
    try:
        return find_model("smollm2")
    except SparseKVError:
        return None
