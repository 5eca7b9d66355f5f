"""The GGUF reader: what it reads."""

import time
from pathlib import Path

import gguf
import gguf_formats  # noqa: F401
import numpy as np
import pytest
from gguf_bytes import Builder, Tensor, failure, string, strings, uint32, write_raw

from sparsekv_cli.cpu.weights.types import DECODABLE_TYPES, REMOVED_TYPES
from sparsekv_cli.models.gguf.file import GGMLType, StringArray, open_gguf


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file by gguf's own writer, with every kind of value."""
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("v.u8", 200)
    writer.add_int8("v.i8", -5)
    writer.add_uint16("v.u16", 60000)
    writer.add_int16("v.i16", -3000)
    writer.add_uint32("v.u32", 4_000_000_000)
    writer.add_int32("v.i32", -2_000_000_000)
    writer.add_uint64("v.u64", 2**63 + 1)
    writer.add_int64("v.i64", -(2**62))
    writer.add_float32("v.f32", 0.5)
    writer.add_float64("v.f64", 0.1)
    writer.add_bool("v.bool", True)
    writer.add_string("v.string", "żółw 🐢")
    writer.add_array("v.ints", [1, -2, 3])
    writer.add_array("v.floats", [0.5, 1.5])
    writer.add_array("v.bools", [True, False])
    writer.add_array("v.strings", ["", "a", "żółw", "🐢" * 50])
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    writer.add_tensor("cube", values)
    writer.add_tensor("odd", np.arange(5, dtype=np.float16))
    blocks = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_type(written):
    metadata = open_gguf(written).metadata
    assert metadata["v.u8"] == 200
    assert metadata["v.i8"] == -5
    assert metadata["v.u16"] == 60000
    assert metadata["v.i16"] == -3000
    assert metadata["v.u32"] == 4_000_000_000
    assert metadata["v.i32"] == -2_000_000_000
    assert metadata["v.u64"] == 2**63 + 1
    assert metadata["v.i64"] == -(2**62)
    assert metadata["v.f32"] == 0.5
    assert metadata["v.f64"] == 0.1
    assert metadata["v.bool"] is True
    assert metadata["v.string"] == "żółw 🐢"
    assert metadata["v.ints"].tolist() == [1, -2, 3]
    assert metadata["v.floats"].dtype == np.float32
    assert metadata["v.bools"].tolist() == [True, False]
    assert metadata["v.bools"].dtype == np.bool_
    with pytest.raises(ValueError, match="read-only"):
        metadata["v.ints"][0] = 9


def test_string_array(written):
    strings = open_gguf(written).metadata["v.strings"]
    expected = ["", "a", "żółw", "🐢" * 50]
    assert isinstance(strings, StringArray)
    assert len(strings) == 4
    assert strings.tolist() == expected
    assert [strings[i] for i in range(4)] == expected
    assert list(strings) == expected
    assert strings[-1] == expected[-1]
    assert strings[1:3] == expected[1:3]
    with pytest.raises(IndexError):
        strings[4]


def test_tensors_agree_with_the_gguf_package(written):
    file = open_gguf(written)
    reference = gguf.GGUFReader(written)
    assert [info.name for info in reference.tensors] == list(file.tensors)
    for theirs in reference.tensors:
        ours = file.tensors[theirs.name]
        assert ours.shape == tuple(int(n) for n in theirs.shape)[::-1]
        assert ours.offset == theirs.data_offset
        assert ours.n_bytes == theirs.n_bytes
        assert ours.n_elements == theirs.n_elements
        assert ours.type == theirs.tensor_type
        assert file.data(ours).tobytes() == theirs.data.tobytes()


def test_data_are_rows_of_read_only_bytes(written):
    file = open_gguf(written)
    cube = file.data("cube")
    assert cube.shape == (6, 16)
    assert cube.view(np.float32).ravel().tolist() == list(range(24))
    assert file.data("odd").shape == (1, 10)
    assert file.data("quantised").shape == (3, 68)
    assert cube.base is not None
    with pytest.raises(ValueError, match="read-only"):
        cube[0, 0] = 1


def test_data_outlive_close_but_cannot_be_asked_for_after_it(written):
    with open_gguf(written) as file:
        data = file.data("cube")
    assert data.view(np.float32)[0, 1] == 1.0
    with pytest.raises(ValueError, match="closed"):
        file.data("cube")


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3(tmp_path, version):
    file = open_gguf(Builder(version=version).write(tmp_path))
    assert file.version == version
    assert file.tensors["a.weight"].shape == (4, 8)


@pytest.mark.parametrize("alignment", [8, 64, 1 << 20])
def test_alignment(tmp_path, alignment):
    pairs = [uint32("general.alignment", alignment), string("general.architecture", "llama")]
    tensors = [Tensor("a", (1,), data=b"abcd"), Tensor("b", (1,), data=b"efgh")]
    file = open_gguf(Builder(pairs, tensors, alignment=alignment).write(tmp_path))
    assert file.tensors["b"].offset - file.tensors["a"].offset == alignment
    assert file.data("b").tobytes() == b"efgh"


def test_last_tensor_needs_no_padding(tmp_path):
    whole = Builder(tensors=[Tensor("a", (1,), data=b"abcd")]).build()
    assert open_gguf(write_raw(tmp_path, whole[:-28])).data("a").tobytes() == b"abcd"
    assert "1 bytes are missing" in failure(write_raw(tmp_path, whole[:-29]))


def test_types_table_is_that_of_the_gguf_package():
    for kind in GGMLType:
        theirs = gguf.GGMLQuantizationType(int(kind))
        assert kind.name == theirs.name
        assert gguf.GGML_QUANT_SIZES[kind] == (kind.block, kind.block_bytes)
        assert kind.row_bytes(kind.block * 3) == kind.block_bytes * 3
    assert not set(REMOVED_TYPES) & {int(kind) for kind in gguf.GGMLQuantizationType}
    inspected_only = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
    assert {kind.name for kind in set(GGMLType) - DECODABLE_TYPES} == inspected_only


def test_large_vocabulary_opens_fast(tmp_path):
    values = [f"token {i}" for i in range(300_000)]
    path = Builder([strings("tokenizer.ggml.tokens", values)], []).write(tmp_path)
    start = time.thread_time()
    tokens = open_gguf(path, vocab_only_ok=True).metadata["tokenizer.ggml.tokens"].tolist()
    assert time.thread_time() - start < 1.5  # CPU time; 0.15 s
    assert tokens == values
