"""Measures the parts of results.toml. A part gives records: flat dictionaries of figures.

A part runs the command of its ``run``. If MEASUREMENTS has the part's name, that function gets the
Runner, the sizes and the records of ``run``, and returns the part's records. The Runner remembers
the commands, so that docs/benchmarks.md names them.
"""

import importlib.util
import json
import shlex
import statistics
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from results_runner import ROOT, Runner

Records = list[dict[str, Any]]
Sizes = Mapping[str, Any]

TABLE = tomllib.loads(Path(__file__).with_name("results.toml").read_text(encoding="utf-8"))
SIZES: Sizes = TABLE["sizes"]
TINY: Sizes = SIZES | TABLE["tiny"]
TEXTS = ROOT / "scripts" / "accuracy" / "texts"
DOCUMENT = "scripts/demo_document.txt"
QUESTION = "How long had the old man been at the station?"
TRUTH = "accuracy/perplexity"  # too far from llama.cpp (status 1) is a figure like others
PEERS = ("llama.cpp", "ik_llama.cpp")
SAMPLES = 3  # of each test of ``bench``
MEMORY_COUNTERS = ("bytes_host", "bytes_device", "index_bytes")
CACHE_TYPE_PAIRS = (
    ("q8_0", "q8_0"), ("q8_0", "q5_1"), ("q8_0", "q4_0"), ("q5_1", "q5_1"), ("q5_1", "q4_0"),
    ("q4_0", "q4_0"),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A table of results.toml, which says what its fields are."""

    name: str
    title: str = ""
    about: str = ""
    run: str = ""
    quick: bool = False
    needs: str = ""
    may_fail: bool = False
    page: str = ""
    columns: str = ""
    split: str = ""

    @property
    def missing(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None

    def measure(self, run: Runner, sizes: Sizes) -> Records:
        records: Records = []
        if self.run:
            words = expand_arguments(self.run, sizes)
            records = run.script(*words, may_end_with=int(self.may_fail))
        change = MEASUREMENTS.get(self.name)
        return records if change is None else change(run, sizes, records)


def expand_arguments(line: str, sizes: Sizes) -> list[str]:
    """The words of a ``run``, with sizes for their names."""
    given = {**sizes, "other_model": shlex.join(model_option(sizes))}
    words: list[str] = []
    for word in line.split():
        text = word.removeprefix("*").format_map(given)
        words += shlex.split(text) if word.startswith("*") else [text]
    return words


def model_option(sizes: Sizes) -> list[str]:
    return [] if sizes["model"] == SIZES["model"] else ["-m", sizes["model"]]


def bench_speeds(run: Runner, model: str, *arguments: str, n_runs: int = 1) -> Records:
    """``bench``: a row a test. of_full: the speed over that of ``full`` in the same test.

    n_runs: 1 or SAMPLES; with more than one, a slow minute of the machine is not one method's.
    Methods are sparse at every depth, because their own speed is wanted.
    """
    words = ["-m", model, *arguments, "-r", str(SAMPLES // n_runs), "--sparse-from", "0"]
    rounds = [json.loads(run.cli("bench", *words, "-O", "json").stdout) for _ in range(n_runs)]
    if n_runs > 1:
        run.commands[-n_runs:] = [f"{run.commands[-1]}    # {n_runs} times"]
    records: Records = []
    for same in zip(*rounds, strict=True):
        told, samples = same[0], [sample for row in same for sample in row["samples_ts"]]
        records.append({
            "method": told["method"], "n_prompt": told["n_prompt"], "n_gen": told["n_gen"],
            "depth": told["n_depth"], "n_seqs": told["n_seqs"], "threads": told["n_threads"],
            "tokens_per_s": statistics.median(samples), "least": min(samples), "most": max(samples),
            "cache_mb": sum(told["ledger"][name] for name in MEMORY_COUNTERS) / 1e6,
            "step_ms": 1e3 * told["n_seqs"] / statistics.median(samples),
        })  # fmt: skip
        if told["fraction"] is not None:
            fraction = statistics.median(row["fraction"] for row in same)
            records[-1]["roofline_percent"] = 100 * fraction
    key = ("n_prompt", "n_gen", "depth", "n_seqs", "threads")
    full = {tuple(r[k] for k in key): r["tokens_per_s"] for r in records if r["method"] == "full"}
    for row in records:
        test = tuple(row[k] for k in key)
        if test in full:
            row["of_full"] = row["tokens_per_s"] / full[test]
    return records


def cache_types(run: Runner, sizes: Sizes, _: Records) -> Records:
    """Pairs of types with ``full``, and one type of both with the other methods that read it.

    A line of scripts/accuracy/measure that fails (status 1) is a figure like others.
    """
    pairs = [("full", k, v) for k, v in CACHE_TYPE_PAIRS]
    pairs += [(name, x, x) for name in sizes["readers"].split(",") for x in ("f16", "q8_0", "q4_0")]
    specs = ",".join(f"{name}:cache_type_k={k};cache_type_v={v}" for name, k, v in pairs)
    sized = [word for name in ("lengths", "steps", "texts") for word in (f"--{name}", sizes[name])]
    told = run.script("accuracy/measure", "--methods", specs, *map(str, sized), "--needles", "0",
                      *model_option(sizes), may_end_with=1)  # fmt: skip
    records = []
    for row in told:
        name, _, options = row["method"].partition(":")
        types = dict(option.split("=") for option in options.split(";") if option)
        k, v = (types.get(f"cache_type_{x}", "f16") for x in "kv")
        of_texts = [text["kld"] for text in row["texts"]]
        records.append({
            "method": name, "k": k, "v": v, "tokens": row["tokens"], "kld": row["kld"],
            "kld_least": min(of_texts), "kld_most": max(of_texts),
        })  # fmt: skip
    return records


def peak_memory(run: Runner, sizes: Sizes, model: str) -> Records:
    """A document is read and some tokens answered: the peak of the process, method by method."""
    records, n_before = [], len(run.commands)
    for method in sizes["methods"].split(","):
        done = run.cli("run", "-m", model, "--raw", "-f", sizes["text"], "-n", "16",
                       "--method", method, "--json")  # fmt: skip
        told = json.loads(done.stdout)
        records.append({
            "method": method, "prompt_tokens": told["prompt_tokens"],
            "peak_mb": done.peak_bytes / 1e6,
            "cache_mb": sum(told["ledger"][name] for name in MEMORY_COUNTERS) / 1e6,
        })  # fmt: skip
    names = sizes["methods"].replace(",", ", ")
    run.commands[n_before + 1 :] = [f"# and so on with --method {names}"]
    return records


def terminal_session(run: Runner, sizes: Sizes, _: Records) -> Records:
    """What README's picture shows: the demo, or of another model a comparison."""
    if not model_option(sizes):
        done = run.program("scripts/demo")
        said = "A document" + done.stdout.partition("A document")[2]
    else:
        done = run.cli("compare", "-m", sizes["model"], "-f", DOCUMENT, "--methods",
                       sizes["compared"], "--steps", "32")  # fmt: skip
        said = done.stdout
    return [{"command": run.commands[-1], "output": said.rstrip()}]


def peer_records(size: str, run: Runner, sizes: Sizes, model: str) -> Records:
    arguments = sizes[size]
    ik = ["--ik", run.ik] if run.ik and "--batch" not in arguments else []
    told = run.script("bench/peer", "-m", model, *arguments.split(), *ik)
    if ik:
        run.commands[-1] = run.commands[-1].replace(shlex.quote(run.ik), "llama-bench")
    records = []
    for row in told["rows"]:
        records.append({"test": row["test"], "unit": row["unit"], "ratio": row["ratio"]})
        of_peers = {name: row["peers"][name] for name in PEERS if name in row["peers"]}
        for name, spread in {"sparsekv-cli": row["sparsekv_cli"], **of_peers}.items():
            records[-1] |= {f"{name} {x}": spread[x] for x in ("median", "min", "max")}
        for name in of_peers:
            records[-1][f"{name} version"] = told["programs"].get(name, {}).get("version", "")
    return records


def of_trained(measure: Callable[[Runner, Sizes, str], Records]) -> Callable[..., Records]:
    """The records of ``measure`` for each trained model. Commands name no folder."""

    def measured(run: Runner, sizes: Sizes, records: Records) -> Records:
        for model in sizes["trained"].split() or [sizes["model"]]:
            records += [{**row, "model": Path(model).stem} for row in measure(run, sizes, model)]
            shown = (line.replace(model, Path(model).name) for line in run.commands)
            run.commands[:] = [line.replace(f"{run.unfinished}/", "") for line in shown]
        return records

    return measured


def advice(run: Runner, sizes: Sizes, model: str) -> Records:
    done = run.cli("advise", "-m", model, "-f", DOCUMENT, "-p", QUESTION)
    return [{"output": done.stdout.replace(model, Path(model).name).rstrip()}]


def with_larger(
    measure: Callable[[str, Runner, Sizes, str], Records],
    size: str,
    files: str,
    size_of_larger: str,
) -> Callable[..., Records]:
    """The records of trained models by a size, then of larger files by another size."""

    def measured(run: Runner, sizes: Sizes, records: Records) -> Records:
        records = of_trained(partial(measure, size))(run, sizes, records)
        if sizes[files]:
            larger = {**sizes, "trained": sizes[files]}
            records = of_trained(partial(measure, size_of_larger))(run, larger, records)
        return records

    return measured


def trained_speed(size: str, n_runs: int, run: Runner, sizes: Sizes, model: str) -> Records:
    words = expand_arguments(f"-p 0 -n {{tokens}} {sizes[size]} --cache-dir", sizes)
    return bench_speeds(run, model, *words, str(run.unfinished / "prompts"), n_runs=n_runs)


def trained_prefill(run: Runner, sizes: Sizes, model: str) -> Records:
    return bench_speeds(run, model, *expand_arguments("-p {real_prompts} -n 0", sizes))


def trained_script(
    script: str, size: str, run: Runner, sizes: Sizes, model: str, may_end_with: int = 0
) -> Records:
    words = expand_arguments(sizes[size], sizes)
    return run.script(script, "-m", model, *words, may_end_with=may_end_with)


def trained_choice(run: Runner, sizes: Sizes, model: str) -> Records:
    words = ["--half", "choose", "--methods", sizes["choice_methods"], *sizes["choice"].split()]
    return run.script("accuracy/real", "-m", model, *words)


def trained_accuracy(run: Runner, sizes: Sizes, model: str) -> Records:
    """All methods, then some of them at a greater depth."""
    sizes_of = ("methods", "real_all"), ("real_methods", "real_deep")
    return [row for names in sizes_of for row in held_out(*names, run, sizes, model)]


def held_out(methods: str, size: str, run: Runner, sizes: Sizes, model: str) -> Records:
    words = ["--half", "held", "--methods", sizes[methods], *sizes[size].split()]
    return run.script("accuracy/real", "-m", model, *words)


def without_texts(run: Runner, sizes: Sizes, records: Records) -> Records:
    """Leaves out the figures of single texts and needles."""
    return [
        {name: value for name, value in row.items() if name not in ("texts", "found")}
        | {"lines": "; ".join(f"`{line.removeprefix('FAIL ')}`" for line in row["lines"])}
        for row in records
    ]


# The parts that measure more than their ``run``, or change its records, by name.
MEASUREMENTS: Mapping[str, Callable[[Runner, Sizes, Any], Records]] = {
    "advise": of_trained(advice),
    "budget": of_trained(partial(trained_script, "budget/kld", "budget")),
    "cache_types": cache_types,
    "depth": with_larger(
        partial(trained_script, "bench/depth"), "depth", "depth_large", "depth_of_large"
    ),
    "documents": of_trained(partial(trained_script, "bench/serve", "documents")),
    "greedy": of_trained(partial(trained_script, TRUTH, "greedy", may_end_with=1)),
    "mass": of_trained(partial(trained_script, "budget/mass", "mass")),
    "memory": of_trained(peak_memory),
    "near_ties": of_trained(partial(trained_script, "accuracy/near_ties", "near_ties")),
    "neighbours": of_trained(partial(trained_script, "budget/neighbours", "neighbours")),
    "options": without_texts,
    "peer": with_larger(peer_records, "peer", "large", "peer_large"),
    "peer_several": of_trained(partial(peer_records, "together")),
    "perplexity": of_trained(partial(trained_script, TRUTH, "perplexity", may_end_with=1)),
    "reading": of_trained(partial(trained_script, "reading/profile", "reading")),
    "reading_choice": of_trained(partial(trained_script, "reading/choices", "reading_choice")),
    "reading_precision": of_trained(
        partial(trained_script, "reading/precision", "reading_precision")
    ),
    "reading_depth": of_trained(partial(trained_script, "reading/depth", "reading_depth")),
    "real_accuracy": of_trained(trained_accuracy),
    "real_at_depth": of_trained(partial(held_out, "depth_methods", "real_at_depth")),
    "real_choice": of_trained(trained_choice),
    "real_prefill": of_trained(trained_prefill),
    "real_speed": of_trained(partial(trained_speed, "real_speed", SAMPLES)),
    "several": of_trained(partial(trained_speed, "several", 1)),
    "reuse": of_trained(partial(trained_script, "accuracy/reuse", "reuse")),
    "second_question": of_trained(
        partial(trained_script, "bench/second_question", "second_question")
    ),
    "speculation": of_trained(partial(trained_script, "accuracy/speculation", "speculation")),
    "terminal": terminal_session,
}
PARTS: Mapping[str, Part] = {name: Part(name, **told) for name, told in TABLE["parts"].items()}
