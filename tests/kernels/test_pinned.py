"""Page-locked memory, with as much of CUDA's runtime as it asks for."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from sparsekv_cli.kernels import pinned


@pytest.fixture
def registered(monkeypatch):
    """address -> bytes that are registered."""
    found: dict[int, int] = {}

    def register(address, n_bytes, flags):
        assert flags == 3 and address % mmap.PAGESIZE == 0 and address not in found
        found[address] = n_bytes
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: found.pop(address)
    )
    monkeypatch.setattr(pinned, "cuda_runtime", lambda: runtime)
    return found


def test_no_more_is_locked_than_asked_for(registered):
    x = pinned.zeros_on_host((3, 5, 1000), torch.device("cuda"))
    assert registered == {x.data_ptr(): 8 * mmap.PAGESIZE}  # 30000 bytes
    assert x.shape == (3, 5, 1000) and x.dtype == torch.float16 and not x.any()
    part = x[2, 4, 10:]
    del x
    gc.collect()
    part.fill_(1)  # its memory is still there
    assert len(registered) == 1
    del part
    gc.collect()
    assert not registered


def test_what_cuda_refuses_is_an_error(registered, monkeypatch):
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=registered.pop)
    monkeypatch.setattr(pinned, "cuda_runtime", lambda: runtime)
    with pytest.raises(MemoryError, match=r"4096 bytes .* CUDA's error 2"):
        pinned.zeros_on_host((4,), torch.device("cuda"))
    gc.collect()


def test_nothing_is_locked_without_a_gpu(registered):
    assert not pinned.zeros_on_host((4, 0), torch.device("cuda")).numel()
    assert not pinned.zeros_on_host((4, 3), torch.device("cpu")).any()
    assert not registered
