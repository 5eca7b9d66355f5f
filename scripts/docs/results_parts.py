"""Measures the parts of results.toml. A part gives records: flat dictionaries of figures.

A part runs the commands of its ``run``. If MEASUREMENTS has the part's name, that function gets the
Runner, the sizes and the records of ``run``, and returns the part's records. The Runner remembers
the commands, so that docs/benchmarks.md names them.
"""

import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
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
TRUTH = "accuracy/perplexity"  # too far from llama.cpp (status 1) is a figure like others
PEERS = ("llama.cpp", "ik_llama.cpp")
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
    run: str | Sequence[str] = ()
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
        for line in [self.run] if isinstance(self.run, str) else self.run:
            program, *arguments = expand_arguments(line, sizes)
            if program == "bench":
                records += bench_speeds(run, sizes["model"], *arguments)
            else:
                records = run.script(program, *arguments, may_end_with=int(self.may_fail))
        change = MEASUREMENTS.get(self.name)
        return records if change is None else change(run, sizes, records)


def expand_arguments(line: str, sizes: Sizes) -> list[str]:
    """The words of a ``run``, with sizes for their names."""
    given = {**sizes, "other_model": shlex.join(model_option(sizes))}
    given["not_fast"] = methods_except(sizes, *sizes["fast"].split(","))
    given["not_h2o"] = methods_except(sizes, "h2o")
    words: list[str] = []
    for word in line.split():
        text = word.removeprefix("*").format_map(given)
        words += shlex.split(text) if word.startswith("*") else [text]
    return words


def methods_except(sizes: Sizes, *names: str) -> str:
    """The methods but these."""
    return ",".join(name for name in sizes["methods"].split(",") if name not in names)


def model_option(sizes: Sizes) -> list[str]:
    return [] if sizes["model"] == SIZES["model"] else ["-m", sizes["model"]]


def bench_speeds(run: Runner, model: str, *arguments: str) -> Records:
    """``bench``: a row a test. of_full: the speed over that of ``full`` in the same test.

    Methods are sparse at every depth, because their own speed is wanted.
    """
    done = run.cli("bench", "-m", model, *arguments, "--sparse-from", "0", "-O", "json")
    records: Records = []
    for told in json.loads(done.stdout):
        samples = told["samples_ts"]
        records.append({
            "method": told["method"], "n_prompt": told["n_prompt"], "n_gen": told["n_gen"],
            "depth": told["n_depth"], "n_seqs": told["n_seqs"], "threads": told["n_threads"],
            "tokens_per_s": statistics.median(samples), "least": min(samples), "most": max(samples),
            "cache_mb": sum(told["ledger"][name] for name in MEMORY_COUNTERS) / 1e6,
            "step_ms": 1e3 * told["n_seqs"] / statistics.median(samples),
        })  # fmt: skip
        if told["fraction"] is not None:
            records[-1]["roofline_percent"] = 100 * told["fraction"]
    key = ("n_prompt", "n_gen", "depth", "n_seqs", "threads")
    full = {tuple(r[k] for k in key): r["tokens_per_s"] for r in records if r["method"] == "full"}
    for row in records:
        test = tuple(row[k] for k in key)
        if test in full:
            row["of_full"] = row["tokens_per_s"] / full[test]
    return records


def accuracy_records(run: Runner, sizes: Sizes, methods: str, lengths: str) -> Records:
    """``scripts/accuracy/measure``, where a line that fails (status 1) is a figure like others."""
    names = ("steps", "texts", "needles")
    sized = [word for name in names for word in (f"--{name}", str(sizes[name]))]
    told = run.script("accuracy/measure", "--methods", methods, "--lengths", lengths, *sized,
                      *model_option(sizes), may_end_with=1)  # fmt: skip
    records = []
    for row in told:
        kept = ("method", "tokens", "kld", "top1", "needles", "overlap", "mass", "dots", "attended")
        of_texts = [text["kld"] for text in row["texts"]]
        records.append({name: row[name] for name in kept})
        records[-1] |= {"kld_least": min(of_texts), "kld_most": max(of_texts)}
        records[-1] |= {"needles_of": sizes["needles"]}
    return records


