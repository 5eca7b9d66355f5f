"""From the parts of results.toml to rows: flat dictionaries of figures.

A part's own function has its name, or what its ``rows`` says; it gets the Runner, the sizes and
the rows of the part's ``run``. What ran is recorded, so that docs/benchmarks.md names the commands.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from results_runner import ROOT, Runner

Rows = list[dict[str, Any]]
Sizes = Mapping[str, Any]

TABLE = tomllib.loads(Path(__file__).with_name("results.toml").read_text(encoding="utf-8"))
SIZES: Sizes = TABLE["sizes"]
TINY: Sizes = SIZES | TABLE["tiny"]
TEXTS = ROOT / "scripts" / "accuracy" / "texts"
DOCUMENT = "scripts/demo_document.txt"
PEERS = ("llama.cpp", "ik_llama.cpp")
HELD = ("bytes_host", "bytes_device", "index_bytes")
TYPES_OF_K_AND_V = (
    ("q8_0", "q8_0"), ("q8_0", "q5_1"), ("q8_0", "q4_0"), ("q5_1", "q5_1"), ("q5_1", "q4_0"),
    ("q4_0", "q4_0"),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A table of results.toml, which says what its fields are."""

    title: str = ""
    about: str = ""
    run: str | Sequence[str] = ()
    rows: str = ""
    quick: bool = False
    needs: str = ""
    may_fail: bool = False
    page: str = ""
    columns: str = ""
    split: str = ""

    @property
    def missing(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None

    def measure(self, run: Runner, sizes: Sizes) -> Rows:
        rows: Rows = []
        for line in [self.run] if isinstance(self.run, str) else self.run:
            program, *arguments = filled(line, sizes)
            if program == "bench":
                rows += speeds(run, sizes["model"], *arguments)
            else:
                rows = run.script(program, *arguments, may_end_with=int(self.may_fail))
        return OWN[self.rows](run, sizes, rows) if self.rows else rows


def filled(line: str, sizes: Sizes) -> list[str]:
    """The words of a ``run``, with sizes for their names."""
    given = {**sizes, "not_fast": without(sizes, *sizes["fast"].split(","))}
    given |= {"not_h2o": without(sizes, "h2o"), "other_model": shlex.join(other_model(sizes))}
    words: list[str] = []
    for word in line.split():
        text = word.removeprefix("*").format_map(given)
        words += shlex.split(text) if word.startswith("*") else [text]
    return words


def without(sizes: Sizes, *names: str) -> str:
    """The methods but these."""
    return ",".join(name for name in sizes["methods"].split(",") if name not in names)


def other_model(sizes: Sizes) -> list[str]:
    return [] if sizes["model"] == SIZES["model"] else ["-m", sizes["model"]]


def speeds(run: Runner, model: str, *arguments: str) -> Rows:
    """``bench``: a row a test. of_full: the speed over that of ``full`` in the same test.

    Methods are sparse at every depth, because their own speed is wanted.
    """
    done = run.cli("bench", "-m", model, *arguments, "--sparse-from", "0", "-O", "json")
    rows: Rows = []
    for told in json.loads(done.stdout):
        samples = told["samples_ts"]
        rows.append({
            "method": told["method"], "n_prompt": told["n_prompt"], "n_gen": told["n_gen"],
            "depth": told["n_depth"], "n_seqs": told["n_seqs"], "threads": told["n_threads"],
            "tokens_per_s": statistics.median(samples), "least": min(samples), "most": max(samples),
            "cache_mb": sum(told["ledger"][name] for name in HELD) / 1e6,
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


def distances(run: Runner, sizes: Sizes, methods: str, lengths: str) -> Rows:
    """``scripts/accuracy/measure``, where a line that fails (status 1) is a figure like others."""
    names = ("steps", "texts", "needles")
    sized = [word for name in names for word in (f"--{name}", str(sizes[name]))]
    told = run.script("accuracy/measure", "--methods", methods, "--lengths", lengths, *sized,
                      *other_model(sizes), may_end_with=1)  # fmt: skip
    rows = []
    for row in told:
        kept = ("method", "tokens", "kld", "top1", "needles", "overlap", "mass", "dots", "attended")
        of_texts = [text["kld"] for text in row["texts"]]
        rows.append({name: row[name] for name in kept})
        rows[-1] |= {"kld_least": min(of_texts), "kld_most": max(of_texts)}
        rows[-1] |= {"needles_of": sizes["needles"]}
    return rows


def accuracy(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    return distances(run, sizes, without(sizes, "full"), sizes["length"])


def accuracy_all(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    return distances(run, sizes, "default", sizes["lengths"])


def accuracy_rows(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    """All methods attend to as many rows."""
    names = without(sizes, "full").split(",")
    methods = ",".join(f"{name}:budget={sizes['rows']}" for name in names)
    rows = distances(run, sizes, methods, sizes["lengths"].split(",")[-1])
    return [row | {"method": row["method"].partition(":")[0]} for row in rows]


def cache_types(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    """Pairs of types with ``full``, and one type of both with the other methods that read it.

    At the least and the greatest length, without needles: a type by itself changes little.
    """
    pairs = [("full", k, v) for k, v in TYPES_OF_K_AND_V]
    pairs += [(name, x, x) for name in sizes["readers"].split(",") for x in ("f16", "q8_0", "q4_0")]
    specs = ",".join(f"{name}:cache_type_k={k};cache_type_v={v}" for name, k, v in pairs)
    first, *_others, last = sizes["lengths"].split(",")
    rows = distances(run, {**sizes, "needles": 0}, specs, f"{first},{last}")
    for row in rows:
        name, _, options = row["method"].partition(":")
        types = dict(option.split("=") for option in options.split(";") if option)
        k, v = (types.get(f"cache_type_{x}", "f16") for x in "kv")
        row |= {"method": name, "k": k, "v": v}
    return rows


def percent(run: Runner, sizes: Sizes, rows: Rows) -> Rows:
    return [row | {"percent": 100 * abs(row["ratio"] - 1)} for row in rows]


def memory(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    """A document is read and some tokens answered: the peak of the process, method by method."""
    rows = []
    for method in sizes["methods"].split(","):
        done = run.cli("run", "-m", sizes["model"], "--raw", "-f", sizes["text"], "-n", "16",
                       "--method", method, "--json")  # fmt: skip
        told = json.loads(done.stdout)
        rows.append({
            "method": method, "prompt_tokens": told["prompt_tokens"], "seconds": done.seconds,
            "peak_mb": done.peak_bytes / 1e6,
            "cache_mb": sum(told["ledger"][name] for name in HELD) / 1e6,
            "prefill_tps": told["timings"]["prefill_tps"],
        })  # fmt: skip
    run.commands[1:] = [f"# and so on with --method {sizes['methods'].replace(',', ', ')}"]
    return rows


def terminal(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    """What README's picture shows: the demo, or of another model a comparison."""
    if not other_model(sizes):
        done = run.program("scripts/demo")
        said = "A document" + done.stdout.partition("A document")[2]
    else:
        done = run.cli("compare", "-m", sizes["model"], "-f", DOCUMENT, "--methods",
                       sizes["compared"], "--steps", "32")  # fmt: skip
        said = done.stdout
    return [{"command": run.commands[-1], "output": said.rstrip()}]


def caches(run: Runner, sizes: Sizes, told: Any) -> Rows:
    rows = []
    for name, row in told.items():
        said = sum(row["said"].values())
        rows.append({
            "method": name, "formula_mb": sum(row["formula"].values()) / 1e6,
            "cache_mb": said / 1e6, "resident_mb": row["resident"] / 1e6,
            "of_full_percent": 100 * said / row["rows"],
        })  # fmt: skip
    return rows


def far(run: Runner, sizes: Sizes, told: Rows) -> Rows:
    """of_full: attention of ``full`` over the method's."""
    kept = ("method", "depth", "tokens_per_s", "token_ms", "attention_ms", "resident_mb")
    rows = [{name: row[name] for name in (*kept, "rows_scored", "rows_attended")} for row in told]
    full = {row["depth"]: row["attention_ms"] for row in rows if row["method"] == "full"}
    return [row | {"of_full": full[row["depth"]] / row["attention_ms"]} for row in rows]


def calibration(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in ("fasa", "sals", "faedkv"):
            file = str(Path(folder) / method)
            done = run.cli("calibrate", "-m", sizes["model"], "--method", method, "--output", file)
            run.commands[-1] = run.commands[-1].replace(f" --output {file}", "")
            rows.append({"method": method, "seconds": done.seconds})
    return rows


def random_model(run: Runner, shape: str, wtype: str, path: Path, shown: str) -> None:
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


def shape(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        shown = f"{sizes['shape']}.gguf"
        path = Path(folder) / shown
        random_model(run, sizes["shape"], "q4_k_m", path, shown)
        line = "-p 256 -n {tokens} -d {depths} --method {fast} -r 3"
        rows = speeds(run, str(path), *filled(line, sizes))
    run.commands[-1] = run.commands[-1].replace(str(path), shown)
    return rows


def peer(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    return against_peers(run, sizes["model"], sizes["peer"].split())


def peer_models(run: Runner, models: str) -> Rows:
    """Models as in the size ``larger``, which are made once in build/models."""
    rows = []
    for each in filter(None, models.split(";")):
        shape, wtype, *arguments = each.split()
        model = f"build/models/{shape}-{wtype}.gguf"
        random_model(run, shape, wtype, ROOT / model, model)
        found = against_peers(run, model, arguments)
        rows += [{"model": f"{shape} {wtype.upper()}", **row} for row in found]
    return rows


def against_peers(run: Runner, model: str, arguments: Sequence[str]) -> Rows:
    ik = ["--ik", run.ik] if run.ik else []
    told = run.script("bench/peer", "-m", model, *arguments, *ik)
    if run.ik:
        run.commands[-1] = run.commands[-1].replace(shlex.quote(run.ik), "llama-bench")
    rows = []
    for row in told["rows"]:
        rows.append({"test": row["test"], "unit": row["unit"], "ratio": row["ratio"]})
        of_peers = {name: row["peers"][name] for name in PEERS if name in row["peers"]}
        for name, spread in {"sparsekv-cli": row["sparsekv_cli"], **of_peers}.items():
            rows[-1] |= {f"{name} {x}": spread[x] for x in ("median", "min", "max")}
        for name in of_peers:
            rows[-1][f"{name} version"] = told["programs"].get(name, {}).get("version", "")
    return rows


def trained(run: Runner, sizes: Sizes, measure: Callable[[str], Rows]) -> Rows:
    """Returns the rows of ``measure`` for each trained model. Commands name the file, no folder."""
    rows: Rows = []
    for model in sizes["trained"].split() or [sizes["model"]]:
        rows += [{**row, "model": Path(model).stem} for row in measure(model)]
        shown = (line.replace(model, Path(model).name) for line in run.commands)
        run.commands[:] = [line.replace(f"{run.unfinished}/", "") for line in shown]
    return rows


def real_speed(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    line = "-p 0 -n {tokens} -d {real_depths} --method {methods} -r 3 --cache-dir"
    words = [*filled(line, sizes), str(run.unfinished / "prompts")]
    return trained(run, sizes, lambda model: speeds(run, model, *words))


def real_prefill(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    words = filled("-p {real_prompts} -n 0 --method full -r 3", sizes)
    return trained(run, sizes, lambda model: speeds(run, model, *words))


def real_accuracy(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    """First what takes many samples, then the rest."""

    def measure(model: str) -> Rows:
        rows: dict[Any, dict[str, Any]] = {}
        for methods, size in (("real_methods", "real_choice"), ("methods", "real_all")):
            words = ["--methods", sizes[methods], *sizes[size].split()]
            for row in run.script("accuracy/real", "-m", model, "--half", "held", *words):
                key = row["length"], row["spec"]
                rows[key] = row | rows.get(key, {})
        return list(rows.values())

    return trained(run, sizes, measure)


def budgets(run: Runner, sizes: Sizes, _: Rows) -> Rows:
    """RULER's tasks at all budgets and lengths, then ``compare`` on a text at each length.

    It is long, so what it has is kept in ``run.unfinished`` until it is whole: samples of ``eval
    ruler`` by its own file, ``compare`` by a file a length. A run that was stopped goes on there.
    """
    run.unfinished.mkdir(parents=True, exist_ok=True)
    names, shares = without(sizes, "full").split(","), sizes["budget_shares"].split(",")
    methods = ",".join(["full", *(f"{name}:budget={x}" for name in names for x in shares)])
    line = """eval ruler -m {model} --method {methods} --tasks {ruler_tasks} --lengths
        {budget_lengths} --samples {ruler_samples} -n {ruler_tokens} --json --jsonl"""
    words = filled(line, {**sizes, "methods": methods})
    done = run.cli(*words, str(run.unfinished / "ruler.jsonl"))
    scores = {
        (row["length"], row["spec"]): row["average"] for row in json.loads(done.stdout)["results"]
    }
    rows: Rows = []
    for length in map(int, sizes["budget_lengths"].split(",")):
        told = compared(run, sizes, methods, length)
        full = next(row for row in told["methods"] if row["spec"] == "full")
        for row in told["methods"]:
            score = scores[length, row["spec"]]
            rows.append({
                "length": length, "spec": row["spec"], "method": row["name"],
                "ruler": score["score"], "ruler_low": score["low"], "ruler_high": score["high"],
                "ruler_samples": score["n"], "kld": row["kld_mean"],
                "top1": row["top1_agreement"], "rows_attended": row["rows_attended_mean"],
                "tokens_per_s": row["decode_tps"],
                "of_full": row["decode_tps"] / full["decode_tps"],
                "compared_tokens": told["context"],
            })  # fmt: skip
    run.commands[:] = [text.replace(f"{run.unfinished}/", "") for text in run.commands]
    return rows


def compared(run: Runner, sizes: Sizes, methods: str, length: int) -> Any:
    """What ``compare`` says after about ``length`` tokens of the texts laid end to end."""
    kept, text = run.unfinished / f"compare-{length}.json", run.unfinished / f"text-{length}.txt"
    said = ["compare", "-m", sizes["model"], "-f", str(text), "--raw", "--methods", methods,
            "--steps", str(sizes["budget_steps"]), "--json"]  # fmt: skip
    if kept.is_file():
        told = json.loads(kept.read_text(encoding="utf-8"))
        if told["said"] == said:
            run.commands.append(told["command"])
            return told
    text.write_text(first_tokens(run, sizes, length), encoding="utf-8")
    told = json.loads(run.cli(*said).stdout)
    told |= {"said": said, "command": run.commands[-1]}
    kept.write_text(json.dumps(told), encoding="utf-8")
    return told


def first_tokens(run: Runner, sizes: Sizes, length: int) -> str:
    """So much of the texts as has about ``length`` tokens, by their mean length."""
    texts = sorted(TEXTS.glob("*.txt"))
    whole = "\n\n".join(path.read_text(encoding="utf-8") for path in texts)
    sample = run.unfinished / "texts.txt"
    sample.write_text(whole, encoding="utf-8")
    ids = json.loads(run.cli("tokenize", "-m", sizes["model"], "-f", str(sample), "--json").stdout)
    del run.commands[-1]
    return whole[: int(len(whole) * length / len(ids["ids"]))]


OWN: Mapping[str, Callable[[Runner, Sizes, Any], Rows]] = {
    each.__name__: each
    for each in (accuracy, accuracy_all, accuracy_rows, budgets, cache_types, calibration, caches,
                 far, memory, peer, percent, real_accuracy, real_prefill, real_speed, shape,
                 terminal)
} | {
    "peer_larger": lambda run, sizes, _: peer_models(run, sizes["larger"]),
    "peer_types": lambda run, sizes, _: peer_models(run, sizes["types"]),
}  # fmt: skip
PARTS: Mapping[str, Part] = {name: Part(**told) for name, told in TABLE["parts"].items()}
