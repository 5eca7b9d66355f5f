"""Split models: any part opens all, and what does not belong together is named."""

import os
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import Builder, Tensor, failure, string, strings, uint32
from split_models import part_path, split_model, split_pairs, uint16

from sparsekv_cli.errors import LostModelError, SparseKVError
from sparsekv_cli.models.gguf.file import open_gguf

ARCHITECTURE = string("general.architecture", "llama")
F64 = 28
HEAD = [ARCHITECTURE, string("general.name", "x"), uint32("u", 7), strings("t", ["a", "b"])]


def tensor(name: str) -> Tensor:
    return Tensor(name, data=bytes([ord(name[0])] * 128))


def write_part(folder: Path, number: int, names: str, *more: bytes, **builder: int) -> Path:
    """One of three parts that hold six tensors in all."""
    pairs = [*(HEAD if number == 0 else []), *split_pairs(number, 3, 6), *more]
    tensors = [tensor(name) for name in names]
    path = part_path(folder, number, 3)
    return Builder(pairs, tensors, **builder).write(folder, path.name)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [write_part(tmp_path, number, names) for number, names in enumerate(("ab", "cd", "ef"))]


def test_any_part_opens_all(parts):
    for path in parts:
        with open_gguf(path) as file:
            assert file.path == parts[0] and [part.path for part in file.parts] == parts
            assert file.metadata["general.name"] == "x"
            assert "".join(file.tensors) == "abcdef"
            assert file.size == sum(part.stat().st_size for part in parts)
            for name, info in file.tensors.items():
                assert file.data(name).tobytes() == tensor(name).data
                assert file.data(info).tobytes() == tensor(name).data
            hashed = file.content.wait()
    parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"x")
    with open_gguf(parts[0]) as file:
        assert file.content.wait() != hashed


def test_relative_paths_and_the_first_part_without_tensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, names in enumerate(("", "abc", "def")):
        write_part(tmp_path, number, names)
    with open_gguf("m-00002-of-00003.gguf") as file:
        assert "".join(file.tensors) == "abcdef"


def test_a_model_in_parts_is_the_model(tiny_model, tmp_path):
    whole_path = tiny_model(wtype="Q8_0", chat_template="{{ messages }}")
    paths = split_model(whole_path, tmp_path, 4)
    with open_gguf(whole_path) as whole, open_gguf(paths[2]) as split:
        assert list(split.tensors) == list(whole.tensors)
        assert {info.part for info in split.tensors.values()} == {0, 1, 2, 3}
        for name in whole.tensors:
            np.testing.assert_array_equal(split.data(name), whole.data(name))
            split.release(split.data(name))
            np.testing.assert_array_equal(split.data(name), whole.data(name))
        assert {key: str(split.metadata[key]) for key in whole.metadata} == {
            key: str(value) for key, value in whole.metadata.items()
        }


def test_a_missing_part(parts):
    os.unlink(parts[1])
    for path in (parts[0], parts[2]):
        message = failure(path)
        assert message.startswith(f"{path}: ") and f"{parts[1].name} is missing: " in message
    os.unlink(parts[2])
    assert f"{parts[1].name} is missing (and 1 more): " in failure(parts[0])
    with open_gguf(parts[0], vocab_only_ok=True) as file:
        assert "".join(file.tensors) == "ab" and file.missing is not None


@pytest.mark.parametrize(
    ("number", "names", "more", "words"),
    [
        (1, "cb", [], ["tensor 'b' is in m-00001-of-00003.gguf too"]),
        (1, "c", [], ["hold 5 tensors, but split.tensors.count is 6"]),
        (2, "efg", [], ["hold 7 tensors, but split.tensors.count is 6"]),
        (1, "cd", [string("general.architecture", "qwen2")], ["is 'qwen2', but 'llama' in m-"]),
        (1, "cd", [uint32("u", 8)], ["'u' is 8, but 7 in m-00001-of-00003.gguf"]),
        (2, "ef", [strings("t", ["a", "c"])], ["'t' is not what it is in m-00001"]),
    ],
)
def test_a_part_of_another_model(number, names, more, words, parts, tmp_path):
    write_part(tmp_path, number, names, *more)
    for path in parts:
        message = failure(path)
        assert message.startswith(str(tmp_path)) and "of another model" in message
        assert all(word in message for word in words)


def test_a_part_that_repeats_the_metadata(parts, tmp_path):
    write_part(tmp_path, 1, "cd", *HEAD)
    assert len(open_gguf(parts[2]).tensors) == 6


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (split_pairs(1, 2, 6), "split.count is 2, but the model is split into 3 files"),
        ([], "split.count is 1, but the model is split into 3 files"),
        (split_pairs(2, 3, 6), "split.no is 2, but 1 was expected by the file's name"),
        (split_pairs(1, 3, 7), "'split.tensors.count' is 7, but 6 in m-00001-of-00003.gguf"),
        ([string("split.count", "3")], "split.count is of type string; it must be uint16"),
    ],
)
def test_a_wrong_count(pairs, words, parts, tmp_path):
    Builder(pairs, [tensor("c"), tensor("d")]).write(tmp_path, parts[1].name)
    message = failure(parts[0])
    assert message.startswith(f"{parts[1]}: ") and words in message


@pytest.mark.parametrize(
    ("name", "pairs", "words"),
    [
        ("m.gguf", split_pairs(1, 3, 6), "is part 2 of 3 of a split model by its metadata"),
        ("m-00001-of-00003.gguf", split_pairs(1, 3, 6), "must end in -00002-of-00003.gguf"),
        ("m.gguf", split_pairs(3, 3, 6), "split.no is 3; 0 to 2 were expected"),
        ("m.gguf", [uint16("split.count", 2), string("split.no", "0")], "split.no is of type str"),
    ],
)
def test_a_part_that_cannot_tell_the_others(name, pairs, words, tmp_path):
    path = Builder([ARCHITECTURE, *pairs]).write(tmp_path, name)
    message = failure(path)
    assert message.startswith(f"{path}: ") and words in message
    assert open_gguf(path, vocab_only_ok=True).tensors


def test_a_damaged_part_is_named(parts):
    whole = parts[1].read_bytes()
    for path, options in ((parts[0], {}), (parts[2], {"vocab_only_ok": True})):
        parts[1].write_bytes(whole[:-100])
        message = failure(path, **options)
        assert message.startswith(f"{parts[1]}: 100 bytes are missing: ")
        parts[1].write_bytes(b"<html>" + whole)
        assert failure(path, **options).startswith(f"{parts[1]}: not a GGUF file: it looks like")


def test_a_part_that_is_cut_while_in_use(parts):
    with open_gguf(parts[0]) as file:
        file.check_intact()
        os.truncate(parts[2], 10)
        with pytest.raises(LostModelError, match=rf"^{parts[2]}: was cut from \d+ to 10 bytes"):
            file.check_intact()


def test_failed_opens_leave_no_descriptor(parts, tmp_path):
    write_part(tmp_path, 2, "ab")
    parts = [*parts, Builder(version=9).write(tmp_path)]
    for path in parts:
        failure(path)
    links = [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]
    assert not {path.resolve() for path in parts} & set(links)


def test_types_are_checked_in_every_part(parts, tmp_path):
    pairs = split_pairs(2, 3, 6)
    Builder(pairs, [Tensor("e", kind=0), Tensor("f", (4, 2), F64, bytes(64))]).write(
        tmp_path, parts[2].name
    )
    with open_gguf(parts[0]) as file, pytest.raises(SparseKVError) as caught:
        file.check_types()
    assert str(caught.value).startswith(f"{parts[2]}: tensor 'f' has type F64, which is not")
