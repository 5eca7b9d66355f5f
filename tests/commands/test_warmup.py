"""``warmup``: what is compiled, what later runs then leave out, and what is said."""

import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli import machine, warmup
from sparsekv_cli.commands import warmup as command
from sparsekv_cli.cpu.jit.compiling import ahead, kernel_cache
from sparsekv_cli.cpu.jit.compiling.store import KernelStore
from sparsekv_cli.cpu.layer import choice, matmul_int8
from sparsekv_cli.cpu.weights import dot, formats, interleaved
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE, FORMATS
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.models.decoder import FEW_PLANES, FEW_ROWS, cpu_prefill_dtype
from sparsekv_cli.models.sources import locate
from sparsekv_cli.models.weights import Linear
from sparsekv_cli.settings.config import SessionConfig


@pytest.fixture
def markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for markers; the kernels themselves stay where they are. Steps are taken one
    by one, as where processes cannot be copied.
    """
    monkeypatch.setattr(ahead, "can_compile_ahead", lambda: False)
    monkeypatch.setattr(kernel_cache, "STORE", KernelStore(tmp_path / "markers"))
    return tmp_path / "markers"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of matvec.py and prefill_products.py, which compile nothing here."""
    asked: list[tuple[Any, ...]] = []
    for module, name in (
        (choice, "few_rows_kernel"),
        (dot, "dequantize_address"),
        (matmul_int8, "kernel_addresses"),
    ):
        monkeypatch.setattr(module, name, lambda *key, name=name: asked.append((name, *key)))
    return asked


