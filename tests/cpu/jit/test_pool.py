"""The threads of parallel loops: every task once, whoever asks, however many at a time."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numba
import numpy as np
import pytest
from llvmlite import binding
from numba import config, njit, prange
from tiny_models import make_model

from sparsekv_cli.cpu.jit import pool
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY


@njit(nogil=True)
def _count(out, task, spins):
    for _ in range(spins):
        out[task] += 1


@njit(nogil=True, parallel=PRANGE_ONLY)
def count_up(out, n_tasks, n_loops, spins):
    for _loop in range(n_loops):
        for task in prange(n_tasks):
            _count(out, task, spins)


@njit(nogil=True, parallel=PRANGE_ONLY)
def nested(out, n_tasks):
    for task in prange(n_tasks):
        count_up(out[task], 3, 2, 1)


def test_the_pool_is_installed():
    assert pool.install()  # a second time, without effect


@pytest.mark.parametrize("n_tasks", [0, 1, 2, 3, 17, 1000])
def test_every_task_runs_once_a_loop(n_tasks):
    out = np.zeros((n_tasks + 1,), np.int64)
    count_up(out, n_tasks, 200, 1)
    np.testing.assert_array_equal(out[:n_tasks], 200)
    assert out[n_tasks] == 0


@njit(nogil=True)
def _publish(at, out):
    pool.wait_for(at, 1)
    for i in range(len(out)):
        out[i] = i
    pool.atomic_add(at, 1)


@njit(nogil=True)
def _sum_when_published(at, out):
    pool.wait_for(at, 2)
    return out.sum()


def test_a_thread_waits_for_what_another_has_yet_to_write():
    for array in (np.zeros(1, np.int64), np.zeros(1000, np.int64)):  # compiled before they race
        flag = np.array([2])
        _publish(flag.ctypes.data, array), _sum_when_published(flag.ctypes.data, array)
    for _ in range(20):
        flag, out, sums = np.zeros(1, np.int64), np.zeros(1000, np.int64), []
        waiting = threading.Thread(
            target=lambda flag=flag, out=out, sums=sums: sums.append(
                _sum_when_published(flag.ctypes.data, out)
            )
        )
        writing = threading.Thread(target=_publish, args=(flag.ctypes.data, out))
        waiting.start(), writing.start()
        flag[0] = 1  # only now may it be written
        waiting.join(), writing.join()
        assert sums == [999 * 500] and flag[0] == 2


def test_workers_wake_up_after_a_rest():
    out = np.zeros(2, np.int64)
    for rest in (0, 0.01, 0.2):
        time.sleep(rest)
        count_up(out, 2, 50, 10)
    np.testing.assert_array_equal(out, 3 * 50 * 10)


def test_a_loop_inside_a_loop():
    out = np.zeros((5, 3), np.int64)
    nested(out, 5)
    np.testing.assert_array_equal(out, 2)


def test_loops_of_several_threads_at_once():
    outs = [np.zeros(4, np.int64) for _ in range(4)]
    threads = [threading.Thread(target=count_up, args=(out, 4, 2000, 3)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(outs, 6000)


def asked_for() -> int:
    """Bytes that waiting threads have asked for since ``expect``."""
    control = binding.address_of_symbol(pool.CONTROL)
    return ctypes.c_int64.from_address(control + 8 * pool.NEXT).value


@pytest.mark.skipif(config.NUMBA_NUM_THREADS < 2, reason="with one thread nobody waits")
@pytest.mark.parametrize("address", [0, 1 << 46], ids=["null", "unmapped"])
def test_who_waits_asks_for_what_is_expected_and_no_more(address):
    sizes = 3 * pool.PIECE, 0, 10 * pool.PIECE + 1, 5
    regions = np.array([(address, size) for size in sizes], np.int64)
    pool.expect(regions.ctypes.data)
    n_threads = config.NUMBA_NUM_THREADS
    out, deadline, used = np.zeros(2, np.int64), time.monotonic() + 30, numba.get_num_threads()
    numba.set_num_threads(n_threads)
    try:
        while asked_for() < sum(sizes) and time.monotonic() < deadline:
            count_up(out, 2, 1, 100_000)  # whoever ends first waits for the other
    finally:
        numba.set_num_threads(used)
    assert sum(sizes) <= asked_for() < sum(sizes) + n_threads * pool.PIECE


def test_a_process_ends_with_its_workers_asleep_or_awake():
    code = (
        "import numpy as np, time\n"
        "from sparsekv_cli.cpu.jit.install import install\n"
        "from sparsekv_cli.models.gguf.linear import Linear\n"
        "from sparsekv_cli.models.matmul import FewRowsProducts\n"
        "install()\n"
        "w = Linear(0, np.ones((64, 32), np.float32).view(np.uint8), 32)\n"
        "product = FewRowsProducts(2).of_stack('w', [w])\n"
        "for _ in range(3):\n"
        "    assert (product(np.ones((1, 32), np.float32)) == 32).all()\n"
        "    time.sleep(0.1)\n"
        "product(np.ones((1, 32), np.float32))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_step_runs_where_the_pool_cannot(tmp_path):
    """Kernels that call ``expect`` are linked, and numba's own threads run their loops."""
    path = make_model(tmp_path / "model.gguf")
    code = (
        "import ctypes, sys\n"
        "from pathlib import Path\n"
        "import numba, numpy as np\n"
        "real = ctypes.CDLL\n"
        "ctypes.CDLL = lambda name, *rest: object() if name is None else real(name, *rest)\n"
        "from sparsekv_cli.cpu.jit import install, pool\n"
        "install.install()\n"
        "assert not pool.install()\n"
        "ctypes.CDLL = real\n"
        "from sparsekv_cli.settings.config import SessionConfig\n"
        "from sparsekv_cli.methods import build_method\n"
        "from sparsekv_cli.model import load_model\n"
        "config = SessionConfig(threads=2, prefill_dtype='f32')\n"
        "model = load_model(Path(sys.argv[1]), build_method('full', {}), config)\n"
        "sequence = model.sequence()\n"
        "sequence.prefill([1, 2, 3])\n"
        "assert np.isfinite(sequence.decode(4)).all()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_many_more_threads_than_cores_end_and_agree_with_one(tmp_path):
    """To the bit, but for products of BLAS in f32, which has one thread here."""
    path = make_model(tmp_path / "model.gguf", n_ctx=512)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from sparsekv_cli.settings.config import SessionConfig\n"
        "from sparsekv_cli.methods import build_method\n"
        "from sparsekv_cli.model import load_model\n"
        "for name in ('full', 'lfps', 'quest'):\n"
        "    options = {} if name == 'full' else {'budget': '64'}\n"
        "    method, logits = build_method(name, options), []\n"
        "    for threads in (1, 16):\n"
        "        config = SessionConfig(ctx_size=512, threads=threads, prefill_dtype='f32')\n"
        "        model = load_model(Path(sys.argv[1]), method, config)\n"
        "        sequence = model.sequence()\n"
        "        assert model.n_threads == threads\n"
        "        sequence.prefill(np.random.default_rng(0).integers(0, 50, 400).tolist())\n"
        "        logits.append(np.stack([sequence.decode(i) for i in range(20)]))\n"
        "    np.testing.assert_array_equal(*logits)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "NUMBA_NUM_THREADS": "16", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
