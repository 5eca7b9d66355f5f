"""Damaged tensor tables and data, files that are no whole model, and random damage."""

import random
import struct
import time

import pytest
from gguf_bytes import (
    BOOL,
    FLOAT32,
    Q4_0,
    UINT16,
    UINT32,
    UINT64,
    Builder,
    Tensor,
    array,
    failure,
    pair,
    string,
    strings,
    uint32,
    write_raw,
)

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import GGMLType, StringArray, open_gguf


@pytest.mark.parametrize("alignment", [0, 1, 4, 12, 33, 1 << 21, 2**31, 2**32 - 1])
def test_bad_alignment(tmp_path, alignment):
    message = failure(Builder([uint32("general.alignment", alignment)]).write(tmp_path))
    assert f"general.alignment is {alignment}" in message


@pytest.mark.parametrize(
    "value",
    [
        string("general.alignment", "32"),
        pair("general.alignment", UINT64, struct.pack("<Q", 32)),
        pair("general.alignment", FLOAT32, struct.pack("<f", 32)),
        pair("general.alignment", BOOL, b"\1"),
        array("general.alignment", UINT32, 1, struct.pack("<I", 32)),
    ],
)
def test_alignment_of_the_wrong_type(tmp_path, value):
    assert "it must be uint32" in failure(Builder([value]).write(tmp_path))


def test_tensor_names(tmp_path):
    assert "empty name" in failure(Builder(tensors=[Tensor("")]).write(tmp_path))
    assert open_gguf(Builder(tensors=[Tensor("n" * 63)]).write(tmp_path)).tensors
    message = failure(Builder(tensors=[Tensor("n" * 64)]).write(tmp_path))
    assert "64 bytes long; at most 63" in message
    message = failure(Builder(tensors=[Tensor(), Tensor()]).write(tmp_path))
    assert "tensor 'a.weight' occurs twice" in message


@pytest.mark.parametrize("n_dims", [0, 5, 2**32 - 1])
def test_number_of_dimensions(tmp_path, n_dims):
    message = failure(Builder(tensors=[Tensor(n_dims=n_dims)]).write(tmp_path))
    assert f"has {n_dims} dimensions" in message


@pytest.mark.parametrize("dim", [0, -1, -(2**63)])
def test_dimension_zero_or_negative(tmp_path, dim):
    for dims in ((dim, 4), (8, dim)):
        message = failure(Builder(tensors=[Tensor(dims=dims)]).write(tmp_path))
        assert f"has a dimension of {dim}" in message


@pytest.mark.parametrize(
    "dims", [(2**32, 2**32), (2**62, 2), (2**16,) * 4, (2**63 - 1,), (2**61, 1), (2**62, 4, 1)]
)
def test_element_or_byte_count_overflow(tmp_path, dims):
    assert "larger than any file" in failure(Builder(tensors=[Tensor(dims=dims)]).write(tmp_path))


@pytest.mark.parametrize(
    ("kind", "says"),
    [(4, "Q4_2"), (31, "Q4_0_4_4"), (36, "IQ4_NL_4_4"), (99, "99"), (2**32 - 1, "429")],
)
def test_unknown_tensor_type(tmp_path, kind, says):
    message = failure(Builder(tensors=[Tensor(kind=kind)]).write(tmp_path))
    assert "tensor 'a.weight' has type" in message
    assert says in message


def test_types_that_cannot_be_decoded_are_refused_by_name(tmp_path):
    tensor = Tensor("x", (256, 1), int(GGMLType.Q8_K), bytes(292))
    file = open_gguf(Builder(tensors=[Tensor(), tensor]).write(tmp_path))
    with pytest.raises(SparseKVError, match=r"tensor 'x' has type Q8_K.*supported are F32, F16"):
        file.check_types()
    file.check_types({GGMLType.F32, GGMLType.Q8_K})


def test_row_length_not_a_multiple_of_the_block(tmp_path):
    tensor = Tensor(dims=(48, 2), kind=Q4_0, data=bytes(54))
    message = failure(Builder(tensors=[tensor]).write(tmp_path))
    assert "rows of 48 elements, not a multiple of Q4_0's block of 32" in message


