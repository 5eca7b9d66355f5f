"""Sequences on a model whose layers alternate between a window and all tokens."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from reference_decoder import nmse
from tiny_sequences import decoded, tokens

from sparsekv_cli.cache.spec import window_rows
from sparsekv_cli.cli import cli
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.compare import compare, parse_methods

WINDOW = 40  # of the tiny Gemma 3
SHAPE = {
    "arch": "gemma3", "n_layer": 4, "n_embd": 128, "n_head": 2, "n_head_kv": 1, "n_ff": 128,
    "metadata": {"gemma3.attention.sliding_window_pattern": 2},
}  # fmt: skip
ROW = 2 * 2 * 64  # bytes of K and V of a token in f16


@pytest.mark.parametrize("n_steps", [10, 400])
def test_an_answer_is_made_again_from_the_end_of_the_prompt(n_steps, sequence_of):
    sequence = sequence_of("topk", budget="10", shape=SHAPE)
    for seed in (0, 1):  # a second turn, after an answer of which the windows keep the end
        sequence.prefill(tokens(120, seed))
        n, text = len(sequence.tokens), tokens(n_steps, seed + 2)
        first = decoded(sequence, text)
        sequence.rewind(n)
        assert len(sequence.tokens) == n
        np.testing.assert_array_equal(decoded(sequence, text), first)


def test_where_windows_are_gone_it_begins_anew(sequence_of):
    sequence, fresh = (sequence_of("full", shape=SHAPE) for _ in range(2))
    sequence.prefill(tokens(500))
    sequence.rewind(200)
    assert sequence.tokens == []
    np.testing.assert_array_equal(sequence.prefill(tokens(90)), fresh.prefill(tokens(90)))


def test_memory_and_counts_are_those_of_the_layers_kinds(sequence_of):
    sequence = sequence_of("full", shape=SHAPE)
    sequence.prefill(tokens(600))
    decoded(sequence, tokens(8, 1))
    ledger = sequence.ledger()
    assert ledger["rows_total"] == 2 * 2 * sum(range(601, 609))  # two full layers, two heads
    assert ledger["bytes_host_window"] == 2 * window_rows(WINDOW) * ROW
    assert ledger["bytes_host"] - ledger["bytes_host_window"] >= 2 * 608 * ROW
    assert ledger["bytes_read"] == ROW * (2 * sum(range(601, 609)) + 2 * 8 * WINDOW)


def test_dense_layers_are_full_ones(sequence_of):
    sequence = sequence_of("topk", budget="10", dense_layers="1", shape=SHAPE)
    sequence.prefill(tokens(100))
    decoded(sequence, tokens(2, 1))
    assert [type(cache).__name__ for cache in sequence.caches] == [
        "WindowCache", "DenseCache", "WindowCache", "_TopKCache",
    ]  # fmt: skip
    with pytest.raises(SparseKVError, match="layer 2, a window layer, which no method changes; th"):
        sequence_of("topk", dense_layers="2", shape=SHAPE)


def test_methods_are_compared_on_full_layers(sequence_of):
    sequence = sequence_of("full", shape=SHAPE)
    methods = parse_methods("topk:budget=20;dense_layers=none,streaming:budget=20")
    full, topk, _ = compare(sequence.model, methods, tokens(200), 6, tokens(6, 1))
    assert full.kld_mean == 0 and topk.kld_mean > 0
    assert full.rows_attended_mean == np.mean(range(201, 207))
    assert topk.rows_attended_mean == 24 and 0 < topk.attn_mass_recall < 1


def test_inspect_shows_the_memory_of_each_kind(tiny_model):
    result = CliRunner().invoke(cli, ["inspect", str(tiny_model(**SHAPE)), "--json"])
    full, window = sorted(json.loads(result.stdout)["layers"], key=lambda row: row["kind"])
    assert full == {"kind": "full", "layers": 2, "bytes": 2 * 32768 * ROW, "tokens": 32768}
    assert window["layers"] == 2 and window["bytes"] == 2 * window_rows(WINDOW) * ROW


def test_a_changed_last_message_keeps_the_others(sequence_of):
    sequence = sequence_of("full", shape=SHAPE)
    for seed, n in ((0, 300), (1, 200)):
        sequence.prefill(tokens(n, seed))
        decoded(sequence, tokens(150, seed + 2))
    sequence.rewind(460)
    assert len(sequence.tokens) == 450  # where the second message began
    changed = tokens(90, 5)
    again, before = sequence.prefill(changed), tokens(300) + tokens(150, 2)
    sequence.reset()
    assert nmse(sequence.prefill(before + changed), again) < 1e-9
