"""Damaged and foreign files, from the first byte to the last key: one clear line each."""

import os
import struct
from pathlib import Path

import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT8,
    UINT64,
    Builder,
    Tensor,
    array,
    failure,
    pair,
    string,
    strings,
    text,
    write_raw,
)


def test_missing_path(tmp_path):
    assert "No such file" in failure(tmp_path / "none.gguf")
    assert "cannot be opened" in failure(Path("a\0b"))
    assert "too long" in failure(tmp_path / ("x" * 5000))


def test_directory_and_pipe(tmp_path):
    assert "is a directory" in failure(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in failure(tmp_path / "pipe")


def test_no_permission(tmp_path, monkeypatch):
    path = Builder().write(tmp_path)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert "cannot be opened: Permission denied" in failure(path)


def test_empty_and_shorter_than_a_header(tmp_path):
    assert "is empty" in failure(write_raw(tmp_path, b""))
    whole = Builder().build()
    for size in (4, 8, 23):
        assert "a GGUF header takes 24" in failure(write_raw(tmp_path, whole[:size]))
    assert "not a GGUF file" in failure(write_raw(tmp_path, b"GG"))


@pytest.mark.parametrize(
    ("start", "looks_like"),
    [
        (struct.pack("<Q", 64) + b'{"__metadata__":{}}', "safetensors"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"\x80\x02}q\x00", "pickle"),
        (b"<!DOCTYPE html>\n<html>", "HTML"),
        (b"\n  <HTML><head>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-LFS pointer"),
        (b"lmgg\x01\x00\x00\x00", "GGML format"),
        (b"fmgg\x01\x00\x00\x00", "GGMF format"),
        (b"tjgg\x03\x00\x00\x00", "GGJT format"),
        (b"algg\x01\x00\x00\x00", "GGLA adapter"),
        (b"FUGG\x00\x00\x00\x03", "bytes swapped"),
        (b"\x1f\x8b\x08" + bytes(30), "gzip"),
        (b'{"error": "not found"}', "JSON"),
        (b"<?xml version='1.0'?><Error>", "XML"),
        (b"Invalid username or password.", "text"),
        (b"\x93NUMPY\x01\x00", "NumPy"),
        (bytes(4096), "zeros"),
        (b"\xde\xad\xbe\xef\x00\x01", "begins with"),
        (bytes(257) + b"ustar" + bytes(250), "tar archive"),
    ],
)
def test_wrong_magic(tmp_path, start, looks_like):
    message = failure(write_raw(tmp_path, start + bytes(200)))
    short = failure(write_raw(tmp_path, start))
    if looks_like not in ("text", "begins with"):
        assert looks_like in message
    assert looks_like in short
    assert "not a GGUF file" in message


@pytest.mark.parametrize("version", [0, 1, 4, 2**31 + 1])
def test_wrong_version(tmp_path, version):
    message = failure(Builder(version=version).write(tmp_path))
    assert f"is GGUF version {version}; versions 2 and 3" in message


@pytest.mark.parametrize("version", [0x02000000, 0x03000000])
def test_big_endian(tmp_path, version):
    assert "big-endian" in failure(Builder(version=version).write(tmp_path))


@pytest.mark.parametrize("count", [2**16 + 1, 2**40, 2**63, -1])
def test_huge_counts(tmp_path, count):
    assert "tensors; at most" in failure(Builder(n_tensors=count).write(tmp_path))
    assert "keys; at most" in failure(Builder(n_keys=count).write(tmp_path))


def test_counts_larger_than_what_is_there(tmp_path):
    assert "of 60000" in failure(Builder(n_keys=60_000).write(tmp_path))
    assert "of 60000" in failure(Builder(n_tensors=60_000).write(tmp_path))


@pytest.mark.parametrize("length", [10_000, 2**32, 2**63, 2**64 - 1])
def test_key_length_past_the_end(tmp_path, length):
    data = Builder([], n_keys=1).header() + struct.pack("<Q", length) + bytes(100)
    message = failure(write_raw(tmp_path, data))
    assert f"the name of key 1 of 1 takes {length} bytes" in message
    assert "only 100 are left" in message


def test_key_too_long(tmp_path):
    message = failure(Builder([string("k" * 70_000, "x")]).write(tmp_path))
    assert "70000 bytes long; at most 65535" in message


def test_empty_key(tmp_path):
    assert "key 1 of 1 has an empty name" in failure(Builder([string("", "x")]).write(tmp_path))


def test_not_utf8(tmp_path):
    key = Builder([pair(b"gen\xffral", UINT8, b"\0")])
    assert "the name of key 1 of 1 is not UTF-8" in failure(key.write(tmp_path))
    value = Builder([string("general.name", b"abc\xe2\x82")])
    message = failure(value.write(tmp_path))
    assert "the value of key 'general.name' is not UTF-8 (byte 3 of 5)" in message
    for bad in (b"\xe2\x82", b"\xff", b"\xed\xa0\x80", b"\x80"):
        tokens = Builder([strings("t", ["", "żółw", bad, "x"])])
        message = failure(tokens.write(tmp_path))
        assert "string 2 of the array in key 't' is not UTF-8" in message
    name = Builder(tensors=[Tensor(b"\xff\xfe")])
    assert "the name of tensor 1 of 1 is not UTF-8" in failure(name.write(tmp_path))


def test_duplicate_key(tmp_path):
    pairs = [string("general.name", "a"), string("general.name", "b")]
    assert "key 'general.name' occurs twice" in failure(Builder(pairs).write(tmp_path))


@pytest.mark.parametrize("number", [13, 255, 2**32 - 1])
def test_unknown_value_type(tmp_path, number):
    message = failure(Builder([pair("k", number, bytes(8))]).write(tmp_path))
    assert f"key 'k' has value type {number}" in message
    message = failure(Builder([array("k", number, 1, bytes(8))]).write(tmp_path))
    assert f"key 'k' is an array of type {number}" in message


@pytest.mark.parametrize("length", [10_000, 2**40, 2**63, 2**64 - 1])
def test_string_past_the_end(tmp_path, length):
    value = pair("k", STRING, struct.pack("<Q", length) + b"abc")
    assert f"the value of key 'k' takes {length} bytes" in failure(Builder([value]).write(tmp_path))
    item = array("k", STRING, 3, text("ab") + struct.pack("<Q", length) + b"abc")
    message = failure(Builder([item]).write(tmp_path))
    assert f"string 1 of the array in key 'k' takes {length + 8} bytes" in message


def test_strings_that_end_with_the_file(tmp_path):
    data = Builder([array("k", STRING, 3, text("a" * 20) + text("b"))], [], n_keys=1).header()
    assert "string 2 of the array in key 'k' takes 8 bytes" in failure(write_raw(tmp_path, data))


@pytest.mark.parametrize("element", [UINT8, INT32, FLOAT32, BOOL, UINT64, STRING])
@pytest.mark.parametrize("count", [2**20, 2**30, 2**60, 2**63, 2**64 - 1])
def test_array_past_the_end(tmp_path, element, count):
    message = failure(Builder([array("k", element, count, bytes(64))]).write(tmp_path))
    assert f"the array of {count}" in message
    assert "are left" in message


def test_nested_arrays(tmp_path):
    inner = struct.pack("<IQ", ARRAY, 1) * 1000
    assert "array of arrays" in failure(Builder([array("k", ARRAY, 1, inner)]).write(tmp_path))


def test_header_larger_than_allowed(tmp_path):
    """In a large (sparse) file lengths lie within the file, and still nothing is allocated."""
    for value, says in (
        (array("k", UINT8, 1 << 30, b""), "beyond the 128 MiB"),
        (array("k", STRING, 1 << 21, b""), "vocabulary only"),  # all empty, all there
        (array("k", STRING, 1 << 23, b""), "at most 2097152 are allowed"),
        (array("k", STRING, 2, struct.pack("<Q", 1 << 31)), "beyond the 128 MiB"),
        (pair("k", STRING, struct.pack("<Q", 1 << 31)), "beyond the 128 MiB"),
    ):
        path = write_raw(tmp_path, Builder([value], []).header())
        os.truncate(path, 4 << 30)
        assert says in failure(path)
