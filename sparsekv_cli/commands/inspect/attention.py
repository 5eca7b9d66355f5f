"""``inspect --attention``: how a model attends to a text, as tables, JSON or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekv_cli.commands.options.model import build_method, load_model
from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.commands.shared.prompt import read_prompt
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import say, write_json
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.report.figures import check_matplotlib
from sparsekv_cli.settings.config import SessionConfig

if TYPE_CHECKING:
    from sparsekv_cli.planning.attention import AttentionMeasures, Suitability

# The figures of a picture by layer and head, and the largest value; 0: the largest that occurs.
PANELS = (
    ("mass of the best 5% of rows", "mass", 1.0),
    ("mass of the first 4 rows (sinks)", "sinks", 1.0),
    ("mass of the last 5% of rows", "recent", 1.0),
    ("5% of rows, by past attention (vertical)", "vertical", 1.0),
    ("5% of distances, by past attention (slash)", "slash", 1.0),
    ("best 5% among candidates of both (past)", "past", 1.0),
    ("5% of rows, in pages by bounds", "pages", 1.0),
    ("cosine of adjacent queries", "cosine", 1.0),
    ("directions of 90% of the keys' variance", "rank", 0.0),
)


def inspect_attention(
    path: Path, file: str | None, n_tokens: int, png: str | None, as_json: bool
) -> None:
    """Measures the model's attention to a text (None: the built-in one), and shows it.

    png: a file for the picture. Raises SparseKVError for a text that is too short, or without
    matplotlib.
    """
    if png is not None:
        check_matplotlib()
    text = None if file is None else read_prompt(None, file)
    model = load_model(path, build_method("full", {}), SessionConfig(device="cpu"))
    from sparsekv_cli.calibration.calibrations import CalibrationText, built_in_text
    from sparsekv_cli.planning.attention import judge, measure_attention

    source = built_in_text() if text is None else CalibrationText(str(file), text)
    ids = model.tokenizer.encode(source.text, add_eos=False, parse_special=False)[:n_tokens]
    with PrefillProgress("attention") as progress:
        measures = measure_attention(model, ids, progress)
    judged = judge(measures)
    if png is not None:
        draw(measures, judged, path.name, Path(png))
    if as_json:
        write_json(as_dict(measures, judged, path, source.name))
    else:
        show(measures)
        say(judged.sentence)


def as_dict(
    measures: AttentionMeasures, judged: Suitability, path: Path, text: str
) -> dict[str, Any]:
    """Returns the object that ``--json`` prints. Its values are by layer, then by head."""
    from sparsekv_cli.planning.attention import SHARES

    layers = []
    for i, layer in enumerate(measures.layers):
        values: dict[str, Any] = {"layer": layer}
        for j, share in enumerate(SHARES):
            values[f"mass_{share:.0%}"] = rounded(measures.mass[i, :, j])
        for _, name, _ in PANELS[1:]:
            values[name] = rounded(getattr(measures, name)[i])
        layers.append(values | {"spectrum": rounded(measures.spectrum[i])})
    return {
        "model": str(path),
        "text": text,
        "tokens": measures.n_tokens,
        "queries": measures.n_queries,
        "suits": judged.suits,
        "method": judged.method,
        "found": {name: round(share, 4) for name, share in judged.found.items()},
        "sentence": judged.sentence,
        "layers": layers,
    }


def rounded(values: np.ndarray) -> list[Any]:
    return np.round(values, 4).tolist()


def show(measures: AttentionMeasures) -> None:
    """A line a layer, means over its heads, on stdout."""
    from sparsekv_cli.planning.attention import SHARES

    names = ("sinks", "recent", "vertical", "slash", "past", "pages", "cosine")
    rows = []
    for i, layer in enumerate(measures.layers):
        means = [*measures.mass[i].mean(0), *(getattr(measures, name)[i].mean() for name in names)]
        rank = f"{measures.rank[i].mean():.0f}"
        rows.append([str(layer), *(f"{value:.2f}" for value in means), rank])
    columns = ("layer", *(f"{share:.0%}" for share in SHARES), *names, "key rank")
    title = f"attention of {measures.n_queries} queries of {measures.n_tokens} tokens"
    print_table(title, columns, rows)


def draw(measures: AttentionMeasures, judged: Suitability, name: str, to: Path) -> None:
    """A picture of all measures by layer and head, and of the keys' spectrum by layer."""
    from matplotlib.figure import Figure

    from sparsekv_cli.planning.attention import SHARE, SHARES

    figure = Figure(figsize=(16, 8), layout="constrained")
    words = judged.sentence.split("; ")
    figure.suptitle("\n".join([name, "; ".join(words[:1]), "; ".join(words[1:])]), fontsize=10)
    places = figure.subplots(2, 5).ravel()
    for axes, (title, field, most) in zip(places, PANELS, strict=False):
        values = getattr(measures, field)
        if field == "mass":
            values = values[..., SHARES.index(SHARE)]
        image = axes.imshow(
            values, aspect="auto", vmin=0, vmax=most or None, cmap="viridis",
            interpolation="nearest",
        )  # fmt: skip
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("kv head" if field == "rank" else "head")
        axes.set_ylabel("layer")
        step = max(1, len(measures.layers) // 10)
        axes.set_yticks(range(0, len(measures.layers), step), measures.layers[::step])
        figure.colorbar(image, ax=axes)
    axes = places[len(PANELS)]
    for i, spectrum in enumerate(measures.spectrum):
        shade = str(0.8 * i / max(1, len(measures.spectrum) - 1))
        axes.plot(range(1, len(spectrum) + 1), spectrum.cumsum(), color=shade, linewidth=0.8)
    axes.axhline(0.9, linestyle="--", linewidth=0.8)
    axes.set_title("the keys' variance (darker: first layers)", fontsize=9)
    axes.set_xlabel("directions")
    axes.set_ylim(0, 1.02)
    try:
        figure.savefig(to, dpi=110)
    except (OSError, ValueError) as error:
        raise SparseKVError(f"{to}: the picture cannot be written: {error}") from None
