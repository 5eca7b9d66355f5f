"""Fuzz targets of model files: GGUF, the parts of a split model, vocabularies."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mutation
from mutation import changed_bytes, changed_json, packed, unpacked

N_CTX = 64  # tokens
ARCHITECTURES = {
    "llama": {"wtype": "Q4_0"}, "qwen2": {"wtype": "F16"}, "gemma3": {"wtype": "Q8_0"},
    "gemma4": {"wtype": "Q8_0"}, "lfm2": {"wtype": "Q8_0"}, "qwen35": {"wtype": "Q8_0"},
    "qwen3moe": {"wtype": "Q8_0"}, "phi3": {"wtype": "Q8_0"},
}  # fmt: skip
SMALL = {"n_layer": 2, "n_embd": 32, "n_ff": 32, "n_vocab": 300, "n_head": 2, "n_head_kv": 1}


class Place(NamedTuple):
    """A number in a GGUF header."""

    at: int
    form: str  # for struct


SCALARS = dict(enumerate("BbHhIifB")) | {10: "Q", 11: "q", 12: "d"}  # by the type's number


def places(data: bytes) -> Iterator[Place]:
    """The numbers of a GGUF header, as far as it can be read: counts, types, values, sizes."""

    def read(form: str, at: int) -> int:
        return int(struct.unpack_from(f"<{form}", data, at)[0])

    yield from (Place(4, "I"), Place(8, "Q"), Place(16, "Q"))
    n_tensors, n_keys, at = read("Q", 8), read("Q", 16), 24
    for _ in range(n_keys):
        yield Place(at, "Q")
        at += 8 + read("Q", at)
        yield Place(at, "I")
        kind, n, at = read("I", at), 1, at + 4
        if kind == 9:
            yield from (Place(at, "I"), Place(at + 4, "Q"))
            kind, n, at = read("I", at), read("Q", at + 4), at + 12
        form = SCALARS.get(kind, "Q")
        size = struct.calcsize(form)
        yield from (Place(at + i * size, form) for i in range(min(n, 4)))
        if kind != 8:
            at += n * size
        for _ in range(n if kind == 8 else 0):
            at += size + read("Q", at)
    for _ in range(n_tensors):
        yield Place(at, "Q")
        at += 8 + read("Q", at)
        yield Place(at, "I")
        n, at = read("I", at), at + 4
        yield from (Place(at + 8 * i, "Q") for i in range(min(n, 8)))
        at += 8 * n
        yield from (Place(at, "I"), Place(at + 4, "Q"))
        at += 12


def changed_gguf(rng: random.Random, data: bytes) -> bytes:
    """Changes numbers of the header, or any bytes."""
    if rng.random() < 0.3:
        return changed_bytes(rng, data)
    found: list[Place] = []
    with contextlib.suppress(struct.error, OverflowError):
        found.extend(places(data))
    held = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3)) if found else 0):
        at, form = rng.choice(found)
        size = struct.calcsize(form)
        if at + size > len(held):
            continue
        if form in "fd":
            value = rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e38, 0.5))
            held[at : at + size] = struct.pack(f"<{form}", value)
        else:
            old = int.from_bytes(held[at : at + size], "little")
            new = rng.choice(
                (mutation.number(rng), old + rng.choice((-1, 1, 32)), old * 2, old // 2)
            )
            held[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(held)


class Model:
    """A model file: it is refused, or a few steps are decoded with it."""

    change = staticmethod(changed_gguf)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def seeds(self) -> Iterable[bytes]:
        from tiny_models import make_model

        for arch, options in ARCHITECTURES.items():
            shape: dict[str, Any] = {**SMALL, **options, "n_ctx": 256, "arch": arch}
            if arch in ("gemma4", "qwen35"):
                shape |= {"n_layer": 4, "n_head": 2, "n_embd": 64}
            yield make_model(self.folder / "seed.gguf", **shape).read_bytes()

    def run(self, case: bytes) -> str:
        path = self.folder / "m.gguf"
        path.write_bytes(case)
        return self.decode(path)

    def decode(self, path: Path) -> str:
        from sparsekv_cli.methods import build_method
        from sparsekv_cli.model import load_model
        from sparsekv_cli.settings.config import SessionConfig

        config = SessionConfig(threads=1, prefill_dtype="f32", chunk=16, ctx_size=N_CTX)
        model = load_model(path, build_method("full", {}), config)
        try:
            sequence = model.sequence()
            ids = model.tokenizer.encode("Hello, the world 12") or [0]
            sequence.prefill(ids[: N_CTX - 4])
            for token in (1, 2, 3):
                sequence.decode(token)
            model.tokenizer.token_bytes(2)
        finally:
            model.close()
        return "decoded"


class SplitModel(Model):
    """The parts of a split model; the first is opened."""

    change = staticmethod(mutation.changing_one(changed_gguf))

    def seeds(self) -> Iterable[bytes]:
        from gguf import GGUFReader, GGUFWriter
        from tiny_models import copy_metadata, write_all

        whole = next(iter(super().seeds()))
        (self.folder / "seed.gguf").write_bytes(whole)
        reader = GGUFReader(self.folder / "seed.gguf")
        tensors, files = reader.tensors, {}
        for i in range(3):
            name = f"m-{i + 1:05}-of-00003.gguf"
            writer = GGUFWriter(self.folder / name, "llama")
            if i == 0:
                copy_metadata(reader, writer, {})
            writer.add_uint16("split.no", i)
            writer.add_uint16("split.count", 3)
            writer.add_int32("split.tensors.count", len(tensors))
            step = -(-len(tensors) // 3)
            for tensor in tensors[i * step : (i + 1) * step]:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            write_all(writer)
            files[name] = (self.folder / name).read_bytes()
        yield packed(files)

    def run(self, case: bytes) -> str:
        for old in self.folder.glob("m-*"):
            old.unlink()
        files = unpacked(case)
        for name, content in files.items():
            (self.folder / f"m-{name.removeprefix('m-')}").write_bytes(content)
        first = next(iter(files), "")
        return self.decode(self.folder / f"m-{first.removeprefix('m-')}")


WORDS = (
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.scores", "gpt2", "llama"),
    *("bert", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token", "qwen2", "llama-bpe"),
    *("▁", "Ġ", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.eot_token_id", "<0x41>"),
    *("h e", "  ", "h", "<|im_end|>", "\u0130", "e\u0301", "\r\n", "１２", "👩‍👩‍👧", "\0"),
    *("x" * 5000, "٣", ""),
)


class Tokenizers:
    """The metadata of a vocabulary, and texts to tokenize: JSON."""

    @staticmethod
    def change(rng: random.Random, case: bytes) -> bytes:
        return changed_json(rng, case, WORDS)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def seeds(self) -> Iterable[bytes]:
        from tiny_tokenizer import tiny_vocabulary

        texts = ["Hello  world,\n the 12 and<|im_end|> é 👩‍👩‍👧 don't", "", " \t\n "]
        tokens, types, merges = tiny_vocabulary(290)
        prefix = "tokenizer.ggml"
        ids = {f"{prefix}.bos_token_id": 1, f"{prefix}.eos_token_id": 0}
        bpe = {f"{prefix}.tokens": tokens, f"{prefix}.token_type": types}
        for pre in ("gpt-2", "qwen2", "llama-bpe", "smollm"):
            names = {f"{prefix}.model": "gpt2", f"{prefix}.pre": pre, f"{prefix}.merges": merges}
            yield mutation.packed_json({"metadata": names | bpe | ids, "texts": texts})
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += ["▁", "a", "b", "ab", "▁a", "ba", "▁▁", "bab", "<user>"]
        types = [2, 3, 3, *[6] * 256, *[1] * 8, 4]
        scores = [*[0.0] * 259, *(float(-i) for i in range(9))]
        spm = {f"{prefix}.model": "llama", f"{prefix}.tokens": tokens}
        spm |= {f"{prefix}.token_type": types, f"{prefix}.scores": scores}
        yield mutation.packed_json({"metadata": spm | ids, "texts": texts})

    def run(self, case: bytes) -> str:
        import json

        from sparsekv_cli.errors import SparseKVError
        from sparsekv_cli.models.gguf.file import open_gguf
        from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

        try:
            given = json.loads(case)
            metadata, texts = given["metadata"], given["texts"]
            self._write(metadata)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, struct.error,
                RecursionError):  # fmt: skip
            return "no vocabulary"  # GGUF cannot hold it
        with open_gguf(self.folder / "v.gguf", vocab_only_ok=True) as file:
            tokenizer = load_tokenizer(file.metadata)
        for text in texts if isinstance(texts, list) else []:
            if not isinstance(text, str):
                continue
            try:
                ids = tokenizer.encode(text)
            except SparseKVError:  # a half of a surrogate pair, or no BOS
                continue
            b"".join(tokenizer.token_bytes(token) for token in ids)
        return "encoded"

    def _write(self, metadata: dict[str, Any]) -> None:
        from gguf import GGUFValueType, GGUFWriter

        kinds = {bool: "BOOL", int: "INT64", float: "FLOAT32", str: "STRING"}
        writer = GGUFWriter(self.folder / "v.gguf", "llama")
        writer.add_uint32("llama.vocab_size", 300)
        for key, value in metadata.items():
            if isinstance(value, list):
                sub = GGUFValueType[kinds[type(value[0])] if value else "INT32"]
                if value and isinstance(value[0], int):
                    sub = GGUFValueType.INT32
                writer.add_key_value(key, value, GGUFValueType.ARRAY, sub)
            else:
                writer.add_key_value(key, value, GGUFValueType[kinds[type(value)]])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
        finally:
            writer.close()
