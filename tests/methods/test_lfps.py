"""LFPS in whole sequences: its dense layers, its ledger."""

import numpy as np
import pytest
from tiny_sequences import N_HEAD, counts_after, decoded, tokens

from sparsekv_cli.cache.spec import N_SINKS, Budget
from sparsekv_cli.methods import lfps
from sparsekv_cli.methods.quest import Quest


def test_dense_layers_of_lfps_choose_pages_when_the_context_is_long(sequence_of, monkeypatch):
    """Dense until then, and from then on as Quest, whose pages are those of all rows before."""
    monkeypatch.setattr(lfps, "PAGES", Quest(page=8, budget=Budget(tokens=24)))
    options = {"pages_from": "70"}
    paged = sequence_of("lfps", options, budget="5", dense_layers="0,1,2,3")
    full = sequence_of("full")
    quest = sequence_of("quest", {"page": "8"}, budget="24", dense_layers="none")
    for sequence in (paged, full, quest):
        sequence.prefill(tokens(60))
    text = tokens(10, 1)
    np.testing.assert_array_equal(decoded(paged, text), decoded(full, text))
    assert paged.ledger().get("sparse_rows_total", 0) == 0
    for sequence in (paged, quest):
        sequence.rewind(0)
        sequence.prefill(tokens(90))
    np.testing.assert_array_equal(decoded(paged, text), decoded(quest, text))
    counts = paged.ledger()
    assert 0 < counts["sparse_rows_attended"] < counts["sparse_rows_total"] / 2
    for sequence in (paged, full):
        sequence.rewind(0)
        sequence.prefill(tokens(60))
    np.testing.assert_array_equal(decoded(paged, text), decoded(full, text))
    assert all(cache.attended is None for cache in paged.caches)


@pytest.mark.parametrize("budget", ["100%", "200"])
def test_pages_of_lfps_keep_to_its_budget(budget, sequence_of):
    """They never have less than the other layers: a budget of the context changes no bit."""
    full = sequence_of("full")
    paged = sequence_of("lfps", {"pages_from": "20"}, budget=budget, dense_layers="0,1")
    for sequence in (full, paged):
        sequence.prefill(tokens(80))
    np.testing.assert_array_equal(decoded(full, tokens(20, 1)), decoded(paged, tokens(20, 1)))


@pytest.mark.parametrize("preset", ["tuned", "paper"])
def test_ledger_of_lfps(preset, sequence_of):
    sequence = sequence_of("lfps", {"preset": preset}, budget="10%")
    counts = counts_after(sequence, 300, 10)
    n_sparse = {"tuned": 3, "paper": 4}[preset]
    limit = sum(max(round(0.1 * n), 7) + N_SINKS for n in range(301, 311))
    assert 0 < counts["sparse_rows_attended"] <= n_sparse * N_HEAD * limit
    assert 0 < counts["sparse_rows_scored"] < 0.9 * counts["sparse_rows_total"]
    assert counts["sparse_rows_scored"] >= counts["sparse_rows_attended"]
    assert counts["heads_stepped"] == n_sparse * N_HEAD * 10
    assert counts["index_bytes"] > 0 and counts["bounds_read"] > 0


def test_sums_over_rows_go_back_with_them(sequence_of):
    """After rewinds into this prefill, the one before, and further: as if it came at once."""
    used, fresh = (sequence_of("lfps", budget="40") for _ in range(2))
    kept: list[int] = []
    for seed, (n_kept, n_new) in enumerate([(0, 720), (720, 608), (720, 608), (304, 800),
                                            (1104, 608), (1104, 96), (720, 400)]):  # fmt: skip
        used.rewind(n_kept)
        kept = kept[:n_kept] + tokens(n_new, seed)
        fresh.reset()
        first, second = used.prefill(kept[n_kept:]), fresh.prefill(kept)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(decoded(used, tokens(4)), decoded(fresh, tokens(4)))
        for mine, others in zip(used.caches, fresh.caches, strict=True):
            if hasattr(mine, "_constants"):
                np.testing.assert_array_equal(
                    mine._constants.covariance, others._constants.covariance
                )
        used.rewind(len(kept))


@pytest.mark.parametrize(("n_prompt", "budget"), [(10, "12"), (104, "10%")])
def test_a_draft_that_stays_ends_with_its_step(n_prompt, budget, sequence_of):
    """``keep`` is not called. A later step may attend to more rows than what is kept has room for.

    Or the draft attended to all rows, which keeps no tables.
    """
    used, plain = (sequence_of("lfps", budget=budget) for _ in range(2))
    text = tokens(50, 1)
    for sequence in (used, plain):
        sequence.prefill(tokens(n_prompt))
    n = used.most_rows(3)
    used.engine.decode([used], [text[:n]])
    kept = [saved.journal for each in used.caches[1:] if (saved := each._saved[-1].own.tables)]
    assert len(kept) == (3 if n_prompt > 12 else 0)
    before = [[part.copy() for part in journal] for journal in kept]
    np.testing.assert_array_equal(decoded(plain, text)[n:], decoded(used, text[n:]))
    for journal, parts in zip(kept, before, strict=True):
        for now, then in zip(journal, parts, strict=True):
            np.testing.assert_array_equal(now, then)
