"""Drafts on a device: one step checks several rows, and rejected ones leave nothing."""

from typing import Any

import numpy as np
import pytest
from opened import open_sequence
from tiny_models import make_model

from sparsekv_cli.cache.counters import Ledger
from sparsekv_cli.errors import OptionError
from sparsekv_cli.methods import build_method
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

SIZES = {"n_embd": 64, "n_ff": 64, "n_vocab": 400, "head_dim": 32, "n_layer": 2}
Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "full": ("full", {}),
    "topk": ("topk", {"budget": "24"}),
    "quest": ("quest", {"budget": "24", "page": "8"}),
    "streaming": ("streaming", {"budget": "24"}),
    "quest, q8_0": ("quest", {"budget": "24", "page": "8", **Q8}),
    "windows": ("full", {}),
}
LONG = "windows", "streaming", "quest"  # the interpreter takes a minute
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 400, 60)]
ROUNDING = 6e-3  # products of three rows and more round both factors to 11 bits


def opened(path: Any, case: str, **options: Any) -> Sequence:
    name, given = CASES[case]
    layers = None if name == "full" else "none"
    config = SessionConfig(threads=1, device="cuda", prefill_dtype="f32", **options)
    return open_sequence(path, build_method(name, given, dense_layers=layers), config)


def model_of(folder: Any, case: str) -> Any:
    if case == "windows":
        return make_model(folder / "m.gguf", arch="gemma3", wtype="F32", n_ctx=512,
                          **(SIZES | {"n_layer": 6}))  # fmt: skip
    return make_model(folder / "m.gguf", wtype="F32", n_ctx=512, **SIZES)


def counts(sequence: Sequence) -> list[dict[str, int]]:
    ledgers: list[Ledger] = [cache.ledger for cache in sequence.caches]
    return [dict(ledger.counts) for ledger in ledgers]


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name for name in CASES],
)
def test_rows_of_a_draft_are_what_they_are_alone(case, tmp_path):
    """Of two lengths, to a page's end, and behind rows that were taken back."""
    path = model_of(tmp_path, case)
    alone, drafted = (opened(path, case, speculate=name) for name in ("off", "ngram"))
    for sequence in (alone, drafted):
        sequence.prefill(PROMPT)
        sequence.decode(5)
    tokens, engine = [7, 8, 9, 10, 11, 12, 13, 14], drafted.engine
    most = drafted.most_rows(len(tokens))
    assert most == (3 if "quest" in case else 8)  # 61 rows, pages of 8
    for n, kept in ((most, 2), (2, 2), (drafted.most_rows(6), 1)):
        rows = [tokens[(i * 3 + n) % 8] for i in range(n)]
        (found,) = engine.decode([drafted], [rows])
        assert len(found) == len(rows)
        expected = [alone.decode(token) for token in rows[:kept]]
        np.testing.assert_allclose(found[:kept], expected, atol=ROUNDING)
        drafted.keep(len(drafted.tokens) - n + kept)
        assert drafted.tokens == alone.tokens
        assert counts(drafted) == counts(alone)
        again = rows[-1]
        expected, found = (sequence.decode(again) for sequence in (alone, drafted))
        np.testing.assert_allclose(found, expected, atol=ROUNDING)
    for sequence in (alone, drafted):
        sequence.rewind(62)
    expected, found = (sequence.decode(9) for sequence in (alone, drafted))
    np.testing.assert_allclose(found, expected, atol=ROUNDING)


def test_other_methods_and_places_are_refused_by_name(tmp_path):
    path = model_of(tmp_path, "full")
    for name, kv, what in (
        ("freekv", "auto", "for method freekv"),
        ("lfps", "auto", "for method lfps"),
        ("full", "host", "with K and V on the host"),
    ):
        config = SessionConfig(device="cuda", speculate="ngram", kv=kv)
        with pytest.raises(OptionError, match=f"--speculate ngram makes no drafts on a GPU {what}"):
            open_sequence(path, build_method(name, {}), config)
