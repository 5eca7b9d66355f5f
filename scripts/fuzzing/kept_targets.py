"""Fuzz targets of files that the program keeps: calibrations, session files, the prefix cache."""

from __future__ import annotations

import contextlib
import io
import json
import random
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mutation import FoundError, changed_bytes, changed_value, number, packed, unpacked

SHAPE = {
    "n_layer": 2, "n_embd": 64, "n_ff": 64, "n_vocab": 300, "n_head": 2, "n_head_kv": 1,
    "n_ctx": 640, "wtype": "Q8_0", "seed": 3,
}  # fmt: skip
N_ANSWER = 4  # tokens
CALIBRATED = ("fasa", "sals", "faedkv")


def opened(folder: Path, name: str = "kept.gguf", method: str = "full", **options: Any) -> Any:
    """A tiny model with ``method``; the options are make_model's."""
    from tiny_models import make_model

    from sparsekv_cli.methods import build_method
    from sparsekv_cli.model import load_model
    from sparsekv_cli.settings.config import SessionConfig

    path = make_model(folder / name, **{**SHAPE, **options})
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=64)
    return load_model(path, build_method(method, {}), config)


def ids_of(n: int) -> list[int]:
    return [3 + i * i % 250 for i in range(n)]


def answer(model: Any, ids: list[int], rows: Any = None, attention: Any = None) -> list[int]:
    """The tokens of a greedy answer."""
    sequence = model.sequence()
    if attention is not None:
        sequence.change_method(attention)
    logits = sequence.prefill(ids, rows=rows)
    if rows is not None:
        rows.finish()
    tokens = [int(np.argmax(logits))]
    while len(tokens) < N_ANSWER:
        tokens.append(int(np.argmax(sequence.decode(tokens[-1]))))
    return tokens


