"""The pictures of docs/ as SVG text: speed by depth, accuracy against speed, and a terminal."""

import io
import re
from collections.abc import Mapping
from typing import Any

Data = Mapping[str, Mapping[str, Any]]

NEEDS = {
    "speed.svg": {"real_speed"},
    "accuracy.svg": {"real_speed", "real_accuracy"},
    "terminal.svg": {"terminal"},
}
WIDTH = 128  # columns of the terminal
KLD_TICKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


def drawn_from(data: Data) -> set[str]:
    """The pictures for which there are data."""
    return {file for file, parts in NEEDS.items() if parts <= data.keys()}


def pictures(data: Data) -> dict[str, str]:
    """SVG by file name."""
    draw = {"speed.svg": speed, "accuracy.svg": accuracy, "terminal.svg": terminal}
    return {file: draw[file](data) for file in sorted(drawn_from(data))}


def of_last_model(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the rows of the part's last model."""
    rows = part["rows"]
    return [row for row in rows if row["model"] == rows[-1]["model"]]


def speed(data: Data) -> str:
    """Tokens a second of every method by rows in the cache."""
    lines: dict[str, dict[int, float]] = {}
    for row in of_last_model(data["real_speed"]):
        lines.setdefault(row["method"], {})[row["depth"]] = row["tokens_per_s"]
    depths = sorted({depth for points in lines.values() for depth in points})
    figure, axes = canvas()
    for method, points in lines.items():
        x = [depths.index(depth) for depth in points]
        style = {"linewidth": 2.5, "zorder": 3} if method in ("full", "lfps") else {"alpha": 0.8}
        style |= {"color": colour(list(lines), method), "label": method}
        axes.plot(x, list(points.values()), marker="o", markersize=4, **style)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_xlabel("rows in the cache")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=2, fontsize=8)
    return svg(figure)


def accuracy(data: Data) -> str:
    """KLD to full against tokens a second, at the least length and the depth next to it."""
    found = of_last_model(data["real_accuracy"])
    length = min(row["length"] for row in found)
    of_length = [row for row in found if row["length"] == length and row.get("kld_code")]
    rows = list({row["spec"]: row for row in of_length}.values())
    told = of_last_model(data["real_speed"])
    depth = min((row["depth"] for row in told), key=lambda depth: abs(depth - length))
    speeds = {row["method"]: row["tokens_per_s"] for row in told if row["depth"] == depth}
    figure, axes = canvas()
    for row in rows:
        if row["spec"] in speeds:
            point = speeds[row["spec"]], row["kld_code"]
            axes.plot(*point, marker="o", markersize=6, color=colour(list(speeds), row["spec"]))
            axes.annotate(row["spec"], point, (6, 4), textcoords="offset points", fontsize=9)
    axes.axvline(speeds["full"], color="black", linestyle=":")
    axes.set_yscale("log")
    axes.set_yticks(KLD_TICKS, [f"{tick:g}" for tick in KLD_TICKS])
    axes.minorticks_off()
    distances = [row["kld_code"] for row in rows]
    axes.set_ylim(min(distances) / 1.5, max(distances) * 1.5)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens a second at {depth} rows (dotted: full)")
    axes.set_ylabel(f"KLD to full on code, at {length} tokens (nearer above)")
    return svg(figure)


def colour(methods: list[str], method: str) -> str:
    """The same in both pictures: black for full, the others in their order."""
    others = [name for name in methods if name != "full"]
    return "black" if method == "full" else f"C{others.index(method)}"


def canvas() -> Any:
    """A figure and its axes, without a window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def svg(figure: Any) -> str:
    """The same text for the same figure: no date, and names that do not change."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "sparsekv", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.MULTILINE)


def terminal(data: Data) -> str:
    """A terminal with the commands of the part and what they printed."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for row in data["terminal"]["rows"]:
        command = Text("$ ", style="bold green") + Text(row["command"], style="bold")
        console.print(command, overflow="fold")
        for line in row["output"].splitlines():
            console.print(Text(line.rstrip()), overflow="crop", no_wrap=True)
        console.print()
    drawn = console.export_svg(title="sparsekv-cli", theme=MONOKAI, unique_id="terminal")
    # Fonts are those of the reader: a picture in a page may load nothing.
    drawn = re.sub(r"@font-face \{.*?\}\n?", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("Fira Code", "ui-monospace, DejaVu Sans Mono")
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)