@pytest.fixture
def no_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of weight formats are not compiled: their two hundred take a minute."""
    monkeypatch.setattr(warmup, "compile_common_kernels", lambda progress: 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_embd=128, n_ff=128)


@pytest.fixture(scope="module")
def model_with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "experts.gguf"
    return make_model(path, arch="qwen2moe", wtype="Q8_0", n_embd=128)


def test_every_format_and_type(markers, compiled):
    reports: list[tuple[str, int, int]] = []
    n_steps = warmup.compile_common_kernels(lambda *report: reports.append(report))
    expected: set[tuple[Any, ...]] = set()
    n_planes = 1
    for code, format_ in FORMAT_OF_CODE.items():
        expected |= {("dequantize_address", code, to) for to in (dot.TO_F32, dot.TO_BF16)}
        expected.add(("few_rows_kernel", code))
        if format_.decode is not None:
            expected |= {("few_rows_kernel", code, n, False) for n in (n_planes, FEW_PLANES)}
        if cpu_prefill_dtype("auto", 64) == "int8" and matmul_int8.can_multiply(code):
            expected.add(("kernel_addresses", code))
        if interleaved.can_repack(code, interleaved.GROUP):
            expected |= {("few_rows_kernel", code, n, True) for n in (n_planes, FEW_PLANES)}
    assert set(compiled) == expected and len(compiled) == len(expected)
    repacks = interleaved.can_repack(FORMATS["Q4_1"].code, interleaved.GROUP)
    assert n_steps == len(expected) + 1 + 2 * repacks  # the bandwidth probe, repacking
    assert [done for _, done, _ in reports] == list(range(n_steps + 1))
    assert {total for _, _, total in reports} == {n_steps} and reports[-1][0] == "done"
    del compiled[:]
    assert warmup.compile_common_kernels(lambda *report: pytest.fail("said something")) == 0
    assert compiled == []


@pytest.mark.parametrize("repacks", [True, False])
def test_only_the_layout_that_decode_reads(markers, compiled, repacks):
    code = FORMATS["Q4_0"].code
    linear = Linear(code, np.zeros((32, 18), np.uint8), 32)
    layer = SimpleNamespace(linears=lambda: [linear], ffn=None)
    weights: Any = SimpleNamespace(layers=[layer], output=linear, token_embd=linear)
    warmup.compile_weight_kernels(weights, "f32", 1, repacks, None)
    kernels = {call for call in compiled if call[0] == "few_rows_kernel"}
    is_repacked = repacks and interleaved.can_repack(code, 32)
    assert kernels == {("few_rows_kernel", code), ("few_rows_kernel", code, 1, is_repacked)}


def test_an_unfinished_step_is_taken_again(markers, compiled, monkeypatch):
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dot, "dequantize_address", fail)
    with pytest.raises(KeyboardInterrupt):
        warmup.compile_common_kernels(None)
    assert not list(markers.glob("*"))


def test_a_model_after_it_says_nothing(markers, model, invoke, monkeypatch):
    """The real thing, for two formats, with the kernels from the disk cache of the machine."""
    few = {FORMATS[name].code: FORMATS[name] for name in ("F32", "Q8_0")}
    monkeypatch.setattr(formats, "FORMAT_OF_CODE", few)
    said: list[tuple[Any, ...]] = []
    config = SessionConfig(ctx_size=80, threads=1)

    def load(method: str) -> None:
        loaded = load_model(
            model, build_method(method, {}), config, lambda *report: said.append(report)
        )
        loaded.gguf.close()

    load("lfps")
    assert {what for what, _, _ in said} >= {"F32", "prefill", "decode", "done"}
    result = invoke("warmup", "-m", str(model))
    assert result.code == 0 and result.out == ""
    assert result.err.startswith("compiling kernels")
    for name in METHODS:
        assert name in result.err
    assert "tiny.gguf" in result.err and str(markers) in result.err
    del said[:]
    for name in METHODS:
        load(name)
    assert said == []
    again = invoke("warmup", "-m", str(model))
    assert again.code == 0 and "compiling" not in again.err and "0 compiled" in again.err


def test_without_a_model(markers, compiled, invoke, monkeypatch):
    def none(name: str) -> Path:
        raise SparseKVError("no model")

    monkeypatch.delenv("SPARSEKV_MODEL", raising=False)
    monkeypatch.setattr(locate, "packaged_model", none)
    result = invoke("warmup")
    assert result.code == 0 and "left out" in result.err and "models get smollm2" in result.err
    assert len(compiled) > 2 * len(FORMAT_OF_CODE)


@pytest.mark.usefixtures("no_formats")
def test_without_a_name_the_small_model_is_tried(markers, model, invoke, monkeypatch):
    monkeypatch.delenv("SPARSEKV_MODEL", raising=False)
    monkeypatch.setattr(locate, "packaged_model", lambda name: model)
    result = invoke("warmup", "--method", "full")
    assert result.code == 0 and f"tried on {model.name}" in result.err


@pytest.mark.usefixtures("no_formats")
def test_methods_are_tried_on_the_cpu_where_there_is_a_gpu(markers, model, invoke, monkeypatch):
    """On a GPU a trial of lfps would start another warm-up for the host, and that one the next."""
    devices = []

    def load(path, method, config, *more):
        devices.append(config.device)
        return load_model(path, method, config, *more)

    monkeypatch.setattr("sparsekv_cli.model.load_model", load)
    result = invoke("warmup", "-m", str(model), "--method", "lfps,quest")
    assert result.code == 0 and devices == ["cpu", "cpu"]


def test_a_model_that_is_named_must_exist(markers, invoke, monkeypatch):
    result = invoke("warmup", "-m", "no-such-model")
    assert result.code == 1 and result.err.startswith("error: no-such-model")
    monkeypatch.setenv("SPARSEKV_MODEL", "neither-this")
    result = invoke("warmup")
    assert result.code == 1 and "neither-this" in result.err


def test_a_model_compiles_what_its_method_uses_of_others(markers, model):
    loaded = load_model(model, build_method("lfps", {}), SessionConfig(threads=1))
    loaded.gguf.close()
    done = [path.name for path in markers.iterdir()]
    for used in ("LFPS", "Quest"):
        assert any(name.startswith(f"method-{used}-") for name in done)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "full"])
def test_a_trial_reaches_the_sparse_kernels(model, name):
    """Both of them: rows are left out, or the step would end in the dense kernels."""
    method = build_method(name, {})
    loaded = load_model(model, method, SessionConfig(threads=1))
    specs = loaded.prepare(method)
    caches = warmup.trial_caches(method, specs)
    loaded.decoder.forward(list(range(warmup.N_PROMPT)), 0, caches)
    for step in range(2):
        loaded.decoder.decode_batch([0], [warmup.N_PROMPT + step], [caches])
    loaded.gguf.close()
    counts = caches[-1].counters()
    assert counts["rows_total"] == counts["sparse_rows_total"] > 0
    if caches[-1].attends_to_some:
        assert 0 < counts["sparse_rows_attended"] < 0.7 * counts["sparse_rows_total"]
    dtype = loaded.decoder.rows_dtype
    warmup.load_method_kernels(method, specs[-1:], dtype)  # takes the same way


@pytest.mark.slow
def test_a_first_run_that_is_interrupted_ends_at_once(model, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsekv_cli", "run", "-m", str(model), "-p", "a", "-n", "1"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("compiling kernels")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130 and out == "" and err == ""
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing that it started is left


# Counts the kernels that are loaded or compiled by the first steps of a sequence that is opened.
FIRST_STEPS = """
import sys
from pathlib import Path
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.cpu.jit.compiling.kernel_cache import KernelCache
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model

