"""Every method's cache against its naive form: prompts, answers past every border, rewinds."""

from typing import Any

import numpy as np
import pytest
from layer_rows import Geometry
from layer_stream import chunk_input
from naive_pair import pair_of

from sparsekv_cli.methods import METHODS, build_method, method_class

GEOMETRIES = [
    Geometry(9, 3, 64, n_rot=64),
    Geometry(8, 2, 80, n_rot=80),
    Geometry(4, 1, 128, n_rot=128),
    Geometry(6, 2, 72, 40, n_rot=48, rope_scale=1.25),  # rows are padded, values of another size
    Geometry(8, 2, 64, n_rot=64, softcap=10.0, has_sinks=True),
]
ALL = "100%"  # a budget that covers every context
# Method, budget, options. The first case of a method is not slow; cases take turns at geometries.
CASES: list[tuple[str, str, str]] = [
    ("full", "", ""),
    ("topk", "40", ""),
    ("topk", "20%", "recent=3"),
    ("topk", "1", ""),
    ("streaming", "40", ""),
    ("streaming", "20%", "sinks=0"),
    ("streaming", "20", "sinks=3 reposition=true"),
    ("quest", "64", ""),
    ("quest", "40", "summary=meanstd"),
    ("quest", "20%", "page=5"),
    ("quest", "100", "page=48"),
    ("snapkv", "40", ""),
    ("snapkv", "10%", "window=8 kernel=1"),
    ("snapkv", "30", "window=70"),
    ("h2o", "40", ""),
    ("h2o", "20%", "window=16"),
    ("h2o", "2", ""),
    ("lfps", "24", "epsilon=0.7"),
    ("lfps", "10%", "preset=paper"),
    ("lfps", "24", "scored_by=group candidates=60 a=0.02"),
    ("lfps", "24", "scout=128 epsilon=1"),
    ("lfps", "20", "horizon=30 epsilon=0.7 a=0.05 decay=0.9"),
    ("fasa", "60", ""),
    ("fasa", "40", "preset=paper"),
    ("fasa", "20%", "n_tip=3 variant=m"),
    ("fasa", "5", "n_tip=24 force=none"),
    ("sals", "40", ""),
    ("sals", "40", "preset=paper"),
    ("sals", "10%", "bits=2 rank=24 exact_sinks=false sinks=5"),
    ("sals", "30", "rank=50 score_rank=17 window=20"),
    ("sals", "1", "sinks=0 window=1 bits=16"),
    ("freekv", "64", ""),
    ("freekv", "96", "preset=paper page=16 sinks=16 window=32"),
    ("freekv", "30%", "page=7 window=30 overlap=true"),
    ("freekv", "24", "page=1 sinks=4 window=8"),
    ("freekv", "64", "speculate=false"),
    ("freekv", "64", "correct=false cache_pages=1"),
    ("faedkv", "25%", "allocation=uniform block=48"),
    ("faedkv", "25%", "allocation=uniform block=48 update=additive"),
    ("faedkv", "60%", "allocation=uniform block=16 sinks=3 recent=20 importance=ppl"),
    ("faedkv", "15%", "block=32"),
    ("faedkv", "0.1%", "allocation=uniform block=64"),
    ("faedkv", "20", "allocation=uniform block=16"),
    *((name, ALL, "") for name in METHODS if name != "full"),
]
# Methods that drop rows, or keep old ones roughly, go back to the end of the last prefill.
FORGETFUL = {name for name in METHODS if not method_class(name).holds_all_rows}


def parameters() -> list[Any]:
    seen: set[str] = set()
    found = []
    for i, case in enumerate(CASES):
        marks = [pytest.mark.slow] if case[0] in seen else []
        seen.add(case[0])
        geometry = GEOMETRIES[i % len(GEOMETRIES)]
        found.append(pytest.param(*case, geometry, marks=marks, id=" ".join(filter(None, case))))
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "budget", "options", "geometry"), parameters())
def test_a_method_equals_its_naive_form(name, budget, options, geometry):
    """Two prompts and answers; back to the second prompt, into the first answer and prompt."""
    given = dict(option.split("=") for option in options.split())
    method = build_method(name, given, budget=budget or None, dense_layers="none")
    pair = pair_of(method, geometry)
    if "reposition" in given:
        pair.tolerance = 3e-3  # keys are rotated once more after they were rounded to f16
    pair.prefill(150)
    pair.decode(120)
    pair.prefill(37)
    pair.decode(40)
    pair.truncate(150 + 120 + 37)
    pair.decode(20)
    for n in () if name in FORGETFUL else (200, 130):
        pair.truncate(n)
        pair.decode(20)
    seen = pair.seen
    assert seen["ties"] <= (0.01 * seen["lists"] if name != "sals" else seen["lists"])
    if name == "faedkv":
        assert (len(pair.naive.segments) > 0) == (budget != ALL)
    elif name != "full":
        assert (seen["left out"] > 0.9 * seen["lists"] > 0) == (budget != ALL)
        assert (seen["sparse"] == seen["steps"]) == (budget != ALL)


def test_a_tie_is_one_row_for_one_of_nearly_its_score():
    pair = pair_of(build_method("topk", {}, budget="40"), GEOMETRIES[0])
    pair.prefill(150)
    choice = pair.naive.choose(chunk_input(pair.stream.rows(1), 150))[0]
    ranked = np.argsort(-choice.scores)
    last, next_, worst = ranked[43], ranked[44], ranked[-1]
    without = np.setdiff1d(choice.rows, last)
    for got in (without, np.append(choice.rows, next_), np.append(without, worst)):
        with pytest.raises(AssertionError, match="are no tie"):
            pair.check_tie(choice, got)
    choice.scores[next_] = choice.scores[last] * (1 + 1e-7)
    pair.check_tie(choice, np.append(without, next_))


def test_every_method_is_here_with_budgets_of_both_kinds():
    for name in set(METHODS) - {"full"}:
        budgets = [budget for method, budget, _ in CASES if method == name]
        assert ALL in budgets and len(budgets) >= 3
    assert {method for method, _, _ in CASES} == set(METHODS)
