"""What every registered method promises, whatever it does. A new one is tested here by itself.

Whole sequences on tiny models; test_rewinds.py has what holds when a sequence goes back, and
test_limits.py goes layer by layer.
"""

import numpy as np
import pytest
from opened import generated
from tiny_sequences import CHUNK, N_HEAD, N_LAYER, SHAPE, counts_after, decoded, greedy, tokens

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import METHODS, build_method, describe_methods, method_class

SPARSE = [name for name in METHODS if name != "full"]
# Methods whose heads read rows each for themselves, which pays in longer contexts.
BY_HEAD = {"lfps", "freekv"}
# The budget that covers 100 rows; the four sinks come on top of it unless a method says otherwise.
COVERS_100 = dict.fromkeys(SPARSE, "96") | {"fasa": "100", "freekv": "100"}

SHAPES = {
    "one layer, one head": {"n_layer": 1, "n_head": 1, "n_head_kv": 1, "head_dim": 80},
    "groups of 3, 96 wide": {"n_layer": 2, "n_head": 6, "n_head_kv": 2, "head_dim": 96},
    "groups of 7, narrow values": {
        "n_layer": 2, "n_head": 7, "n_head_kv": 1, "head_dim": 80, "value_dim": 48,
    },
    "norms of q and k": {"arch": "qwen3", "n_layer": 2, "n_head": 3, "n_head_kv": 3},
}  # fmt: skip


# --- a budget that covers the context -------------------------------------------------------------