def accuracy_at_equal_rows(run: Runner, sizes: Sizes, _: Records) -> Records:
    """All methods attend to as many rows."""
    names = methods_except(sizes, "full").split(",")
    methods = ",".join(f"{name}:budget={sizes['rows']}" for name in names)
    records = accuracy_records(run, sizes, methods, sizes["lengths"].split(",")[-1])
    return [row | {"method": row["method"].partition(":")[0]} for row in records]


def cache_types(run: Runner, sizes: Sizes, _: Records) -> Records:
    """Pairs of types with ``full``, and one type of both with the other methods that read it.

    At the least and the greatest length, without needles: a type by itself changes little.
    """
    pairs = [("full", k, v) for k, v in CACHE_TYPE_PAIRS]
    pairs += [(name, x, x) for name in sizes["readers"].split(",") for x in ("f16", "q8_0", "q4_0")]
    specs = ",".join(f"{name}:cache_type_k={k};cache_type_v={v}" for name, k, v in pairs)
    first, *_others, last = sizes["lengths"].split(",")
    records = accuracy_records(run, {**sizes, "needles": 0}, specs, f"{first},{last}")
    for row in records:
        name, _, options = row["method"].partition(":")
        types = dict(option.split("=") for option in options.split(";") if option)
        k, v = (types.get(f"cache_type_{x}", "f16") for x in "kv")
        row |= {"method": name, "k": k, "v": v}
    return records


def peak_memory(run: Runner, sizes: Sizes, _: Records) -> Records:
    """A document is read and some tokens answered: the peak of the process, method by method."""
    records = []
    for method in sizes["methods"].split(","):
        done = run.cli("run", "-m", sizes["model"], "--raw", "-f", sizes["text"], "-n", "16",
                       "--method", method, "--json")  # fmt: skip
        told = json.loads(done.stdout)
        records.append({
            "method": method, "prompt_tokens": told["prompt_tokens"], "seconds": done.seconds,
            "peak_mb": done.peak_bytes / 1e6,
            "cache_mb": sum(told["ledger"][name] for name in MEMORY_COUNTERS) / 1e6,
            "prefill_tps": told["timings"]["prefill_tps"],
        })  # fmt: skip
    run.commands[1:] = [f"# and so on with --method {sizes['methods'].replace(',', ', ')}"]
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


def cache_memory(run: Runner, sizes: Sizes, told: Any) -> Records:
    records = []
    for name, row in told.items():
        said = sum(row["said"].values())
        records.append({
            "method": name, "formula_mb": sum(row["formula"].values()) / 1e6,
            "cache_mb": said / 1e6, "resident_mb": row["resident"] / 1e6,
            "of_full_percent": 100 * said / row["rows"],
        })  # fmt: skip
    return records


def attention_by_depth(run: Runner, sizes: Sizes, told: Records) -> Records:
    """of_full: attention of ``full`` over the method's."""
    kept = ("method", "depth", "tokens_per_s", "token_ms", "attention_ms", "resident_mb",
            "rows_scored", "rows_attended")  # fmt: skip
    records = [{name: row[name] for name in kept} for row in told]
    full = {row["depth"]: row["attention_ms"] for row in records if row["method"] == "full"}
    return [row | {"of_full": full[row["depth"]] / row["attention_ms"]} for row in records]


def calibration_time(run: Runner, sizes: Sizes, _: Records) -> Records:
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for method in ("fasa", "sals", "faedkv"):
            file = str(Path(folder) / method)
            done = run.cli("calibrate", "-m", sizes["model"], "--method", method, "--output", file)
            run.commands[-1] = run.commands[-1].replace(f" --output {file}", "")
            records.append({"method": method, "seconds": done.seconds})
    return records


