"""The report of ``advise``: an object for ``--json``, and the same for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv_cli.commands.shared.tables import print_pairs, print_table, size
from sparsekv_cli.commands.shared.terminal import one_line, say, write_text

if TYPE_CHECKING:
    from sparsekv_cli.commands.advise.document import Reading
    from sparsekv_cli.model import Model
    from sparsekv_cli.planning.advice import Advice


def as_object(
    model: Model,
    reading: Reading,
    advice: Advice,
    answers: Mapping[str, str],
    line: str,
    seconds: float,
) -> dict[str, Any]:
    """Returns the object for ``--json``. seconds: the time of all work after the reading."""
    from sparsekv_cli.evaluation.roofline import cpu_name

    return {
        "model": str(model.gguf.path),
        "cpu": cpu_name(),
        "threads": model.n_threads,
        "is_busy": advice.is_busy,
        "document": reading.as_dict(),
        "measuring_s": seconds,
        "facts_from": advice.facts_from,
        "methods": [advice.as_dict(trial) for trial in (advice.full, *advice.best)],
        "no_difference": advice.equal,
        "left_out": advice.reasons(),
        "answers": dict(answers),
        "advice": {"method": advice.chosen.method.name, "why": advice.why, "command": line},
    }


def print_report(found: Mapping[str, Any], advice: Advice) -> None:
    """Prints the report for people, on stdout. The last line is the command."""
    document = found["document"]
    part = document["share_read"]
    whole = "" if part == 1 else f", {100 * part:.3g} % of it"
    again = "as long the next time, not kept on disk"
    if document["is_kept"]:
        again = f"{document['seconds_again']:.1f} s the next time, from disk"
    facts = f", facts planted after token {found['facts_from']}" * bool(advice.n_facts)
    print_pairs(
        "",
        [
            ("model", Path(found["model"]).name),
            ("machine", f"{found['cpu']}, {found['threads']} threads"),
            ("document", f"{document['source']}: {document['tokens']} tokens{whole}"),
            ("reading", f"{document['seconds']:.1f} s; {again}"),
            ("measuring", f"{found['measuring_s']:.0f} s{facts}"),
        ],
    )
    columns = ["method", "t/s", "times as fast", "memory", "same word", "facts found"]
    rows = [columns, *map(_row, found["methods"])]
    if advice.is_busy:
        rows = [[row[0], *row[3:]] for row in rows]  # without the figures that rank
    print_table("methods", rows[0], rows[1:])
    for what, groups in found["no_difference"].items():
        if groups:
            joined = "; ".join(", ".join(group) for group in groups)
            write_text(f"no difference in {what} within noise: {joined}\n")
    by_reason: dict[str, list[str]] = {}
    for name, reason in found["left_out"].items():
        by_reason.setdefault(one_line(reason), []).append(name)
    for reason, names in by_reason.items():
        write_text(f"left out: {', '.join(names)}: {reason}\n")
    if found["answers"]:
        answers = [(name, one_line(text)) for name, text in found["answers"].items()]
        print_table("answers", (), answers)
    if advice.is_busy:
        speeds = ", ".join(f"{each['spec']} {each['decode_tps']:.1f}" for each in found["methods"])
        say(
            "no method is ranked, because the speeds are not to be believed: other programs used "
            f"this machine; measured t/s: {speeds}; repeat it when they have finished"
        )
    write_text(f"{found['advice']['why']}\n{found['advice']['command']}\n")


def _row(method: Mapping[str, Any]) -> list[str]:
    """Returns a line of the table."""
    facts = method["facts"]
    return [
        method["spec"],
        f"{method['decode_tps']:.1f}",
        f"{method['times_as_fast']:.2f}",
        size(method["bytes"]),
        f"{method['same_words']} of {method['words']}" if facts else "",
        f"{method['facts_found']} of {facts}" if facts else "",
    ]
