"""The pictures of a comparison, drawn by matplotlib from the result of ``contents`` (result.py)."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.report.colours import THEME, colour_of, marker_of
from sparsekv_cli.system.installation import install_command

Contents = Mapping[str, Any]
INK, MUTED, LINE, FOUND, LOST = (
    THEME[name][0] for name in ("ink", "muted", "line", "found", "lost")
)
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparsekv",
}
TICKS = [factor * 10.0**power for power in range(-6, 2) for factor in (1, 2, 5)]
COLUMNS = 4  # pictures in a row
WIDTH = 9.6  # inches
Draw = Callable[[Any, Contents], None]


def check_matplotlib() -> None:
    """Raises SparseKVError if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise SparseKVError(f"pictures need matplotlib: {install_command('plot')}")


def draw_speed(figure: Any, found: Contents) -> None:
    """Draws KLD against tokens a second: a mark a method, its intervals, and the Pareto front."""
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    methods = found["methods"]
    names = [row["name"] for row in methods]
    distances = [row["kld_mean"] for row in methods if row["kld_mean"] > 0]
    least = min(distances, default=1e-3) / 2  # a KLD of 0 is drawn here
    places: dict[str, list[tuple[float, float]]] = {}
    for i, row in enumerate(methods):
        colour, is_front = colour_of(row["name"], names), row["spec"] in found["front"]
        x, y = row["decode_tps"], max(row["kld_mean"], least)
        (left, right), (low, high) = (row["intervals"][k] for k in ("decode_tps", "kld_mean"))
        spread = {"color": colour, "linewidth": 0.9, "alpha": 0.5, "zorder": 2}
        axes.plot([left, right], [y, y], **spread)
        axes.plot([x, x], [max(low, least), max(high, least)], **spread)
        axes.plot(
            [x], [y], marker=marker_of(row["name"], names), color=colour, linestyle="none",
            markersize=8 if is_front else 6, zorder=4, gid=f"point-{i}",
            label=None if row["name"] in places else row["name"],
        )  # fmt: skip
        places.setdefault(row["name"], []).append((x, y))
        if is_front:
            axes.annotate(
                row["spec"].replace(":", "\n"), (x, y), (7, 6), textcoords="offset points",
                fontsize=8, color=INK, zorder=5,
            )  # fmt: skip
    for name, points in places.items():
        if len(points) > 1:
            axes.plot(*zip(*sorted(points), strict=True), color=colour_of(name, names), alpha=0.35)
    front = [row for spec in found["front"] for row in methods if row["spec"] == spec]
    axes.plot(
        [row["decode_tps"] for row in front], [max(row["kld_mean"], least) for row in front],
        color=MUTED, linestyle="--", linewidth=1, zorder=1, label="Pareto front",
    )  # fmt: skip
    highest = max((row["intervals"]["kld_mean"][1] for row in methods), default=1)
    axes.set_yscale("log")
    axes.set_ylim(least / 1.3, max(highest, 2 * least) * 1.4)
    ticks = [tick for tick in TICKS if 1.5 * least < tick < 1.4 * highest]
    ticks = ticks if len(ticks) < 9 else [tick for tick in ticks if f"{tick:.0e}"[0] == "1"]
    axes.set_yticks([least, *ticks], ["0", *(f"{tick:g}" for tick in ticks)])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("tokens a second (faster to the right)")
    axes.set_ylabel("KLD to full (nearer above)")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)


def draw_recall(figure: Any, found: Contents) -> None:
    """Draws, for each method, a map of the attended softmax mass by layer and head."""
    import numpy as np

    rows = [row for row in found["methods"] if row["recall"]["layers"]]
    n_layer = 1 + max(max(row["recall"]["layers"]) for row in rows)
    least = min(min(map(min, row["recall"]["heads"])) for row in rows)
    maps = _grid(figure, len(rows))
    image = None
    for i, (axes, row) in enumerate(zip(maps, rows, strict=True)):
        n_head = max(map(len, row["recall"]["heads"]))
        values = np.full((n_head, n_layer), np.nan)
        for layer, heads in zip(row["recall"]["layers"], row["recall"]["heads"], strict=True):
            values[: len(heads), layer] = heads
        image = axes.imshow(
            values, vmin=math.floor(10 * least) / 10, vmax=1, aspect="auto", cmap="viridis",
            interpolation="none", origin="lower", extent=(-0.5, n_layer - 0.5, -0.5, n_head - 0.5),
        )  # fmt: skip
        axes.set_title(f"{_short(row['spec'])}  {row['attn_mass_recall']:.0%}", loc="left")
        axes.tick_params(length=2)
        axes.locator_params(integer=True, nbins=6)
        if i % COLUMNS == 0:
            axes.set_ylabel("head")
        if i + COLUMNS >= len(rows):
            axes.set_xlabel("layer")
    figure.colorbar(image, ax=maps, label="softmax mass attended", shrink=0.9, aspect=30)


