"""A model whose weights are repacked when it is opened: same answers, no more memory."""

import mmap
from pathlib import Path

import numpy as np
import pytest
from opened import open_sequence
from split_models import split_model
from sweeps import sweep
from tiny_models import make_model

from sparsekv_cli.cpu.weights import interleaved
from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.methods.full import Full
from sparsekv_cli.models import repack
from sparsekv_cli.settings.config import SessionConfig

SMAPS = Path("/proc/self/smaps")
IDS = [5, 17, 3, 250, 99, 41, 7, 7, 123]


def open_model(path, choice: str):
    # With 16 bits, so that differences of last bits stay as small from layer to layer.
    config = SessionConfig(prefill_dtype="f32", threads=2, repack=choice, activations="16")
    return open_sequence(path, Full(), config)


@pytest.mark.skipif(
    not interleaved.can_repack(FORMATS["Q4_1"].code, interleaved.GROUP),
    reason="this CPU does not repack",
)
@pytest.mark.parametrize("wtype", sweep(["Q4_1", "Q4_0", "Q5_0", "Q5_1", "IQ4_NL"]))
def test_decode_is_the_same_but_for_rounding(wtype, tmp_path):
    path = tmp_path / "tiny.gguf"
    make_model(path, wtype=wtype)
    sequences = [open_model(path, choice) for choice in ("off", "on")]
    packed = sequences[1].model.decoder._decode_weights
    linears = [linear for layer in packed.layers for linear in layer.linears()]
    assert any(linear.repacked for linear in linears)
    for linear in [*linears, packed.output]:
        assert linear.repacked == interleaved.can_repack(linear.code, linear.n_rows)
    assert not packed.token_embd.repacked  # its rows are read one by one
    first = [sequence.prefill(IDS) for sequence in sequences]
    np.testing.assert_array_equal(*first)
    for token in IDS:
        plain, repacked_ = (sequence.decode(token) for sequence in sequences)
        np.testing.assert_allclose(repacked_, plain, atol=2e-4 * np.abs(plain).max())
        # Rounding flips some elements of a row to the next f16, which is not to add up.
        for from_, to in zip(*(sequence.caches for sequence in sequences), strict=True):
            to.store.k[:], to.store.v[:] = from_.store.k, from_.store.v
    for sequence, before in zip(sequences, first, strict=True):
        sequence.rewind(0)
        again = sequence.prefill(IDS)  # from pages that were released
        np.testing.assert_array_equal(before, again)


def test_auto_repacks_what_is_small_beside_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    make_model(path, wtype="Q4_1")
    weights = open_model(path, "off").model.decoder.weights
    for memory, wanted in (
        (None, True),
        (4 * weights.bytes_a_step(1), True),
        (4 * weights.bytes_a_step(1) - 1, False),
    ):
        monkeypatch.setattr(repack, "physical_memory", lambda memory=memory: memory)
        assert repack.wants_repacking(weights, "auto") == wanted
    assert repack.wants_repacking(weights, "on")
    assert not repack.wants_repacking(weights, "off")


@pytest.mark.skipif(not SMAPS.exists(), reason="Linux tells what a mapping holds in memory")
@pytest.mark.parametrize("n_files", [1, 3])
def test_released_pages_leave_memory_and_come_back(n_files, tmp_path):
    path = tmp_path / "tiny.gguf"
    make_model(path, wtype="F32", n_vocab=2048, n_embd=512)
    if n_files > 1:
        path = split_model(path, tmp_path, n_files)[-1]
    sequence = open_model(path, "off")
    file, data = sequence.model.gguf, sequence.model.decoder.weights.token_embd.data
    before = data.copy()
    start = data.__array_interface__["data"][0]

    def resident() -> int:
        """Bytes of the mapping that holds ``data`` in this process' memory."""
        found = False
        for line in SMAPS.read_text().splitlines():
            parts = line.split()
            if "-" in parts[0] and not parts[0].endswith(":"):
                low, high = (int(part, 16) for part in parts[0].split("-"))
                found = low <= start < high
            elif found and parts[0] == "Rss:":
                return 1024 * int(parts[1])
        raise AssertionError("no mapping holds the tensor")

    held = resident()
    file.release(data)
    assert resident() <= held - data.nbytes + 2 * mmap.PAGESIZE
    np.testing.assert_array_equal(data, before)
