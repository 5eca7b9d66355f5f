"""What scripts/results measures: a part is some commands of this program and what they say.

A part is a function from a Runner and Sizes to rows; each row is a flat dictionary of figures. What
a part ran is recorded, so that docs/benchmarks.md can name the commands.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import results_elsewhere as elsewhere
import results_peers as peers
from results_budgets import budgets
from results_runner import ROOT, Runner

DOCUMENT = "scripts/demo_document.txt"
TEXT = "scripts/accuracy/texts/prose.txt"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the defaults are those of the pages."""

    model: str = "smollm2"
    methods: str = "full,topk,streaming,quest,snapkv,h2o,lfps,fasa,sals,freekv,faedkv"
    fast: str = "full,lfps"  # what is measured where there is no time for all
    depths: str = "0,2048,8192"
    deep: str = "32768"
    prompts: str = "512,8192"
    tokens: int = 32
    repetitions: int = 5
    length: str = "3300"
    lengths: str = "1700,3300,6500"
    steps: int = 64
    texts: int = 4
    needles: int = 8
    warm: int = 5
    compared: str = "full,topk,streaming,lfps"
    text: str = TEXT
    shape: str = "llama-3.2-1b"
    held: int = 8192  # rows of the caches whose memory is told apart
    peer: str = "--pp 512,4096 --depths 0,2048,8192 --methods full,lfps --pairs 3 --memory 16384"
    larger: str = peers.LARGER
    types: str = peers.TYPES
    readers: str = "topk,quest,snapkv,h2o,lfps"
    formats: str = ""
    questions: str = ""
    kept: str = ""
    schemas: str = ""
    far: str = "8192,32768,131072"
    rows: int = 512  # that a head attends to, whatever the depth
    batches: str = "1,2,4,8"
    budget_shares: str = "2%,5%,10%"
    budget_lengths: str = "1024,2048,4096,7168"
    budget_steps: int = 32
    ruler_tasks: str = "niah_single_1,niah_single_2,niah_multikey_1,niah_multivalue,niah_multiquery"
    ruler_samples: int = 2
    ruler_tokens: int = 48
    perplexity: str = ""
    prepare: bool = True  # kernels and calibrations first


TYPES_OF_K_AND_V = (
    ("q8_0", "q8_0"), ("q8_0", "q5_1"), ("q8_0", "q4_0"), ("q5_1", "q5_1"), ("q5_1", "q4_0"),
    ("q4_0", "q4_0"),
)  # fmt: skip


TINY = Sizes(
    methods="full,streaming,lfps", depths="0,64", deep="128", prompts="32", tokens=2, repetitions=1,
    length="100", lengths="100,150", steps=2, texts=1, needles=0, warm=1, compared="full,streaming",
    text=DOCUMENT, held=500, far="100,200", rows=40, batches="1,2", prepare=False,
    peer="--pp 32 --depths 64 --tokens 2 --pairs 1 --memory 64", larger="", types="",
    questions="--questions 2 --cold 1", kept="--tokens 640 --steps 2",
    schemas="--answers 2 --pairs 1 -n 4", readers="topk",
    formats="--formats Q8_0 --length 16 --texts 1 --needles 0", budget_shares="10%",
    budget_lengths="640", budget_steps=4, ruler_tasks="niah_single_1", ruler_samples=1,
    ruler_tokens=2, perplexity="-c 32 --chunks 2",
)  # fmt: skip


def decode(run: Runner, sizes: Sizes) -> Rows:
    return speeds(run, sizes.model, "-p", "0", "-n", str(sizes.tokens), "-d", sizes.depths,
                  "--method", sizes.methods, "-r", str(sizes.repetitions))  # fmt: skip


def deep(run: Runner, sizes: Sizes) -> Rows:
    return speeds(run, sizes.model, "-p", "0", "-n", str(sizes.tokens), "-d", sizes.deep,
                  "--method", sizes.fast, "-r", str(sizes.repetitions))  # fmt: skip


