"""Hashes of what one work tree computes, piece by piece; scripts/commits/compare starts it.

The argument is the folder of a work tree, whose package and fixtures Python must import. Names of
pieces come on stdin, a line each. A line of JSON goes to stdout for each piece: its name and what
was found, by name. With --list it prints all names instead.

layer/METHOD/TYPE/I: one layer with a method's case I, on one of three geometries. It takes a
    prompt, 200 steps, drafts of which rows are taken back, and the first steps once more.
model/ARCHITECTURE and weights/TYPE: logits of a tiny model, in bf16 if the CPU has it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import layer_rows
import numpy as np
import opened
from layer_rows import STREAMS, Geometry, Rows, Stream
from layer_stream import chunk_input, decode, make_cache, prefill
from naive_pair import CASES, method_of
from opened import OpenSequence, open_sequence
from tiny_architectures import TRAITS
from tiny_models import ARCHITECTURES, WEIGHT_TYPES, make_model

import sparsekv_cli.cpu
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.methods import METHODS, build_method, method_class
from sparsekv_cli.settings.config import SessionConfig

GEOMETRIES = (
    Geometry(9, 3, 64),
    Geometry(8, 2, 80, d_v=40, n_rot=40, rope_scale=1.25, softcap=10.0),
    Geometry(8, 1, 128, n_rot=128, has_sinks=True),
)
THREADS = (1, 2, 3, 8)
N_PROMPT, N_STEPS, N_IN_A_HASH = 450, 200, 50
DRAFT_EVERY, N_DRAFT = 20, 4  # a draft of so many rows, of which one stays, in every 20th step
LENGTHS = (1, 50, 7, 130)  # of prompts
SPARSE = ("topk", "quest", "snapkv", "h2o", "lfps", "freekv", "streaming")  # need no calibration
N_LAYER = {"gemma3": 6, "gemma4": 4, "smollm3": 4, "qwen35": 4, "qwen35moe": 4} | dict.fromkeys(
    ("nemotron_h", "nemotron_h_moe"), 7
)
Found = dict[str, Any]


def names() -> Iterator[str]:
    """All pieces; the first one of each method and type has the index 0."""
    for method in METHODS:
        n_cases = max(len(GEOMETRIES), len(cases_of(method)))
        for kind in method_class(method).cache_types:
            yield from (f"layer/{method}/{kind}/{i}" for i in range(n_cases))
    yield from (f"model/{arch}" for arch in ARCHITECTURES)
    yield from (f"weights/{kind}" for kind in WEIGHT_TYPES)


def cases_of(method: str) -> list[tuple[str, str, str]]:
    return [case for case in CASES if case[0] == method]


def sha(arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def of_layer(method: str, kind: str, index: str) -> Found:
    geometry, cases = GEOMETRIES[int(index) % len(GEOMETRIES)], cases_of(method)
    _, budget, options = cases[int(index) % len(cases)]
    options = options.replace("n_tip=24", "n_tip=8")  # some heads have few chunks
    types = f" cache_type_k={kind} cache_type_v={kind}" if kind != "f16" else ""
    built = method_of(method, budget, options + types)
    stream = STREAMS.get(method, Stream)(geometry, int(index))
    prompt, rows = stream.rows(N_PROMPT), stream.rows(N_STEPS + N_DRAFT)
    found: Found = {}
    for threads in THREADS:
        cache = make_cache(built, geometry, threads)
        of_prompt, outs, told = prefill(cache, prompt), [], f"{threads} threads"
        for step in range(N_STEPS):
            if step % DRAFT_EVERY == DRAFT_EVERY - 1:
                outs.append(drafted(cache, rows, step))
            else:
                outs.append(decode(cache, rows, step).copy())
            cache.end_step(cache.n)
            if cache.attended is not None:
                outs += [each[:n] for each, n in zip(*cache.attended, strict=True)]
            if step % N_IN_A_HASH == N_IN_A_HASH - 1:
                found[f"{told}, steps to {step + 1}"] = sha(outs)
                outs = []
        counters = {name: int(n) for name, n in cache.counters().items() if name != "us_waited"}
        found[f"{told}, counters"] = counters
        cache.truncate(N_PROMPT)
        again = [decode(cache, rows, step).copy() for step in range(10)]
        found |= {f"{told}, prompt": sha([of_prompt]), f"{told}, after a rewind": sha(again)}
    return found


def drafted(cache: Any, rows: Rows, step: int) -> np.ndarray:
    """A step of several rows, of which only the first one stays."""
    inputs, n = [], cache.n
    for i in range(cache.most_rows(N_DRAFT)):
        wide = []
        for x in rows:
            row = np.zeros((len(x), 1, padded(x.shape[2])), np.float32)
            row[:, 0, : x.shape[2]] = x[:, step + i]
            wide.append(row)
        inputs.append(chunk_input(tuple(wide), n + i))
    out: np.ndarray = cache.decode_rows(inputs).copy()
    cache.keep(n + 1)
    return out


def of_model(arch: str, folder: Path) -> Found:
    """Types of prefills and threads with full; one sparse method, with several sequences."""
    wtype = ("Q8_0", "F16", "Q4_0", "BF16")[ARCHITECTURES.index(arch) % 4]
    sizes: Any = {"n_layer": N_LAYER.get(arch, 2), "n_ctx": 512, "attention_gain": 1.0}
    sparse = SPARSE[ARCHITECTURES.index(arch) % len(SPARSE)]
    if (latent := TRAITS[arch].latent) is not None:  # rows of whole blocks, and a method that can
        sizes["latent"], sparse = replace(latent, n_rank=64, n_value=32), "lfps"
    path = make_model(folder / "model.gguf", arch=arch, wtype=wtype, head_dim=64, **sizes)
    found: Found = {}
    for dtype, threads in (("f32", 1), ("f32", 3), ("bf16", 2), ("int8", 2)):
        if dtype == "bf16" and not bf16.is_available():
            continue
        config = {"prefill_dtype": dtype, "threads": threads}
        found |= told(f"{dtype}, {threads} threads", path, "full", config)
    return found | told(sparse, path, sparse, {"prefill_dtype": "int8", "threads": 2})


def of_weights(kind: str, folder: Path) -> Found:
    path = make_model(folder / "model.gguf", wtype=kind, n_ff=768, attention_gain=1.0)
    found: Found = {}
    for dtype, repack, bits in (("f32", "off", "16"), ("int8", "on", "8"), ("bf16", "on", "16")):
        if dtype == "bf16" and not bf16.is_available():
            continue
        config = {"prefill_dtype": dtype, "repack": repack, "activations": bits, "threads": 2}
        found |= told(f"{dtype}, repack {repack}, {bits} bits", path, "full", config)
    return found


def told(name: str, path: Path, method: str, given: dict[str, Any]) -> Found:
    """Hashes of logits: prompts and steps in turn, then drafts, two sequences, rewinds."""
    options = {} if method == "full" else {"budget": "24", "dense_layers": "none"}
    config = SessionConfig(ctx_size=512, chunk=48, **given)
    sequence, found = open_sequence(path, build_method(method, options), config), {}
    rng = np.random.default_rng(0)

    def tokens(n: int) -> list[int]:
        return rng.integers(3, 512, n).tolist()

    def steps(of: OpenSequence, n: int) -> list[np.ndarray]:
        return [of.decode(token) for token in tokens(n)]

    try:
        for n in LENGTHS:
            rows = [sequence.prefill(tokens(n), all_logits=True), *steps(sequence, 5)]
            found[f"{name}, prompt of {n}"] = sha(rows)
        end, drafts = len(sequence.tokens) - 5, []
        for n in (2, 4, 9):
            n = sequence.most_rows(n)
            (outcomes,) = sequence.engine.decode([sequence], [tokens(n)])
            sequence.keep(len(sequence.tokens) - n + 1)
            drafts += [*map(np.asarray, outcomes), *steps(sequence, 3)]
        found[f"{name}, drafts"] = sha(drafts)
        other, both = sequence.another(), []
        other.prefill(tokens(40))
        for _ in range(5):
            outcomes = sequence.engine.decode([sequence, other], [tokens(1), tokens(1)])
            both += [np.asarray(logits) for (logits,) in outcomes]
        found[f"{name}, two sequences"] = sha(both)
        rewound = []
        for n in (end, end // 2):
            sequence.rewind(n)
            rewound.append(np.array(sequence.tokens))
            rewound += [sequence.prefill(tokens(9)), *steps(sequence, 5)]
        found[f"{name}, rewinds"] = sha(rewound)
    finally:
        sequence.model.gguf.close()
    return found


def of_piece(name: str) -> Found:
    kind, _, rest = name.partition("/")
    if kind == "layer":
        return of_layer(*rest.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        return {"model": of_model, "weights": of_weights}[kind](rest, Path(folder))


def main() -> int:
    tree = Path(sys.argv[1]).resolve()
    for module in (sparsekv_cli, sparsekv_cli.cpu, layer_rows, opened):
        if not Path(str(module.__file__)).resolve().is_relative_to(tree):
            raise SystemExit(f"Python imports {module.__file__}, which is not in {tree}")
    if "--list" in sys.argv:
        print(*names(), sep="\n")
        return 0
    for line in sys.stdin:
        name = line.strip()
        try:
            found = of_piece(name)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps([name, found]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