@pytest.mark.parametrize("budget", ["100%", "100000", "just"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_budget_of_the_context_changes_no_bit(name, budget, sequence_of):
    """A prompt and an answer, twice; 100 rows in the end."""
    budget = COVERS_100[name] if budget == "just" else budget
    full, sparse = sequence_of("full"), sequence_of(name, budget=budget, dense_layers="none")
    for n_prompt, n_steps, seed in ((60, 10, 0), (20, 10, 2)):
        prompt, text = tokens(n_prompt, seed), tokens(n_steps, seed + 1)
        np.testing.assert_array_equal(full.prefill(prompt), sparse.prefill(prompt))
        np.testing.assert_array_equal(decoded(full, text), decoded(sparse, text))
    counts = sparse.ledger()
    assert counts["sparse_rows_attended"] == counts["sparse_rows_total"] > 0


@pytest.mark.parametrize("layers", ["0,1,2,3", "-1,-2,-3,-4", "0,1,-1,2"])
@pytest.mark.parametrize("name", SPARSE)
def test_all_layers_dense_is_full(name, layers, sequence_of):
    full, sparse = sequence_of("full"), sequence_of(name, budget="4", dense_layers=layers)
    for sequence in (full, sparse):
        sequence.prefill(tokens(60))
    np.testing.assert_array_equal(decoded(full, tokens(5, 1)), decoded(sparse, tokens(5, 1)))
    assert sparse.ledger().get("sparse_rows_total", 0) == 0


@pytest.mark.parametrize("name", SPARSE)
def test_which_layers_are_dense(name, sequence_of):
    own = {i % N_LAYER for i in method_class(name)().dense_layers}
    for text, dense in ((None, own), ("none", set()), ("", set()), ("-1", {3}), ("0,-2", {0, 2})):
        sequence = sequence_of(name, dense_layers=text)
        found = {i for i, cache in enumerate(sequence.caches) if isinstance(cache, DenseCache)}
        assert found == dense, text
    for text in ("4", "0,-5"):
        with pytest.raises(SparseKVError, match="the model's layers are 0 to 3"):
            sequence_of(name, dense_layers=text)


# --- a budget that does not -----------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSE)
def test_a_small_budget_changes_the_answer_and_is_counted(name, sequence_of):
    """A method that is on and does nothing would attend to every row, and answer like full."""
    full, sparse = sequence_of("full"), sequence_of(name, budget="10", dense_layers="none")
    for sequence in (full, sparse):
        sequence.prefill(tokens(300))
    assert np.abs(decoded(full, tokens(20, 1)) - decoded(sparse, tokens(20, 1))).max() > 1e-3
    counts, whole = sparse.ledger(), full.ledger()
    assert counts["rows_total"] == counts["sparse_rows_total"] == whole["rows_total"]
    assert 0 < counts["sparse_rows_attended"] < 0.7 * counts["sparse_rows_total"]
    assert counts["bytes_read"] > 0


@pytest.mark.parametrize("budget", ["1", "2", "3", "5%"])
@pytest.mark.parametrize("name", SPARSE)
def test_short_contexts_and_small_budgets(name, budget, sequence_of):
    sequence = sequence_of(name, budget=budget, dense_layers="none")
    for n_prompt in (1, 3, 5, 9, 20, 70):
        sequence.rewind(0)
        sequence.prefill(tokens(n_prompt))
        assert np.isfinite(decoded(sequence, tokens(25, 1))).all(), n_prompt


@pytest.mark.parametrize("name", METHODS)
def test_a_generation_as_long_as_the_context(name, sequence_of):
    """Half of the context is prompt, the rest is generated; twice, since nothing is random."""
    answers = []
    for _ in range(2):
        sequence = sequence_of(name, budget="10%", ctx_size=300)
        answers.append(list(generated(sequence, tokens(150), greedy, -1)))
        assert len(answers[-1]) == 151 and sequence.tokens == tokens(150) + answers[-1][:-1]
        assert {cache.n for cache in sequence.caches} == {300}
    assert answers[0] == answers[1]


# --- the ledger -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_rows_are_counted_as_they_are_attended_to(name, sequence_of):
    """Against the lists of rows that the caches keep when they are asked to."""
    sequence = sequence_of(name, budget="20")
    sequence.prefill(tokens(300))
    for cache in sequence.caches:
        cache.records_attended = True
    before, attended, dense, listed = sequence.ledger(), 0, 0, 0
    for n, token in enumerate(tokens(20, 1), 301):
        sequence.decode(token)
        for cache in sequence.caches:
            if cache.attended is not None:
                _, counts = cache.attended
                attended += int(counts.sum()) * (N_HEAD // len(counts))
                listed += 1
            elif isinstance(cache, DenseCache):
                dense += N_HEAD * n
    counts = sequence.ledger()
    found = {key: counts[key] - before.get(key, 0) for key in counts}
    assert found["rows_total"] == N_LAYER * N_HEAD * sum(range(301, 321))
    if listed or name == "full":
        assert found["rows_attended"] == attended + dense
        assert found.get("sparse_rows_attended", 0) == attended
    assert found["bytes_read"] > 0
    assert found["rows_attended"] - found.get("sparse_rows_attended", 0) == dense


def test_ledger_of_full(sequence_of):
    sequence = sequence_of("full")
    sequence.prefill(tokens(60))
    decoded(sequence, tokens(5, 1))
    counts = sequence.ledger()
    assert counts["rows_total"] == counts["rows_scored"] == counts["rows_attended"]
    assert counts.get("sparse_rows_total", 0) == 0 and counts["index_bytes"] == 0
    assert counts["bytes_host"] > 0 and counts["bytes_device"] == counts["bytes_moved"] == 0


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in BY_HEAD])
def test_bytes_read_shrink_with_the_budget(name, sequence_of):
    full = counts_after(sequence_of("full"), 300, 5)["bytes_read"]
    small = counts_after(sequence_of(name, budget="5%", dense_layers="none"), 300, 5)["bytes_read"]
    assert 0 < small < 0.75 * full


# --- types of the cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("f16", "q8_0"), ("q4_0", "q5_1")])
@pytest.mark.parametrize("name", METHODS)
def test_cache_types_are_read_or_refused_by_name(name, types, sequence_of):
    """A budget of the context is full to the bit with them; a rewind is a fresh start."""
    if types[1] not in method_class(name).cache_types:
        with pytest.raises(ValueError, match=rf"': method {name} keeps .* f16 only"):
            sequence_of(name, types=types)
        return
    full, sparse = (
        sequence_of(each, budget="100%", dense_layers="none", types=types)
        for each in ("full", name)
    )
    np.testing.assert_array_equal(full.prefill(tokens(80)), sparse.prefill(tokens(80)))
    exact = decoded(full, tokens(20, 1))
    np.testing.assert_array_equal(exact, decoded(sparse, tokens(20, 1)))
    half = sequence_of("full")
    half.prefill(tokens(80))
    error = np.abs(decoded(half, tokens(20, 1)) - exact).mean()
    assert 1e-5 < error < (0.5 if "q4_0" in types else 0.05)

    used, fresh = (sequence_of(name, budget="12", types=types) for _ in range(2))
    used.prefill(tokens(4 * CHUNK))
    decoded(used, tokens(12, 3))
    used.rewind(2 * CHUNK)
    if used.tokens:  # snapkv and h2o begin anew
        fresh.prefill(tokens(4 * CHUNK)[: 2 * CHUNK])
    np.testing.assert_array_equal(used.prefill(tokens(7, 1)), fresh.prefill(tokens(7, 1)))
    np.testing.assert_array_equal(decoded(used, tokens(10, 2)), decoded(fresh, tokens(10, 2)))


@pytest.mark.parametrize("key", ["cache_type_k", "cache_type_v"])
@pytest.mark.parametrize("name", METHODS)
def test_a_type_that_does_not_exist_is_refused(name, key):
    with pytest.raises(ValueError, match=f"{key} = 'q6_K': must be f16, q8_0, q5_1 or q4_0"):
        build_method(name, {}, **{key: "q6_K"})


def test_descriptions_say_which_types_a_method_reads():
    for described in describe_methods():
        assert tuple(described["cache_types"]) == method_class(described["name"]).cache_types


# --- shapes of models -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_odd_shapes(name, shape, sequence_of):
    """Bit for bit full with a budget of the context; finite, counted and repeatable with less."""
    sizes = {**SHAPE, **SHAPES[shape]}
    full, whole, small = (
        sequence_of(each, budget=budget, dense_layers="none", shape=sizes)
        for each, budget in (("full", None), (name, "100%"), (name, "12"))
    )
    np.testing.assert_array_equal(full.prefill(tokens(70)), whole.prefill(tokens(70)))
    np.testing.assert_array_equal(decoded(full, tokens(10, 1)), decoded(whole, tokens(10, 1)))
    answers = []
    for _ in range(2):
        small.rewind(0)
        small.prefill(tokens(250))
        answers.append(decoded(small, tokens(30, 1)))
    assert np.isfinite(answers[0]).all()
    np.testing.assert_array_equal(*answers)
    counts = small.ledger()
    if name != "full":
        assert 0 < counts["sparse_rows_attended"] < 0.9 * counts["sparse_rows_total"]
