"""The search for NaN and infinity, held against gguf's reference dequantisation."""

import struct

import gguf
import gguf_formats  # noqa: F401
import numpy as np
import pytest
from gguf_bytes import Builder, Tensor
from opened import open_sequence
from quantized_weights import set_iq1_m_scale
from tiny_models import make_model

from sparsekv_cli.cpu.weights.types import DECODABLE_TYPES, GGMLType
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.models.gguf import check as module
from sparsekv_cli.models.gguf.check import check_tensors, find_non_finite, non_finite_blocks
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.settings.config import SessionConfig

WITH_SCALES = sorted(kind for kind in GGMLType if kind.scales)
DEQUANTISED = [k for k in WITH_SCALES if k != GGMLType.Q8_1]  # Q8_1 is for activations


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_scales_are_where_the_table_says(kind):
    """Finite scales dequantise to finite values whatever the other bytes; a NaN scale does not."""
    rng = np.random.RandomState(7)
    blocks = rng.randint(0, 256, (4, kind.block_bytes)).astype(np.uint8)
    offsets = [first + 2 * i for first, count in kind.scales for i in range(count)]
    for offset in offsets:
        blocks[:, offset : offset + 2] = np.frombuffer(struct.pack("<e", 0.25), np.uint8)
    theirs = gguf.GGMLQuantizationType(int(kind))
    flags = non_finite_blocks(kind, blocks)
    assert flags is not None
    assert not flags.any()
    assert np.isfinite(gguf.quants.dequantize(blocks, theirs)).all()
    for offset in offsets:
        for value in (float("nan"), float("inf"), float("-inf")):
            damaged = blocks.copy()
            damaged[2, offset : offset + 2] = np.frombuffer(struct.pack("<e", value), np.uint8)
            flags = non_finite_blocks(kind, damaged)
            assert flags is not None
            assert flags.tolist() == [False, False, True, False]
            with np.errstate(invalid="ignore"):
                values = gguf.quants.dequantize(damaged, theirs)
            assert np.isfinite(values).all(axis=1).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (GGMLType.F32, "0000803f", "0000807f"),
        (GGMLType.F32, "ffff7f7f", "0000c0ff"),
        (GGMLType.F16, "ff7b", "007c"),
        (GGMLType.BF16, "7f7f", "807f"),
        (GGMLType.F64, "ffffffffffffef7f", "000000000000f07f"),
        (GGMLType.MXFP4, "fe" + "ff" * 16, "ff" + "00" * 16),
        (GGMLType.IQ1_M, "ff" * 53 + "bfffff", "00" * 53 + "c00070"),  # 0x7b.. and 0x7c00
        (GGMLType.IQ1_M, "ff" * 53 + "f0ff6f", "00" * 53 + "f000ff"),
    ],
)
def test_values_and_e8m0(kind, good, bad):
    blocks = np.frombuffer(bytes.fromhex(good + bad + good), np.uint8).reshape(3, -1)
    flags = non_finite_blocks(kind, blocks)
    assert flags is not None
    assert flags.tolist() == [False, True, False]


def test_the_scattered_scale_of_iq1_m():
    """Every f16 as its scale: what is finite is what dequantises to finite values."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    blocks = np.random.RandomState(7).randint(0, 256, (len(scales), 56)).astype(np.uint8)
    set_iq1_m_scale(blocks, scales)
    flags = non_finite_blocks(GGMLType.IQ1_M, blocks)
    np.testing.assert_array_equal(flags, ~np.isfinite(scales))
    with np.errstate(invalid="ignore"):
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.IQ1_M)
    np.testing.assert_array_equal(flags, ~np.isfinite(values).all(axis=1))


def test_every_scale_of_nvfp4_is_finite():
    blocks = np.zeros((256, 36), np.uint8)
    blocks[:, :4], blocks[:, 4:] = np.arange(256)[:, None], 0x77
    assert np.isfinite(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)).all()
    flags = non_finite_blocks(GGMLType.NVFP4, blocks)
    assert flags is not None and not flags.any()


def test_every_decodable_type_is_checked():
    for kind in DECODABLE_TYPES:
        assert non_finite_blocks(kind, np.zeros((2, kind.block_bytes), np.uint8)) is not None


@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_file(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    values = np.ones((6, 8), np.float32)
    values[4, 3] = np.nan
    values[5, 0] = np.inf
    tensors = [
        Tensor("good", (8, 6), data=np.ones((6, 8), np.float32).tobytes()),
        Tensor("bad", (8, 6), data=values.tobytes()),
        Tensor("ids", (4,), int(GGMLType.I32), b"\xff" * 16),
        Tensor("other", (256,), int(GGMLType.Q8_K), b"\xff" * 292),
    ]
    file = open_gguf(Builder(tensors=tensors).write(tmp_path))
    result = find_non_finite(file)
    assert [(c.tensor.name, c.n_bad, c.first_row) for c in result.bad] == [("bad", 2, 4)]
    assert result.unchecked == (GGMLType.Q8_K,)
    assert result.n_tensors == 4
    with pytest.raises(
        SparseKVError,
        match=r"1 of 4 tensors hold .*; first 'bad' \(F32\): 2 of 48 values, from row 4",
    ):
        check_tensors(file)


def test_row_of_a_damaged_block(tmp_path):
    blocks = np.zeros((3, 2, 18), np.uint8)
    blocks[1, 1, :2] = 0xFF
    tensor = Tensor("q", (64, 3), int(GGMLType.Q4_0), blocks.tobytes())
    file = open_gguf(Builder(tensors=[tensor]).write(tmp_path))
    with pytest.raises(SparseKVError, match=r"first 'q' \(Q4_0\): 1 of 6 blocks, from row 1"):
        check_tensors(file)


@pytest.mark.parametrize("method", ["full", "lfps", "freekv"])
def test_a_prompt_of_damaged_weights_is_refused(tmp_path, method):
    path = make_model(tmp_path / "m.gguf", n_embd=64, n_ff=64, n_head=2, n_head_kv=1, n_layer=1)
    data = bytearray(path.read_bytes())
    tensors = gguf.GGUFReader(path).tensors
    at = next(int(x.data_offset) for x in tensors if x.name == "blk.0.attn_norm.weight")
    data[at : at + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    config = SessionConfig(threads=1, prefill_dtype="f32", sparse_from=0)
    with pytest.raises(SparseKVError, match="layer 0 gives values that are not finite"):
        open_sequence(path, build_method(method, {}), config).prefill([5, 6, 7] * 30)
