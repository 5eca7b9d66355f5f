"""The part ``budgets``: every method at several budgets and lengths, a record a cell.

It is long, so what it has is kept in build/results until it is whole: samples of ``eval ruler`` by
its own file, ``compare`` by a file a length. A run that was stopped goes on from there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from results_parts import Rows, Sizes
    from results_runner import Runner

TEXTS = Path(__file__).resolve().parents[1] / "accuracy" / "texts"


def budgets(run: Runner, sizes: Sizes) -> Rows:
    """RULER's tasks at all lengths, then ``compare`` on a text at each of them."""
    run.unfinished.mkdir(parents=True, exist_ok=True)
    methods = specs(sizes)
    lengths = [int(length) for length in sizes.budget_lengths.split(",")]
    done = run.cli("eval", "ruler", "-m", sizes.model, "--method", methods, "--tasks",
                   sizes.ruler_tasks, "--lengths", sizes.budget_lengths, "--samples",
                   str(sizes.ruler_samples), "-n", str(sizes.ruler_tokens), "--json", "--jsonl",
                   str(run.unfinished / "ruler.jsonl"))  # fmt: skip
    scores = {
        (row["length"], row["spec"]): row["average"] for row in json.loads(done.stdout)["results"]
    }
    rows: Rows = []
    for length in lengths:
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


def specs(sizes: Sizes) -> str:
    """All methods at all budgets, as ``--methods`` takes them."""
    names = [name for name in sizes.methods.split(",") if name != "full"]
    shares = sizes.budget_shares.split(",")
    return ",".join(["full", *(f"{name}:budget={x}" for name in names for x in shares)])


def compared(run: Runner, sizes: Sizes, methods: str, length: int) -> Any:
    """What ``compare`` says after about ``length`` tokens of the texts laid end to end."""
    kept, text = run.unfinished / f"compare-{length}.json", run.unfinished / f"text-{length}.txt"
    said = ["compare", "-m", sizes.model, "-f", str(text), "--raw", "--methods", methods,
            "--steps", str(sizes.budget_steps), "--json"]  # fmt: skip
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
    ids = json.loads(run.cli("tokenize", "-m", sizes.model, "-f", str(sample), "--json").stdout)
    del run.commands[-1]
    return whole[: int(len(whole) * length / len(ids["ids"]))]