def changed_rows(rng: random.Random, data: bytes) -> bytes:
    """Changes a file of rows: a field of its header beside a checksum that fits, or any bytes."""
    from sparsekv_cli.prefix.blocks import ALIGNMENT, LENGTHS, MAGIC

    start = len(MAGIC) + LENGTHS.size
    if rng.random() < 0.25 or len(data) < start:
        return changed_bytes(rng, data, [MAGIC])
    length, _ = LENGTHS.unpack_from(data, len(MAGIC))
    pieces = data[-(-(start + length) // ALIGNMENT) * ALIGNMENT :]
    try:
        header = changed_value(rng, json.loads(data[start : start + length]))
    except (ValueError, RecursionError):
        return changed_bytes(rng, data)
    if rng.random() < 0.1:
        pieces = changed_bytes(rng, pieces)
    text = json.dumps(header).encode()
    head = MAGIC + LENGTHS.pack(len(text), zlib.crc32(text)) + text
    return head + bytes(-len(head) % ALIGNMENT) + pieces


class Session:
    """A session file: the answer is that of a run without it, whatever the file holds."""

    change = staticmethod(changed_rows)

    def __init__(self, folder: Path) -> None:
        self.path, self.ids = folder / "a.session", ids_of(96)
        self.models = [opened(folder), opened(folder, "other.gguf", seed=4)]
        self.expected = answer(self.models[0], self.ids)

    def rows(self, model: Any) -> Any:
        from sparsekv_cli.commands.options.prefix import (
            PrefixOptions,
            check_session_file,
            open_prompt_rows,
        )

        check_session_file(self.path)
        return open_prompt_rows(model, PrefixOptions(None, 1.0, False, self.path), model.method)

    def seeds(self) -> Iterable[bytes]:
        for model, ids in ((0, self.ids), (0, self.ids[:40]), (1, self.ids)):
            self.path.unlink(missing_ok=True)
            answer(self.models[model], ids, self.rows(self.models[model]))
            yield self.path.read_bytes()

    def run(self, case: bytes) -> str:
        self.path.write_bytes(case)
        model = self.models[0]
        found = answer(model, self.ids, self.rows(model))
        if found != self.expected:
            raise FoundError(f"the answer is {found} and without the file {self.expected}")
        return "as it was" if self.path.read_bytes() == case else "written"


class PrefixCache:
    """A folder of blocks and snapshots: the answer is that of a run without it."""

    @staticmethod
    def change(rng: random.Random, case: bytes) -> bytes:
        files = unpacked(case)
        if not files:
            return changed_bytes(rng, case)
        name = rng.choice(list(files))
        if rng.random() < 0.1:
            del files[name]
        elif rng.random() < 0.1:
            files[name] = rng.choice(list(files.values()))
        else:
            files[name] = changed_rows(rng, files[name])
            if rng.random() < 0.5:
                content = files.pop(name)
                files[renamed(name, content)] = content
        return packed(files)

    def __init__(self, folder: Path) -> None:
        self.folder, self.ids = folder / "prefixes", ids_of(550)
        windows = {"arch": "gemma3", "n_layer": 4, "n_head": 2, "head_dim": 32}
        self.models = [opened(folder), opened(folder, "windows.gguf", **windows)]
        self.expected = [answer(model, self.ids) for model in self.models]

    def rows(self, model: Any) -> Any:
        from sparsekv_cli.commands.options.prefix import PrefixOptions, open_prompt_rows

        options = PrefixOptions(self.folder, 1.0, False, None)
        return open_prompt_rows(model, options, model.method)

    def seeds(self) -> Iterable[bytes]:
        for i, model in enumerate(self.models):
            self._empty()
            answer(model, self.ids, self.rows(model))
            found = {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}
            yield packed({"model": bytes([i]), **found})

    def _empty(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for path in self.folder.iterdir():
            path.unlink()

    def run(self, case: bytes) -> str:
        files = unpacked(case)
        i = int(files.pop("model", b"") == b"\1")
        self._empty()
        for name, content in files.items():
            with contextlib.suppress(OSError):
                (self.folder / (name or "x")).write_bytes(content)
        model, expected = self.models[i], self.expected[i]
        found = answer(model, self.ids, self.rows(model))
        if found != expected:
            raise FoundError(f"the answer is {found} and without the folder {expected}")
        return f"{sum(path.name in files for path in self.folder.iterdir())} are left"


def renamed(name: str, data: bytes) -> str:
    """The name that the header of a changed block stands for; the old one if it has none."""
    from sparsekv_cli.prefix.blocks import LENGTHS, MAGIC, block_name

    start = len(MAGIC) + LENGTHS.size
    try:
        length, _ = LENGTHS.unpack_from(data, len(MAGIC))
        header = json.loads(data[start : start + length])
        suffix = ".snapshot" if header["rows"] else ".rows"
        return block_name(header["parent"], header["tokens"], suffix).replace("/", "")
    except Exception:
        return name


class Calibration:
    """A sidecar of calibrations: each is refused, or a few steps are decoded with it."""

    @staticmethod
    def change(rng: random.Random, case: bytes) -> bytes:
        if rng.random() < 0.3:
            return changed_bytes(rng, case, [b"PK\x03\x04", b"\x93NUMPY"])
        try:
            with zipfile.ZipFile(io.BytesIO(case)) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
        except Exception:
            return changed_bytes(rng, case)
        for _ in range(rng.choice((1, 1, 2))):
            if not members:
                break
            name = rng.choice(list(members))
            members[name] = changed_array(rng, members[name])
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w", rng.choice((0, 0, 0, 8))) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return held.getvalue()

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "a.npz"
        self.model, self.ids = opened(folder, head_dim=32), ids_of(80)

    def seeds(self) -> Iterator[bytes]:
        from sparsekv_cli.calibration.sidecar import Entry, write_entry
        from sparsekv_cli.methods import build_method

        calibrations = self.model.calibrations
        for name in CALIBRATED:
            method: Any = build_method(name, {})
            arrays = method.calibration_arrays(self.model.decoder.layer_specs())
            tensors = {key: filled(array) for key, array in arrays.items()}
            entry = Entry(tensors, 300, "a text", "0" * 64)
            write_entry(self.path, name, calibrations.identity, entry)
        yield self.path.read_bytes()

    def run(self, case: bytes) -> str:
        from sparsekv_cli.calibration.calibrations import Calibrations
        from sparsekv_cli.errors import SparseKVError
        from sparsekv_cli.methods import build_method

        self.path.write_bytes(case)
        model, refused, used = self.model, None, []
        given = model.gguf, model.hparams, model.calibrations.identity, model.decoder
        calibrations = Calibrations(*given, model.tokenizer.encode, self.path)
        model = replace(model, calibrations=calibrations)
        for name in CALIBRATED:
            try:
                attention = model.attention_of(build_method(name, {}, budget="32"), 0)
            except SparseKVError as error:
                refused = error
            else:
                used.append(name)
                answer(model, self.ids, attention=attention)
        if refused is not None:
            raise refused
        return " ".join(used)


def filled(array: Any) -> np.ndarray:
    """An array that a method takes: small numbers that rise."""
    most = min(array.most, 1.0 if np.dtype(array.dtype).kind == "f" else 15)
    least = max(array.least, 0)
    n = int(np.prod(array.shape[1:]))
    values = np.linspace(least, most, max(1, n))
    return np.broadcast_to(values[:n].reshape(array.shape[1:]), array.shape).astype(array.dtype)


def changed_array(rng: random.Random, content: bytes) -> bytes:
    """Changes a member of an npz file: its values, its shape, its JSON."""
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception:
        return changed_bytes(rng, content)
    if array.dtype.kind == "U" and array.ndim == 0:
        array = np.array(json.dumps(changed_value(rng, json.loads(str(array)))))
    else:
        array = array.copy()
        with np.errstate(all="ignore"), contextlib.suppress(Exception):
            kind = rng.randrange(5)
            if kind < 3 and array.size:
                value = rng.choice((number(rng), float("nan"), -1.0, 0, 1, 2, 31, 32, 1e30))
                array.reshape(-1)[rng.randrange(array.size)] = value
            elif kind == 3:
                array = array.astype(rng.choice(("f2", "f4", "f8", "i4", "i8", "u1", ">f4")))
            else:
                array = array.reshape(-1)[: rng.randrange(array.size + 1)]
    held = io.BytesIO()
    np.save(held, array, allow_pickle=False)
    return held.getvalue()