def make_random_model(run: Runner, shape: str, wtype: str, path: Path, shown: str) -> None:
    """A model with random weights, whose file lies at ``path`` and is called ``shown``."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(".part")
        subprocess.run(
            [sys.executable, "scripts/random_model", shape, wtype, str(made)],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        made.rename(path)
    run.commands.append(f"scripts/random_model {shape} {wtype} {shown}")


def peers_of_models(run: Runner, models: str) -> Records:
    """Models as in the size ``larger``, which are made once in build/models."""
    records = []
    for each in filter(None, models.split(";")):
        shape, wtype, arguments = each.split(maxsplit=2)
        model = f"build/models/{shape}-{wtype}.gguf"
        make_random_model(run, shape, wtype, ROOT / model, model)
        found = peer_records(run, model, arguments)
        records += [{"model": f"{shape} {wtype.upper()}", **row} for row in found]
    return records


def peer_records(run: Runner, model: str, arguments: str) -> Records:
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

    def measured(run: Runner, sizes: Sizes, _: Records) -> Records:
        records: Records = []
        for model in sizes["trained"].split() or [sizes["model"]]:
            records += [{**row, "model": Path(model).stem} for row in measure(run, sizes, model)]
            shown = (line.replace(model, Path(model).name) for line in run.commands)
            run.commands[:] = [line.replace(f"{run.unfinished}/", "") for line in shown]
        return records

    return measured


def trained_speed(size: str, run: Runner, sizes: Sizes, model: str) -> Records:
    words = expand_arguments(f"-p 0 -n {{tokens}} {sizes[size]} -r 3 --cache-dir", sizes)
    return bench_speeds(run, model, *words, str(run.unfinished / "prompts"))


def trained_prefill(run: Runner, sizes: Sizes, model: str) -> Records:
    return bench_speeds(run, model, *expand_arguments("-p {real_prompts} -n 0 -r 3", sizes))


def trained_script(
    script: str, size: str, run: Runner, sizes: Sizes, model: str, may_end_with: int = 0
) -> Records:
    return run.script(script, "-m", model, *sizes[size].split(), may_end_with=may_end_with)


def trained_choice(run: Runner, sizes: Sizes, model: str) -> Records:
    words = ["--half", "choose", "--methods", sizes["choice_methods"], *sizes["choice"].split()]
    return run.script("accuracy/real", "-m", model, *words)


def trained_accuracy(run: Runner, sizes: Sizes, model: str) -> Records:
    """First what takes many samples, then the rest."""
    records: dict[Any, dict[str, Any]] = {}
    for methods, size in (("real_methods", "real_choice"), ("methods", "real_all")):
        words = ["--half", "held", "--methods", sizes[methods], *sizes[size].split()]
        for row in run.script("accuracy/real", "-m", model, *words):
            key = row["length"], row["spec"]
            records[key] = row | records.get(key, {})
    return list(records.values())


def budget_sweep(run: Runner, sizes: Sizes, _: Records) -> Records:
    """RULER's tasks at all budgets and lengths, then ``compare`` on a text at each length.

    It is long, so what it has is kept in ``run.unfinished`` until it is whole: samples of ``eval
    ruler`` by its own file, ``compare`` by a file a length. A run that was stopped goes on there.
    """
    run.unfinished.mkdir(parents=True, exist_ok=True)
    names, shares = methods_except(sizes, "full").split(","), sizes["budget_shares"].split(",")
    methods = ",".join(["full", *(f"{name}:budget={x}" for name in names for x in shares)])
    line = """eval ruler -m {model} --method {methods} --tasks {ruler_tasks} --lengths
        {budget_lengths} --samples {ruler_samples} -n {ruler_tokens} --json --jsonl"""
    words = expand_arguments(line, {**sizes, "methods": methods})
    done = run.cli(*words, str(run.unfinished / "ruler.jsonl"))
    scores = {
        (row["length"], row["spec"]): row["average"] for row in json.loads(done.stdout)["results"]
    }
    records: Records = []
    for length in map(int, sizes["budget_lengths"].split(",")):
        told = compare_at_length(run, sizes, methods, length)
        full = next(row for row in told["methods"] if row["spec"] == "full")
        for row in told["methods"]:
            score = scores[length, row["spec"]]
            records.append({
                "length": length, "spec": row["spec"], "method": row["name"],
                "ruler": score["score"], "ruler_low": score["low"], "ruler_high": score["high"],
                "ruler_samples": score["n"], "kld": row["kld_mean"],
                "top1": row["top1_agreement"], "rows_attended": row["rows_attended_mean"],
                "tokens_per_s": row["decode_tps"],
                "of_full": row["decode_tps"] / full["decode_tps"],
                "compared_tokens": told["context"],
            })  # fmt: skip
    run.commands[:] = [text.replace(f"{run.unfinished}/", "") for text in run.commands]
    return records


def compare_at_length(run: Runner, sizes: Sizes, methods: str, length: int) -> Any:
    """What ``compare`` says after about ``length`` tokens of the texts laid end to end."""
    kept, text = run.unfinished / f"compare-{length}.json", run.unfinished / f"text-{length}.txt"
    said = ["compare", "-m", sizes["model"], "-f", str(text), "--raw", "--methods", methods,
            "--steps", str(sizes["budget_steps"]), "--json"]  # fmt: skip
    if kept.is_file():
        told = json.loads(kept.read_text(encoding="utf-8"))
        if told["said"] == said:
            run.commands.append(told["command"])
            return told
    text.write_text(text_of_length(run, sizes, length), encoding="utf-8")
    told = json.loads(run.cli(*said).stdout)
    told |= {"said": said, "command": run.commands[-1]}
    kept.write_text(json.dumps(told), encoding="utf-8")
    return told


def text_of_length(run: Runner, sizes: Sizes, length: int) -> str:
    """So much of the texts as has about ``length`` tokens, by their mean length."""
    texts = sorted(TEXTS.glob("*.txt"))
    whole = "\n\n".join(path.read_text(encoding="utf-8") for path in texts)
    sample = run.unfinished / "texts.txt"
    sample.write_text(whole, encoding="utf-8")
    ids = json.loads(run.cli("tokenize", "-m", sizes["model"], "-f", str(sample), "--json").stdout)
    del run.commands[-1]
    return whole[: int(len(whole) * length / len(ids["ids"]))]


# The parts that measure more than their ``run``, or change its records, by name.
MEASUREMENTS: Mapping[str, Callable[[Runner, Sizes, Any], Records]] = {
    "accuracy": lambda run, sizes, _: accuracy_records(
        run, sizes, methods_except(sizes, "full"), sizes["length"]
    ),
    "accuracy_all": lambda run, sizes, _: accuracy_records(run, sizes, "default", sizes["lengths"]),
    "accuracy_rows": accuracy_at_equal_rows,
    "budgets": budget_sweep,
    "cache_types": cache_types,
    "caches": cache_memory,
    "calibration": calibration_time,
    "documents": of_trained(partial(trained_script, "bench/serve", "documents")),
    "far": attention_by_depth,
    "greedy": of_trained(partial(trained_script, TRUTH, "greedy", may_end_with=1)),
    "memory": peak_memory,
    "peer": lambda run, sizes, _: peer_records(run, sizes["model"], sizes["peer"]),
    "peer_larger": lambda run, sizes, _: peers_of_models(run, sizes["larger"]),
    "peer_several": of_trained(lambda run, sizes, name: peer_records(run, name, sizes["together"])),
    "peer_types": lambda run, sizes, _: peers_of_models(run, sizes["types"]),
    "perplexity": of_trained(partial(trained_script, TRUTH, "perplexity", may_end_with=1)),
    "real_accuracy": of_trained(trained_accuracy),
    "real_choice": of_trained(trained_choice),
    "real_prefill": of_trained(trained_prefill),
    "real_speed": of_trained(partial(trained_speed, "real_speed")),
    "several": of_trained(partial(trained_speed, "several")),
    "speculation": of_trained(partial(trained_script, "accuracy/speculation", "speculation")),
    "terminal": terminal_session,
}
PARTS: Mapping[str, Part] = {name: Part(name, **told) for name, told in TABLE["parts"].items()}
