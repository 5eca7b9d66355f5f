"""What is said of Triton's compiling, and what is tried so that it compiles."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from opened import open_sequence
from side_by_side import Geometry
from test_device_batching import calibration_of
from tiny_models import make_model
from triton.runtime.interpreter import InterpretedFunction

from sparsekv_cli import methods
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.calibration.calibrations import Calibrations
from sparsekv_cli.commands import warmup
from sparsekv_cli.commands.shared.progress import CompileProgress
from sparsekv_cli.device.batching import SIZES, Planner
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig


def test_only_what_is_compiled_is_told_of(monkeypatch, capsys):
    from sparsekv_cli.device.cuda import report_compiling

    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    report_compiling(CompileProgress())
    src = SimpleNamespace(name="_attend_kernel")

    def compiled(*, cache_hit):
        triton.knobs.compilation.listener(
            src=src, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit
        )

    compiled(cache_hit=True)
    assert capsys.readouterr().err == ""
    compiled(cache_hit=False)
    compiled(cache_hit=False)
    assert capsys.readouterr().err == "compiling kernels for this GPU (first run only)\n"


def test_every_method_is_tried_on_the_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(
        methods, "METHODS", {name: methods.METHODS[name] for name in ("full", "topk")}
    )
    monkeypatch.setattr(warmup, "GPU_PROMPT", 20)
    monkeypatch.setattr(warmup, "GPU_STEPS", 1)
    monkeypatch.setattr(warmup, "GPU_ROWS", (64, 128))
    tried, together = [], []
    decode = Sequence.decode

    def watched(self, token):
        tried.append(type(self.method).__name__)
        return decode(self, token)

    monkeypatch.setattr(Sequence, "decode", watched)
    begin = Planner.begin

    def begun(planner, positions, caches):
        if tried[-1] == "TopK" and planner.least_rows == 128:
            raise torch.OutOfMemoryError
        together.extend([len(positions)] if len(positions) > 1 else [])
        return begin(planner, positions, caches)

    monkeypatch.setattr(Planner, "begin", begun)
    sizes = {"n_layer": 1, "n_embd": 64, "n_ff": 64, "n_vocab": 259, "head_dim": 32}
    path = make_model(tmp_path / "m.gguf", **sizes)
    made = {name: methods.build_method(name, {}) for name in methods.METHODS}
    assert warmup.try_on_gpu(path, made) == 128
    assert tried == 3 * ["Full"] + 3 * ["TopK"]
    assert together == 2 * [*warmup.GPU_BATCHES] == 2 * [*SIZES[1:]]
    said = capsys.readouterr().err.splitlines()[-1]
    left_out = "topk: kernels for 128 tokens and more are left out: "
    assert said.startswith(left_out + "the GPU has no memory for a step after 22 tokens")


@pytest.mark.parametrize("name", ["full", "topk", "streaming", "quest", "fasa", "sals", "freekv"])
def test_nothing_is_compiled_in_mid_generation(name, tmp_path, monkeypatch):
    """A long context launches no specialisation that warming up has not launched."""
    compiled: set[Any] = set()

    def note(kernel, *args, grid, warmup, **constants):
        varying = kernel.kwargs["do_not_specialize"] or ()
        named = zip(kernel.arg_names, args, strict=False)
        kinds = (kind(x) for at, x in named if at not in varying)
        compiled.add((kernel.fn.__name__, *kinds, *sorted(constants.items())))

    monkeypatch.setattr(InterpretedFunction, "run", note)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    used = {each: methods.METHODS[each] for each in ("full", name)}
    monkeypatch.setattr(methods, "METHODS", used)
    monkeypatch.setattr(Calibrations, "specs", with_random_calibration)
    path = make_model(
        tmp_path / "m.gguf", n_layer=4, n_embd=64, n_ff=64, n_vocab=259, n_head=2, n_head_kv=1,
        head_dim=32,
    )  # fmt: skip
    made = {each: methods.build_method(each, {}) for each in used}
    assert warmup.try_on_gpu(path, made) == 131072
    warm, long = set(compiled), {}
    sequence = open_sequence(
        path, methods.build_method(name, {}), SessionConfig(device="cuda", ctx_size=150_001)
    )
    for n_rows in (3000, 9000, 20_000, 33_000, 70_000, 140_000):
        compiled.clear()
        sequence.reset()
        for cache in sequence.caches:
            fill(cache, n_rows)
        sequence.model.decoder.decode_batch([5], [n_rows], [sequence.caches])
        long[n_rows] = compiled - warm
    assert len(warm) > 8 and {n: x for n, x in long.items() if x} == {}


def with_random_calibration(calibrations: Any, *_: object) -> list[LayerSpec]:
    calibration = calibration_of(Geometry(2, 1, 32, 32, 32))
    specs = calibrations._decoder.layer_specs()
    return [replace(spec, calibration=calibration) for spec in specs]


def fill(cache: Any, n: int) -> None:
    """A prefill of n rows of zeros."""
    spec = cache.spec
    sizes = (spec.n_head, spec.head_dim), (spec.n_head_kv, spec.head_dim)
    q, k = (torch.zeros(heads, n, d, dtype=torch.float16) for heads, d in sizes)
    cache.reserve(n)
    cache.extend(AttnInput(q, k, k, q, k, 0))
    cache.finish_prefill()


def kind(x: Any) -> Any:
    """What Triton specialises a kernel for."""
    if isinstance(x, torch.Tensor):
        return str(x.dtype), x.data_ptr() % 16 == 0
    return ("int", x == 1, x % 16 == 0) if type(x) is int else type(x)