def deep_others(run: Runner, sizes: Sizes) -> Rows:
    others = [name for name in sizes.methods.split(",") if name not in sizes.fast.split(",")]
    return speeds(run, sizes.model, "-p", "0", "-n", str(sizes.tokens), "-d", sizes.deep,
                  "--method", ",".join(others), "-r", str(sizes.repetitions))  # fmt: skip


def prefill(run: Runner, sizes: Sizes) -> Rows:
    return speeds(run, sizes.model, "-p", sizes.prompts, "-n", "0", "-r", "3")


def several(run: Runner, sizes: Sizes) -> Rows:
    return speeds(run, sizes.model, "-p", "0", "-n", str(sizes.tokens), "-d", sizes.depths,
                  "-b", sizes.batches, "--method", sizes.fast, "-r", "3")  # fmt: skip


def threads(run: Runner, sizes: Sizes) -> Rows:
    rows = []
    for n in (1, 2):
        rows += speeds(run, sizes.model, "-p", "0", "-n", str(sizes.tokens), "-d", sizes.depths,
                       "-t", str(n), "--method", sizes.fast, "-r", "3")  # fmt: skip
    return rows


def shape(run: Runner, sizes: Sizes) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"{sizes.shape}.gguf")
        subprocess.run(
            [sys.executable, "scripts/random_model", sizes.shape, "q4_k_m", path],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        run.commands.append(f"scripts/random_model {sizes.shape} q4_k_m {sizes.shape}.gguf")
        rows = speeds(run, path, "-p", "256", "-n", str(sizes.tokens), "-d", sizes.depths,
                      "--method", sizes.fast, "-r", "3")  # fmt: skip
    run.commands[-1] = run.commands[-1].replace(path, f"{sizes.shape}.gguf")
    return rows


def speeds(run: Runner, model: str, *arguments: str) -> Rows:
    """``bench``: a row a test. of_full: the speed over that of ``full`` in the same test.

    Methods are sparse at every depth, because their own speed is wanted.
    """
    done = run.cli("bench", "-m", model, *arguments, "--sparse-from", "0", "-O", "json")
    rows: Rows = []
    for told in json.loads(done.stdout):
        samples, ledger = told["samples_ts"], told["ledger"]
        held = sum(ledger[name] for name in ("bytes_host", "bytes_device", "index_bytes"))
        rows.append({
            "method": told["method"], "n_prompt": told["n_prompt"], "n_gen": told["n_gen"],
            "depth": told["n_depth"], "n_seqs": told["n_seqs"], "threads": told["n_threads"],
            "tokens_per_s": statistics.median(samples), "least": min(samples), "most": max(samples),
            "cache_mb": held / 1e6,
        })  # fmt: skip
        if told["fraction"] is not None:
            rows[-1]["roofline_percent"] = 100 * told["fraction"]
    key = ("n_prompt", "n_gen", "depth", "n_seqs", "threads")
    full = {tuple(r[k] for k in key): r["tokens_per_s"] for r in rows if r["method"] == "full"}
    for row in rows:
        test = tuple(row[k] for k in key)
        if test in full:
            row["of_full"] = row["tokens_per_s"] / full[test]
    return rows


def accuracy(run: Runner, sizes: Sizes) -> Rows:
    methods = ",".join(name for name in sizes.methods.split(",") if name != "full")
    return distances(run, sizes, "--methods", methods, "--lengths", sizes.length)


def accuracy_all(run: Runner, sizes: Sizes) -> Rows:
    return distances(run, sizes, "--methods", "default", "--lengths", sizes.lengths)


def accuracy_rows(run: Runner, sizes: Sizes) -> Rows:
    """All methods attend to as many rows."""
    names = [name for name in sizes.methods.split(",") if name != "full"]
    methods = ",".join(f"{name}:budget={sizes.rows}" for name in names)
    rows = distances(run, sizes, "--methods", methods, "--lengths", sizes.lengths.split(",")[-1])
    for row in rows:
        row["method"] = row["method"].partition(":")[0]
    return rows


def cache_types(run: Runner, sizes: Sizes) -> Rows:
    """Pairs of types with ``full``, and one type of both with the other methods that read it.

    At the least and the greatest length, without needles: a type by itself changes little.
    """
    pairs = [("full", k, v) for k, v in TYPES_OF_K_AND_V]
    pairs += [(name, x, x) for name in sizes.readers.split(",") for x in ("f16", "q8_0", "q4_0")]
    specs = ",".join(f"{name}:cache_type_k={k};cache_type_v={v}" for name, k, v in pairs)
    first, *_, last = sizes.lengths.split(",")
    few = replace(sizes, needles=0)
    rows = distances(run, few, "--methods", specs, "--lengths", f"{first},{last}")
    for row in rows:
        name, _, options = row["method"].partition(":")
        types = dict(option.split("=") for option in options.split(";") if option)
        k, v = (types.get(f"cache_type_{x}", "f16") for x in "kv")
        row |= {"method": name, "k": k, "v": v}
    return rows


def distances(run: Runner, sizes: Sizes, *arguments: str) -> Rows:
    """``scripts/accuracy/measure``, where a line that fails (status 1) is a figure like others."""
    sized = ["--steps", str(sizes.steps), "--texts", str(sizes.texts)]
    sized += ["--needles", str(sizes.needles)]
    if sizes.model != Sizes.model:
        sized += ["-m", sizes.model]
    told = run.script("accuracy/measure", *arguments, *sized, may_end_with=1)
    rows = []
    for row in told:
        kept = ("method", "tokens", "kld", "top1", "needles", "overlap", "mass", "dots", "attended")
        of_texts = [text["kld"] for text in row["texts"]]
        rows.append({name: row[name] for name in kept})
        rows[-1] |= {"kld_least": min(of_texts), "kld_most": max(of_texts)}
        rows[-1] |= {"needles_of": sizes.needles}
    return rows


def formats(run: Runner, sizes: Sizes) -> Rows:
    """``scripts/accuracy/formats``, where a line that fails (status 1) is a figure like others."""
    model = ["-m", sizes.model] if sizes.model != Sizes.model else []
    return run.script("accuracy/formats", *model, *sizes.formats.split(), may_end_with=1)


def perplexity(run: Runner, sizes: Sizes) -> Rows:
    """``scripts/accuracy/perplexity``, where a line that fails (status 1) is a figure, too."""
    model = ["-m", sizes.model] if sizes.model != Sizes.model else []
    rows = run.script("accuracy/perplexity", *model, *sizes.perplexity.split(), may_end_with=1)
    return [row | {"percent": 100 * abs(row["ratio"] - 1)} for row in rows]


def start(run: Runner, sizes: Sizes) -> Rows:
    return run.script("bench/start", "-m", sizes.model, "--methods", sizes.fast,
                      "--warm", str(sizes.warm))  # fmt: skip


def memory(run: Runner, sizes: Sizes) -> Rows:
    """A document is read and some tokens answered: the peak of the process, method by method."""
    rows = []
    for method in sizes.methods.split(","):
        done = run.cli("run", "-m", sizes.model, "--raw", "-f", sizes.text, "-n", "16",
                       "--method", method, "--json")  # fmt: skip
        told = json.loads(done.stdout)
        ledger, timings = told["ledger"], told["timings"]
        held = sum(ledger[name] for name in ("bytes_host", "bytes_device", "index_bytes"))
        rows.append({
            "method": method, "prompt_tokens": told["prompt_tokens"], "seconds": done.seconds,
            "peak_mb": done.peak_bytes / 1e6, "cache_mb": held / 1e6,
            "prefill_tps": timings["prefill_tps"],
        })  # fmt: skip
    run.commands[1:] = [f"# and so on with --method {sizes.methods.replace(',', ', ')}"]
    return rows


def terminal(run: Runner, sizes: Sizes) -> Rows:
    """What README's picture shows: the demo, or of another model a comparison."""
    if sizes.model == Sizes.model:
        done = run.program("scripts/demo")
        said = "A document" + done.stdout.partition("A document")[2]
    else:
        done = run.cli("compare", "-m", sizes.model, "-f", DOCUMENT, "--methods", sizes.compared,
                       "--steps", "32")  # fmt: skip
        said = done.stdout
    return [{"command": run.commands[-1], "output": said.rstrip()}]


def caches(run: Runner, sizes: Sizes) -> Rows:
    told = run.script("bench/memory", "-m", sizes.model, "--depth", str(sizes.held))
    rows = []
    for name, row in told.items():
        said = sum(row["said"].values())
        rows.append({
            "method": name, "formula_mb": sum(row["formula"].values()) / 1e6,
            "cache_mb": said / 1e6, "resident_mb": row["resident"] / 1e6,
            "of_full_percent": 100 * said / row["rows"],
        })  # fmt: skip
    return rows


def far(run: Runner, sizes: Sizes) -> Rows:
    """On one thread, for a method's own work. of_full: attention of ``full`` over the method's.

    h2o is left out: it sums the scores of a prompt, which takes an hour at 131072.
    """
    methods = ",".join(name for name in sizes.methods.split(",") if name != "h2o")
    told = run.script("bench/depth", "-m", sizes.model, "--methods", methods,
                      "--depths", sizes.far, "--budget", str(sizes.rows),
                      "--tokens", str(sizes.tokens), "--threads", "1")  # fmt: skip
    kept = ("method", "depth", "tokens_per_s", "token_ms", "attention_ms", "resident_mb")
    rows = [{name: row[name] for name in (*kept, "rows_scored", "rows_attended")} for row in told]
    full = {row["depth"]: row["attention_ms"] for row in rows if row["method"] == "full"}
    for row in rows:
        row["of_full"] = full[row["depth"]] / row["attention_ms"]
    return rows


def calibration(run: Runner, sizes: Sizes) -> Rows:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in ("fasa", "sals", "faedkv"):
            file = str(Path(folder) / method)
            done = run.cli("calibrate", "-m", sizes.model, "--method", method, "--output", file)
            run.commands[-1] = run.commands[-1].replace(f" --output {file}", "")
            rows.append({"method": method, "seconds": done.seconds})
    return rows


@dataclass(frozen=True)
class Part:
    """measure: its function; quick: whether --quick has it; needs: a library, if it is optional."""

    measure: Callable[[Runner, Sizes], Rows]
    quick: bool = False
    needs: str = ""

    @property
    def missing(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


PARTS: Mapping[str, Part] = {
    "decode": Part(decode, quick=True),
    "deep": Part(deep, quick=True),
    "prefill": Part(prefill, quick=True),
    "accuracy": Part(accuracy, quick=True),
    "start": Part(start, quick=True),
    "memory": Part(memory, quick=True),
    "terminal": Part(terminal, quick=True),
    "peer": Part(peers.peer, needs="llama_cpp"),
    "peer_larger": Part(peers.peer_larger, needs="llama_cpp"),
    "peer_types": Part(peers.peer_types, needs="llama_cpp"),
    "deep_others": Part(deep_others),
    "accuracy_all": Part(accuracy_all),
    "accuracy_rows": Part(accuracy_rows),
    "cache_types": Part(cache_types),
    "formats": Part(formats, needs="llama_cpp"),
    "caches": Part(caches),
    "shape": Part(shape),
    "several": Part(several),
    "threads": Part(threads),
    "far": Part(far),
    "calibration": Part(calibration),
    "perplexity": Part(perplexity, needs="llama_cpp"),
    "budgets": Part(budgets),
    "prefix": Part(elsewhere.prefix, needs="llama_cpp"),
    "prefix_kld": Part(elsewhere.prefix_kld),
    "schemas": Part(elsewhere.schemas),
    "serve": Part(elsewhere.serve, needs="llama_cpp"),
}
