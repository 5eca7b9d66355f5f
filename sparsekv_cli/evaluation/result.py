"""The result of one method in a comparison: figures, values by token, recall by head."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.evaluation.intervals import drawn_means, equal_groups, interval
from sparsekv_cli.evaluation.needles import Needle
from sparsekv_cli.evaluation.observer import Measured
from sparsekv_cli.methods.base import Method

# Figures for which the report names methods that are equal within noise. Steps of methods are timed
# at different times, so each method has its own draws for decode_tps.
COMPARED = ("kld_mean", "top1_agreement", "decode_tps")


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method of a comparison. Names are those of the JSON output.

    Numbers of rows are means over query heads, full layers and steps; dense layers count too. Mass
    and overlap are None if the method chose no rows in any step.
    """

    spec: str
    name: str
    options: Mapping[str, Any]
    kld_mean: float
    top1_agreement: float
    attn_mass_recall: float | None = None
    oracle_mass_recall: float | None = None  # the mass of exact top-k with the same number of rows
    topk_overlap: float | None = None
    rows_attended_mean: float = 0.0
    rows_scored_mean: float = 0.0
    bytes_host: int
    bytes_device: int
    index_bytes: int
    decode_tps: float
    ttft_s: float
    # layer -> the mass of each head
    recall: Mapping[int, list[float]] = field(default_factory=dict)
    # figure -> a value for each token; seconds for decode_tps
    samples: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Returns figure -> bootstrap interval, for figures with a value for each token."""
        found = {}
        for figure, values in self.samples.items():
            low, high = interval(drawn_means(values))
            found[figure] = (1 / high, 1 / low) if figure == "decode_tps" else (low, high)
        return found


def method_result(
    spec: str,
    method: Method,
    layers: Sequence[LayerCache],
    measured: Measured,
    prefill_s: float,
    timed: range,
) -> MethodResult:
    """Returns the result of a method. layers: its caches. timed: the steps whose time counts."""
    n_heads = max(1, sum(of_layer.n_head for of_layer in full_layers(c.spec for c in layers)))
    memory = [cache.memory() for cache in layers]
    by_step = measured.by_step
    samples = {
        "kld_mean": np.array(measured.kld),
        "top1_agreement": np.array(measured.same_top1),
        "attn_mass_recall": np.array(by_step["mass"]),
        "oracle_mass_recall": np.array(by_step["oracle"]),
        "topk_overlap": np.array(by_step["overlap"]),
        "rows_attended_mean": np.array(by_step["rows_attended"]) / n_heads,
        "rows_scored_mean": np.array(by_step["rows_scored"]) / n_heads,
        "decode_tps": np.array([measured.step_s[step] for step in timed]),
    }
    samples = {figure: values for figure, values in samples.items() if len(values)}
    means: dict[str, Any] = {figure: float(values.mean()) for figure, values in samples.items()}
    means["decode_tps"] = 1 / means["decode_tps"]
    return MethodResult(
        spec=spec,
        name=spec.partition(":")[0],
        options=method.options(),
        **means,
        bytes_host=sum(each.host for each in memory),
        bytes_device=sum(each.device for each in memory),
        index_bytes=sum(each.index for each in memory),
        ttft_s=prefill_s + measured.step_s[0],
        recall={
            layer: np.mean(masses, axis=0).tolist()
            for layer, masses in sorted(measured.by_layer.items())
        },
        samples=samples,
    )


def equal_lines(rows: Sequence[MethodResult]) -> dict[str, list[list[str]]]:
    """Returns figure -> groups of methods that are equal within noise, the best group first."""
    found = {}
    for figure in COMPARED:
        draws = {
            row.spec: drawn_means(row.samples[figure], i if figure == "decode_tps" else 0)
            for i, row in enumerate(rows)
        }
        groups = equal_groups(draws)
        if figure == "top1_agreement":
            groups = [group[::-1] for group in reversed(groups)]
        found[figure] = groups
    return found


def pareto_front(rows: Sequence[MethodResult]) -> list[str]:
    """Returns the methods that no other method beats in both speed and KLD, the fastest last."""
    front: list[MethodResult] = []
    for row in sorted(rows, key=lambda row: (-row.decode_tps, row.kld_mean)):
        if not front or row.kld_mean < front[-1].kld_mean:
            front.append(row)
    return [row.spec for row in reversed(front)]


def contents(
    n_context: int,
    n_steps: int,
    rows: Sequence[MethodResult],
    needles: Iterable[Needle] = (),
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a comparison as an object for JSON. ``--json`` prints it, and a report shows it.

    about: the origin of the figures, such as the model and the machine. In the result, ``equal``
    has the methods that are equal within noise, and ``front`` the Pareto front, the fastest last.
    ``recall`` has the mass by layer and head, for layers that choose rows. If ``about`` has
    ``is_busy``, the front is empty.
    """
    return {
        "context": n_context,
        "steps": n_steps,
        **(about or {}),
        "methods": [_method(row) for row in rows],
        "equal": equal_lines(rows),
        "front": [] if (about or {}).get("is_busy") else pareto_front(rows),
        "needles": [asdict(needle) for needle in needles],
    }


def _method(row: MethodResult) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in row.__dataclass_fields__ if name != "samples"}
    recall = {"layers": list(row.recall), "heads": list(row.recall.values())}
    return {**values, "options": dict(row.options), "intervals": row.intervals(), "recall": recall}
