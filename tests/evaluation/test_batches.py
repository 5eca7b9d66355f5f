"""Comparisons whose methods do not fit memory together."""

import pytest

from sparsekv_cli.cache import row_sizes
from sparsekv_cli.errors import LacksMemoryError
from sparsekv_cli.evaluation import prefill as shared_prefill
from sparsekv_cli.evaluation.compare import compare, parse_methods


def test_little_memory_means_more_prefills(sequence_of, monkeypatch):
    """Methods whose rows do not fit together are measured all the same, with equal results."""
    sequence = sequence_of("full")
    ids, following = list(range(3, 103)), list(range(50, 58))
    methods = parse_methods("topk:budget=20%,streaming,lfps")
    together = list(compare(sequence.model, methods, ids, 8, following))
    prefilled: list[int] = []
    real = shared_prefill.prefill_all

    def count(sequence, methods, *arguments, **options):
        prefilled.append(len(methods))
        return real(sequence, methods, *arguments, **options)

    monkeypatch.setattr(shared_prefill, "prefill_all", count)
    monkeypatch.setattr(shared_prefill, "available_memory", lambda: 1)
    apart = list(compare(sequence.model, methods, ids, 8, following))
    assert prefilled == [2, 2, 2] and [row.spec for row in apart] == list(methods)
    for row, other in zip(together, apart, strict=True):
        assert (row.kld_mean, row.recall) == (other.kld_mean, other.recall)
    of_logits = 4 * 8 * sequence.model.hparams.n_vocab
    monkeypatch.setattr(row_sizes, "available_memory", lambda: of_logits)
    with pytest.raises(LacksMemoryError, match="K and V of 108 tokens and their index take"):
        list(compare(sequence.model, methods, ids, 8, following))