model, name, dtype, n_prompt = sys.argv[1:]
options = {} if name == "full" else {"budget": "8"}
config = SessionConfig(threads=1, prefill_dtype=dtype)
sequence = load_model(Path(model), build_method(name, options), config).sequence()
loaded, load = [], KernelCache.load_overload

def note(self, *arguments):
    loaded.append(self._function.__name__)
    return load(self, *arguments)

KernelCache.load_overload = note
sequence.prefill([1] * int(n_prompt))
for token in range(3):
    sequence.decode(token)
print(loaded)
"""


FAST = ("full", "lfps", "quest")
CASES = [pytest.param(name, "int8") for name in FAST]
CASES += [pytest.param(name, "f32", marks=pytest.mark.slow) for name in METHODS if name not in FAST]


def loaded_by_first_steps(model: Path, name: str, dtype: str, n_prompt: int) -> str:
    method = build_method(name, {} if name == "full" else {"budget": "8"})
    config = SessionConfig(threads=1, prefill_dtype=dtype)
    load_model(model, method, config).gguf.close()  # compiles what is missing
    program = [sys.executable, "-c", FIRST_STEPS, str(model), name, dtype, str(n_prompt)]
    done = subprocess.run(program, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_first_steps_load_no_kernel(model, name, dtype):
    assert loaded_by_first_steps(model, name, dtype, 300) == "[]\n"


@pytest.mark.parametrize(
    ("dtype", "n_prompt"), [("int8", 300), ("int8", FEW_ROWS + 1), ("f32", 300)]
)
def test_nor_those_of_a_model_with_experts(model_with_experts, dtype, n_prompt):
    assert loaded_by_first_steps(model_with_experts, "full", dtype, n_prompt) == "[]\n"


def test_a_gpus_host_compiles_in_a_process_without_torch(monkeypatch, tmp_path):
    """Once a method, where it attends on the host."""
    marked, ran = set(), []
    monkeypatch.setattr(kernel_cache, "is_marked", marked.__contains__)
    monkeypatch.setattr(kernel_cache, "mark", marked.add)
    statuses = iter([1, 0])

    def run(command, **_):
        ran.append(command)
        return SimpleNamespace(returncode=next(statuses))

    monkeypatch.setattr(warmup.subprocess, "run", run)
    path, lfps, quest = tmp_path / "m.gguf", build_method("lfps", {}), build_method("quest", {})
    warmup.compile_for_gpus_host(path, quest, False)
    assert not ran  # its cache lies on the device
    for _ in range(3):  # the first time it fails, and is tried again
        warmup.compile_for_gpus_host(path, lfps, False)
    assert len(ran) == 2 and ran[0][-5:] == ["warmup", "-m", str(path), "--method", "lfps"]
    assert "-P" in ran[0] and marked == {"host-of-gpu-lfps"}


def test_a_gpus_host_compiles_only_where_the_gpu_is_used(model, monkeypatch):
    """A driver alone is none, and a folder that cannot be written keeps no kernels."""
    ran = []
    monkeypatch.setattr(warmup.subprocess, "run", lambda command, **_: ran.append(command))
    monkeypatch.setattr(machine, "may_have_device", lambda: True)
    lfps = build_method("lfps", {})
    load_model(model, lfps, SessionConfig(device="auto", threads=1)).close()
    monkeypatch.setattr(kernel_cache, "is_marked", lambda _: False)
    monkeypatch.setattr(kernel_cache.STORE, "may_write", lambda: False)
    warmup.compile_for_gpus_host(model, lfps, True)
    assert not ran


def test_a_context_that_does_not_fit_leaves_no_weights(model, monkeypatch):
    opened = []

    class Opened(SimpleNamespace):
        """Weak references are to a class of one's own."""

    def load(path, method, config, *more):
        assert [each() for each in opened if each() is not None] == []
        loaded = Opened(engine=SimpleNamespace(note="no" * (not opened)), close=int)
        opened.append(weakref.ref(loaded))
        return loaded

    monkeypatch.setattr("sparsekv_cli.model.load_model", load)
    found, planned = command._longest_model(model, None)
    assert len(opened) == 2 and planned == command.GPU_ROWS[:-1] and found.engine.note == ""