def draw_needles(figure: Any, found: Contents) -> None:
    """Draws the facts that each method found, by depth and by the tokens of the prompt."""
    needles = found["needles"]
    specs = [row["spec"] for row in found["methods"]]
    lengths = list(dict.fromkeys(needle["length"] for needle in needles))
    depths = sorted({needle["depth"] for needle in needles})
    for i, (axes, spec) in enumerate(zip(_grid(figure, len(specs)), specs, strict=True)):
        for is_found, colour, marker in ((True, FOUND, "s"), (False, LOST, "x")):
            places = [
                (lengths.index(needle["length"]), needle["depth"])
                for needle in needles
                if needle["found"][spec] == is_found
            ]
            axes.scatter(
                *zip(*places, strict=True) if places else ((), ()), c=colour, s=40, marker=marker
            )
        n_found = sum(needle["found"][spec] for needle in needles)
        axes.set_title(f"{_short(spec)}  {n_found} of {len(needles)}", loc="left")
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(depths, [f"{depth:.0%}" for depth in depths])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(1.15, -0.15)
        axes.tick_params(length=2)
        axes.spines[["top", "right"]].set_visible(False)
        if i % COLUMNS == 0:
            axes.set_ylabel("depth")
        if i + COLUMNS >= len(specs):
            axes.set_xlabel("tokens")


def parts(found: Contents) -> dict[str, tuple[Draw, float]]:
    """Returns name -> (function, height in inches) of each picture for which there is data."""
    n_maps = sum(bool(row["recall"]["layers"]) for row in found["methods"])
    pictures: dict[str, tuple[Draw, float]] = {"speed": (draw_speed, 4.6)}
    if n_maps:
        pictures["recall"] = (draw_recall, 0.6 + 1.5 * -(-n_maps // COLUMNS))
    if found["needles"]:
        n_rows = -(-len(found["methods"]) // COLUMNS)
        pictures["needles"] = (draw_needles, 0.6 + 1.6 * n_rows)
    return pictures


def svg_pictures(found: Contents) -> dict[str, str]:
    """Returns name -> SVG of each picture, without a background. Marks of methods have titles."""
    return {name: _svg(draw, height, found) for name, (draw, height) in parts(found).items()}


def png_picture(found: Contents, title: str) -> bytes:
    """Returns all pictures below each other, as a PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    pictures = parts(found)
    heights = [height for _, height in pictures.values()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (draw, _) in zip(below, pictures.values(), strict=True):
            draw(part, found)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150, facecolor=THEME["page"][0])
    return file.getvalue()


def _svg(draw: Draw, height: float, found: Contents) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure, found)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]

    def titled(group: re.Match[str]) -> str:
        row = found["methods"][int(group[1])]
        said = f"{row['spec']}: {row['decode_tps']:.1f} tokens/s, KLD {row['kld_mean']:.4f}"
        return f"{group[0]}<title>{escape(said)}</title>"

    return re.sub(r'<g id="point-(\d+)">', titled, text)


def _grid(figure: Any, n: int) -> Sequence[Any]:
    """Returns n empty axes, COLUMNS in a row."""
    n_rows = -(-n // COLUMNS)
    axes = figure.subplots(n_rows, COLUMNS, squeeze=False).ravel()
    for empty in axes[n:]:
        empty.set_visible(False)
    return axes[:n]


def _short(spec: str, most: int = 26) -> str:
    return spec if len(spec) <= most else f"{spec[: most - 1]}…"