@pytest.mark.parametrize("offset", [1, 16, 32, 64, 160, 2**63, 2**64 - 64, -64])
def test_offsets(tmp_path, offset):
    """Misaligned, overlapping, gapped, wrapping, and pointing into the header."""
    two = [Tensor("a"), Tensor("b", offset=offset)]
    said = f"'b' is at data offset {offset & (2**64 - 1)}, but the tensors before it end at 128"
    assert said in failure(Builder(tensors=two).write(tmp_path))
    one = Builder(tensors=[Tensor("a", offset=offset)]).write(tmp_path)
    assert "'a' is at data offset" in failure(one)


@pytest.mark.parametrize("missing", [1, 100, 128, 129, 200])
def test_truncated_data(tmp_path, missing):
    whole = Builder(tensors=[Tensor("a"), Tensor("b")]).build()
    message = failure(write_raw(tmp_path, whole[:-missing]))
    assert f"{missing} bytes are missing" in message
    assert f"from '{'b' if missing <= 128 else 'a'}' on" in message


def test_every_truncation_is_an_error(tmp_path):
    pairs = [string("general.architecture", "llama"), strings("t", ["a", "bc"]), uint32("u", 7)]
    whole = Builder(pairs, [Tensor("a"), Tensor("b")]).build()
    assert open_gguf(write_raw(tmp_path, whole)).tensors
    for size in range(len(whole)):
        failure(write_raw(tmp_path, whole[:size]))


def test_split_count(tmp_path):
    one = [pair("split.count", UINT16, struct.pack("<H", 1))]
    assert open_gguf(Builder(one).write(tmp_path)).tensors


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (string("general.type", "adapter"), "holds 'adapter', not a language model"),
        (string("general.type", "mmproj"), "holds 'mmproj'"),
        (string("general.type", "imatrix"), "holds 'imatrix'"),
        (string("general.architecture", "clip"), "vision projector"),
        (uint32("general.type", 1), "general.type is of type uint32"),
        (strings("general.type", ["model"]), "general.type is of type array"),
    ],
)
def test_adapters_and_projectors(tmp_path, value, says):
    path = Builder([value]).write(tmp_path)
    assert says in failure(path)
    assert open_gguf(path, vocab_only_ok=True).tensors


def test_vocabulary_only(tmp_path):
    path = Builder(tensors=[]).write(tmp_path)
    assert "vocabulary only" in failure(path)
    assert not open_gguf(path, vocab_only_ok=True).tensors


def test_names_from_the_file_stay_on_one_short_line(tmp_path):
    key = "evil\nline\x1b[31m" + "x" * 5000
    message = failure(Builder([string(key, "a"), string(key, "b")]).write(tmp_path))
    assert "\x1b" not in message
    assert "occurs twice" in message


def _fuzz_base() -> bytes:
    pairs = [
        string("general.architecture", "llama"),
        uint32("general.alignment", 32),
        strings("tokenizer.ggml.tokens", ["a", "bc", "", "żółw"]),
        array("tokenizer.ggml.scores", FLOAT32, 3, bytes(12)),
        pair("flag", BOOL, b"\1"),
        pair("big", UINT64, struct.pack("<Q", 5)),
    ]
    tensors = [Tensor("a"), Tensor("b", (32, 2), Q4_0, bytes(36)), Tensor("c", (3,), 0, bytes(12))]
    return Builder(pairs, tensors).build()


def test_fuzz(tmp_path):
    """Random damage ends in SparseKVError or success, never in anything else, and soon."""
    rng = random.Random(20240607)
    base = _fuzz_base()
    header = len(base) - 256
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        data = bytearray(base)
        for _ in range(rng.choice((1, 1, 2, 5))):
            position = rng.randrange(header)
            kind = rng.randrange(4)
            if kind == 0:
                data[position] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 2:
                data[position : position + 8] = struct.pack(
                    "<Q", rng.choice((0, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 255))
                )
            else:
                del data[position : position + rng.randrange(1, 9)]
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        path, start = write_raw(tmp_path, bytes(data)), time.thread_time()
        try:
            with open_gguf(path, vocab_only_ok=True) as file:
                for info in file.tensors.values():
                    assert file.data(info).nbytes == info.n_bytes
                for value in file.metadata.values():
                    if isinstance(value, StringArray):
                        value.tolist()
            outcomes[True] += 1
        except SparseKVError as error:
            assert "\n" not in str(error)
            outcomes[False] += 1
        assert time.thread_time() - start < 2
    assert outcomes[False] > 1000
    assert outcomes[True] > 50
