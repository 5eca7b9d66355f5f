"""Accuracy of methods on the default model, with their defaults, in figures that were measured.

1700 tokens of a manual are prefilled once; then each method decodes the next 48, and its logits are
compared with those of ``full``; with activations of 16 bits, since 8 add to every KLD. KLD and rows
have to be what they were, not only better than a limit: a changed default moves them in either
direction. Whether a default is good is measured by scripts/accuracy/measure.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from opened import open_sequence

from sparsekv_cli.evaluation.compare import compare, parse_methods
from sparsekv_cli.evaluation.result import MethodResult
from sparsekv_cli.methods import METHODS, build_method, method_class
from sparsekv_cli.settings.config import SessionConfig

pytestmark = pytest.mark.slow

TEXT = Path(__file__).parents[1] / "scripts" / "accuracy" / "texts" / "manual.txt"
N_PROMPT, N_STEPS = 1700, 48
# Sums in another order (numpy's BLAS or torch's) change KLD by less than 0.5%, rows by 0.03%.
KLD_MARGIN, ROWS_MARGIN = 0.05, 0.004


class Figures(NamedTuple):
    """Of a method's 48 steps: KLD, steps with full's first token, rows a head, layer and step."""

    kld: float
    top1: int
    scored: float
    attended: float


EXPECTED = {
    "full": Figures(0.00000, 48, 1724.5, 1724.5), "topk": Figures(0.01455, 46, 1724.5, 199.1),
    "streaming": Figures(0.39777, 39, 115.0, 199.1), "quest": Figures(0.00071, 47, 516.3, 1070.2),
    "snapkv": Figures(0.31580, 41, 115.0, 250.8), "h2o": Figures(0.22515, 39, 199.1, 199.1),
    "lfps": Figures(0.03524, 44, 331.5, 139.4), "freekv": Figures(0.00494, 46, 808.7, 553.9),
}  # fmt: skip
# To calibrate the default model takes minutes: the other methods are in test_defaults.py only.
MEASURED = [name for name in METHODS if not method_class(name).needs]


def results(path: Path, names: list[str]) -> dict[str, MethodResult]:
    config = SessionConfig(threads=2, prefill_dtype="f32", activations="16", ctx_size=2048)
    sequence = open_sequence(path, build_method("full", {}), config)
    ids = sequence.model.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: N_PROMPT + N_STEPS]
    methods = parse_methods(",".join(names))
    rows = compare(sequence.model, methods, ids[:N_PROMPT], N_STEPS, ids[N_PROMPT:])
    found = {row.name: row for row in rows}
    sequence.model.gguf.close()
    return found


@pytest.fixture(scope="module")
def rows(request, default_model):
    """Of the methods that are tested."""
    tests = [item for item in request.session.items if item.parent is request.node]
    chosen = [test.callspec.params["name"] for test in tests if hasattr(test, "callspec")]
    return results(default_model, chosen)


@pytest.mark.parametrize("name", MEASURED)
def test_figures_are_what_they_were(name, rows):
    check(name, rows[name])


def test_every_method_without_calibration_is_measured():
    assert set(EXPECTED) == set(MEASURED)


def check(name: str, row: MethodResult) -> None:
    found = Figures(
        row.kld_mean, round(N_STEPS * row.top1_agreement),
        row.rows_scored_mean, row.rows_attended_mean,
    )  # fmt: skip
    assert name in EXPECTED, f"EXPECTED has no figures of {name}; now they are {found}"
    expected = EXPECTED[name]
    assert found.kld == pytest.approx(expected.kld, rel=KLD_MARGIN), found
    assert found.top1 == pytest.approx(expected.top1, abs=2), found
    for rows, known in ((found.scored, expected.scored), (found.attended, expected.attended)):
        assert rows == pytest.approx(known, rel=ROWS_MARGIN), found
