"""A comparison as one HTML page, which loads nothing: table, pictures, explanations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsekv_cli.evaluation.report.colours import style, themed
from sparsekv_cli.evaluation.report.figures import Contents, svg_pictures

TEMPLATE = Path(__file__).with_name("page.html")
MIB = 1 << 20
# Columns of the table: figure, title, format of a value.
COLUMNS = (
    ("kld_mean", "KLD", "{:.4f}"),
    ("top1_agreement", "top-1", "{:.0%}"),
    ("attn_mass_recall", "mass", "{:.0%}"),
    ("oracle_mass_recall", "of", "{:.0%}"),
    ("topk_overlap", "overlap", "{:.0%}"),
    ("rows_attended_mean", "attended", "{:.0f}"),
    ("rows_scored_mean", "scored", "{:.0f}"),
    ("bytes_host", "host MiB", "{:.1f}"),
    ("bytes_device", "device MiB", "{:.1f}"),
    ("index_bytes", "index MiB", "{:.1f}"),
    ("decode_tps", "tokens/s", "{:.1f}"),
    ("ttft_s", "first token", "{:.2f} s"),
)
SPEEDS = ("decode_tps", "ttft_s")
# fields that say what was measured, and where
ABOUT = ("cpu", "device", "threads", "version", "date", "command")
FIGURES = {"kld_mean": "KLD", "top1_agreement": "top-1", "decode_tps": "tokens/s"}


def columns_of(found: Contents) -> list[tuple[str, str, str]]:
    """Returns the columns of the table. Bytes on a device are left out if there are none.

    If the machine was busy, speeds are left out too, because readers would compare them.
    """
    left_out = set(SPEEDS) if found.get("is_busy") else set()
    if not any(row["bytes_device"] for row in found["methods"]):
        left_out.add("bytes_device")
    return [column for column in COLUMNS if column[0] not in left_out]


def doubt(found: Contents) -> str:
    """Returns a warning about the speeds of a busy machine; empty if the machine was quiet."""
    if not found.get("is_busy"):
        return ""
    speeds = ", ".join(f"{row['spec']} {row['decode_tps']:.1f}" for row in found["methods"])
    return (
        f"no ranking by speed: the machine was busy, so these tokens/s are not to be believed: "
        f"{speeds}; repeat it on a quiet machine"
    )


def cells(row: Mapping[str, Any], columns: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Returns (value, interval) of each column as texts.

    A value or interval that is missing is "-" or "".
    """
    found = []
    for figure, _, form in columns:
        value = row[figure]
        is_bytes = figure.endswith("bytes") or figure.startswith("bytes")
        if value is not None and is_bytes:
            value = value / MIB
        low_high = row["intervals"].get(figure)
        ends = "" if low_high is None else "–".join(form.format(end) for end in low_high)
        found.append(("-" if value is None else form.format(value), ends))
    return found


def equal_sentences(found: Contents) -> list[tuple[str, str]]:
    """Returns for each figure its title, and the methods that are equal within noise.

    The second is a text such as ``a = b; c = d``, or ``none``.
    """
    return [
        (title, "; ".join(" = ".join(group) for group in found["equal"][figure]) or "none")
        for figure, title in FIGURES.items()
        if not (figure in SPEEDS and found.get("is_busy"))
    ]


def headline(found: Contents) -> str:
    """Returns a line such as ``SmolLM2 135M: 7000 tokens, 64 steps``."""
    model = f"{found['model']}: " if found.get("model") else ""
    return f"{model}{found['context']} tokens, {found['steps']} steps"


def page(found: Contents) -> str:
    """Returns the page as HTML."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    columns = columns_of(found)
    return template.render(
        headline=headline(found),
        style=style(),
        columns=[title for _, title, _ in columns],
        rows=[
            (
                row["name"],
                row["spec"].partition(":")[2].replace(";", " "),
                row["spec"] in found["front"],
                cells(row, columns),
            )
            for row in found["methods"]
        ],
        equal=equal_sentences(found),
        front=found["front"],
        pictures={name: themed(svg) for name, svg in svg_pictures(found).items()},
        about=[(key, str(found[key])) for key in ABOUT if found.get(key)],
        n_needles=len(found["needles"]),
    )
