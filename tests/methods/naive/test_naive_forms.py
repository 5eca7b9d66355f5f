"""Every method's cache against its naive form: prompts, answers past every border, rewinds."""

from typing import Any

import numpy as np
import pytest
from layer_rows import Geometry
from layer_stream import chunk_input
from naive_pair import ALL, CASES, FORGETFUL, method_of, pair_of

from sparsekv_cli.methods import METHODS, build_method, method_class

GEOMETRIES = [
    Geometry(9, 3, 64, n_rot=64),
    Geometry(8, 2, 80, n_rot=80),
    Geometry(4, 1, 128, n_rot=128),
    Geometry(6, 2, 72, 40, n_rot=48, rope_scale=1.25),  # rows are padded, values of another size
    Geometry(8, 2, 64, n_rot=64, softcap=10.0, has_sinks=True),
]


LATENT = Geometry(8, 1, 80, n_rot=48, v_is_k=True)


def parameters() -> list[Any]:
    """Every case with one of the geometries, and with latent attention, where it is not refused."""
    found = []
    for is_latent in (False, True):
        seen: set[str] = set()
        for i, case in enumerate(CASES):
            if is_latent and method_class(case[0]).needs_values:
                continue
            marks = [pytest.mark.slow] if case[0] in seen else []
            seen.add(case[0])
            geometry = LATENT if is_latent else GEOMETRIES[i % len(GEOMETRIES)]
            name = " ".join(filter(None, (*case, "latent" * is_latent)))
            found.append(pytest.param(*case, geometry, marks=marks, id=name))
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "budget", "options", "geometry"), parameters())
def test_a_method_equals_its_naive_form(name, budget, options, geometry):
    """Two prompts and answers; back to the second prompt, into the first answer and prompt."""
    pair = pair_of(method_of(name, budget, options), geometry)
    pair.prefill(150)
    pair.decode(70)
    pair.prefill(37)
    pair.decode(20)
    pair.truncate(150 + 70 + 37)
    pair.decode(10)
    for n in () if name in FORGETFUL else (200, 130):
        pair.truncate(n)
        pair.decode(10)
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
