"""What holds for every method on tiny models: exact at full budget, dense layers, turns, ledger."""

from __future__ import annotations

import numpy as np
import pytest
from chunks import attend_chunk
from tiny_models import make_model

from sparsekv_cli.cache.attend import attend_dense
from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import N_SINKS, AttnInput, Budget, LayerSpec
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method, lfps
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.session import Session, load_session

EVICTING_METHODS = ("snapkv", "h2o")  # they cannot go back behind what they dropped
SELECTING_METHODS = ("topk", "streaming", "quest", "lfps", "fasa", "freekv")
# Old rows are kept in another form only, from some 90 and some 190 rows on.
TRANSFORMING_METHODS = ("sals", "faedkv")
SPARSE_METHODS = (*SELECTING_METHODS, *EVICTING_METHODS, *TRANSFORMING_METHODS)
METHODS = ("full", *SPARSE_METHODS)
# By default; others: 0 and 1.
DENSE_LAYERS = {"lfps": {0}, "freekv": {0}, "sals": {0, 1, 3}, "faedkv": set()}
N_LAYER, N_HEAD, N_KV = 4, 6, 2
CHUNK = 16  # prompts that are split at multiples of it are computed alike to the last bit


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("model") / "model.gguf",
        n_layer=N_LAYER,
        n_head=N_HEAD,
        n_head_kv=N_KV,
        head_dim=64,
        n_embd=128,
        n_ff=128,
        attention_gain=4.0,
    )


@pytest.fixture
def session_of(model):
    """Opens sessions on the tiny model: name, options as on the command line."""
    opened: list[Session] = []

    def open_session(name: str, options=None, *, budget=None, dense_layers=None) -> Session:
        budget = None if name == "full" else budget
        method = build_method(name, options or {}, budget=budget, dense_layers=dense_layers)
        config = SessionConfig(threads=1, prefill_dtype="f32", chunk=CHUNK)
        opened.append(load_session(model, method, config))
        return opened[-1]

    yield open_session
    for session in opened:
        session.gguf.close()


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.RandomState(seed).randint(3, 512, n).tolist()


def decode(session: Session, ids) -> np.ndarray:
    return np.stack([session.decode(token) for token in ids])


def greedy(logits, _tokens) -> int:
    return int(np.argmax(logits))


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["100%", "100000", "96"])
@pytest.mark.parametrize("name", SPARSE_METHODS)
def test_a_budget_of_the_context_changes_no_bit(name, budget, session_of):
    prompt, text = tokens(80), tokens(20, 1)  # 100 rows in the end: 96 and 4 sinks
    if name in ("fasa", "freekv") and budget == "96":
        budget = "100"  # their sinks are within the budget
    full, sparse = session_of("full"), session_of(name, budget=budget, dense_layers="none")
    np.testing.assert_array_equal(full.prefill(prompt), sparse.prefill(prompt))
    np.testing.assert_array_equal(decode(full, text), decode(sparse, text))
    counts = sparse.ledger.as_dict()
    assert counts["sparse_rows_attended"] == counts["sparse_rows_total"] > 0


@pytest.mark.parametrize("name", SPARSE_METHODS)
def test_a_smaller_budget_changes_the_answer(name, session_of):
    prompt, text = tokens(200 if name in TRANSFORMING_METHODS else 80), tokens(20, 1)
    full, sparse = session_of("full"), session_of(name, budget="10", dense_layers="none")
    full.prefill(prompt)
    sparse.prefill(prompt)
    assert np.abs(decode(full, text) - decode(sparse, text)).max() > 1e-3


class AllButSinks(Budget):
    """Every row that is no sink."""

    def rows(self, n: int) -> int:
        return n - N_SINKS


class AllRows(Budget):
    """Every row; the first of Quest's pages takes the sinks' rows into account."""

    def rows(self, n: int) -> int:
        return n


@pytest.mark.parametrize(
    ("name", "budget"), [("topk", AllButSinks), ("streaming", AllButSinks), ("quest", AllRows)]
)
def test_selecting_every_row_equals_dense(name, budget, session_of, monkeypatch):
    """The sparse path itself, layer by layer; LFPS' is in tests/cpu/lfps/test_history.py."""
    full, sparse = session_of("full"), session_of(name, dense_layers="none")
    object.__setattr__(sparse.method, "budget", budget(share=1.0))
    cache_type = type(sparse.caches[0])
    select_and_attend = cache_type.decode
    errors = []

    def compare(cache, x):
        out = select_and_attend(cache, x)
        dense = attend_dense(x.q[:, 0], cache.store, cache.spec)
        errors.append(np.abs(out - dense).max())
        return out

    monkeypatch.setattr(cache_type, "decode", compare)
    monkeypatch.setattr(cache_type, "selects_all", lambda self, n: False)
    for session in (full, sparse):
        session.prefill(tokens(80))
    expected, actual = decode(full, tokens(20, 1)), decode(sparse, tokens(20, 1))
    assert len(errors) == 20 * N_LAYER and max(errors) < 1e-5
    # Another order of summation may round a key of the next layer to the neighbouring f16.
    np.testing.assert_allclose(actual, expected, atol=2e-3)
    assert all(cache.attended is not None for cache in sparse.caches)


@pytest.mark.parametrize("name", SPARSE_METHODS)
@pytest.mark.parametrize("budget", ["1", "2", "3", "5%"])
@pytest.mark.parametrize("n_prompt", [1, 3, 5, 9, 20])
def test_short_contexts_and_small_budgets(name, budget, n_prompt, session_of):
    session = session_of(name, budget=budget, dense_layers="none")
    session.prefill(tokens(n_prompt))
    assert np.isfinite(decode(session, tokens(25, 1))).all()


# --- dense layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSE_METHODS)
@pytest.mark.parametrize("layers", ["0,1,2,3", "-1,-2,-3,-4", "0,1,-1,2"])
def test_all_layers_dense_is_full(name, layers, session_of):
    full, sparse = session_of("full"), session_of(name, budget="4", dense_layers=layers)
    for session in (full, sparse):
        session.prefill(tokens(60))
    np.testing.assert_array_equal(decode(full, tokens(5, 1)), decode(sparse, tokens(5, 1)))
    assert sparse.ledger.as_dict().get("sparse_rows_total", 0) == 0


@pytest.mark.parametrize("name", SPARSE_METHODS)
@pytest.mark.parametrize(
    ("layers", "dense"),
    [(None, {0, 1}), ("none", set()), ("", set()), ("-1", {3}), ("0,-2", {0, 2})],
)
def test_which_layers_are_dense(name, layers, dense, session_of):
    session = session_of(name, dense_layers=layers)
    if layers is None:
        dense = DENSE_LAYERS.get(name, dense)
    assert {i for i, c in enumerate(session.caches) if isinstance(c, DenseCache)} == dense


@pytest.mark.parametrize("n_prompt", [1, 5])
def test_lfps_starts_by_itself_after_a_tiny_prompt(n_prompt, session_of):
    session = session_of("lfps", budget="8", dense_layers="none")
    session.prefill(tokens(n_prompt))
    assert np.isfinite(decode(session, tokens(60, 1))).all()
    counts = session.ledger.as_dict()
    assert counts["sparse_rows_attended"] < counts["sparse_rows_total"] / 2


def test_dense_layers_of_lfps_choose_pages_when_the_context_is_long(session_of, monkeypatch):
    """Dense until then, and from then on as Quest, whose pages are those of all rows before."""
    monkeypatch.setattr(lfps, "PAGES", Quest(page=8, budget=Budget(tokens=24)))
    options = {"dense_rows": "70"}
    paged = session_of("lfps", options, budget="5", dense_layers="0,1,2,3")
    full = session_of("full")
    quest = session_of("quest", {"page": "8"}, budget="24", dense_layers="none")
    for session in (paged, full, quest):
        session.prefill(tokens(60))
    text = tokens(10, 1)
    np.testing.assert_array_equal(decode(paged, text), decode(full, text))
    assert paged.ledger.as_dict().get("sparse_rows_total", 0) == 0
    for session in (paged, quest):
        session.rewind(0)
        session.prefill(tokens(90))
    np.testing.assert_array_equal(decode(paged, text), decode(quest, text))
    counts = paged.ledger.as_dict()
    assert 0 < counts["sparse_rows_attended"] < counts["sparse_rows_total"] / 2
    for session in (paged, full):
        session.rewind(0)
        session.prefill(tokens(60))
    np.testing.assert_array_equal(decode(paged, text), decode(full, text))
    assert all(cache.attended is None for cache in paged.caches)


@pytest.mark.parametrize("budget", ["100%", "200"])
def test_pages_of_lfps_keep_to_its_budget(budget, session_of):
    """They never have less than the other layers: a budget of the context changes no bit."""
    full = session_of("full")
    paged = session_of("lfps", {"dense_rows": "20"}, budget=budget, dense_layers="0,1")
    for session in (full, paged):
        session.prefill(tokens(80))
    np.testing.assert_array_equal(decode(full, tokens(20, 1)), decode(paged, tokens(20, 1)))


@pytest.mark.parametrize("layers", ["4", "0,-5"])
def test_a_dense_layer_that_the_model_lacks_is_refused(layers, session_of):
    with pytest.raises(SparseKVError, match="the model's layers are 0 to 3"):
        session_of("lfps", dense_layers=layers)


# --- turns, rewinding, interruption ---------------------------------------------------------------


def test_turns_equal_one_forward(session_of):
    parts = [tokens(n, seed) for seed, n in enumerate((37, 6, 21, 5))]
    session = session_of("full")
    rows = [session.prefill(parts[0], all_logits=True), decode(session, parts[1])]
    rows += [session.prefill(parts[2], all_logits=True), decode(session, parts[3])]
    whole = session_of("full").prefill(
        [*parts[0], *parts[1], *parts[2], *parts[3]], all_logits=True
    )
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=2e-3)
    assert session.tokens == [*parts[0], *parts[1], *parts[2], *parts[3]]


@pytest.mark.parametrize("name", METHODS)
def test_a_rewound_session_equals_a_fresh_one(name, session_of):
    """To the end of the prompt, into the prompt, and to nothing; or it has to start again."""
    prompt, question, answer = tokens(4 * CHUNK), tokens(7, 1), tokens(10, 2)
    used = session_of(name, budget="12")
    for keep in (4 * CHUNK, 2 * CHUNK, 0):
        lost = name == "h2o" or (name == "snapkv" and keep < len(prompt))
        kept = 0 if lost else keep
        fresh = session_of(name, budget="12")
        if kept:
            fresh.prefill(prompt[:kept])
        used.rewind(0)
        used.prefill(prompt)
        decode(used, tokens(12, 3))
        used.rewind(keep)
        assert used.tokens == prompt[:kept]
        np.testing.assert_array_equal(used.prefill(question), fresh.prefill(question))
        np.testing.assert_array_equal(decode(used, answer), decode(fresh, answer))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("calls", range(1, 9))
def test_an_interrupted_prefill_adds_nothing(name, calls, session_of):
    """Progress is reported after each chunk of each layer: 2 chunks, 4 layers.

    Once a layer has dropped rows, the sequence is lost: it has to be read again.
    """

    def interrupt(done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    prompt, question, answer = tokens(3 * CHUNK), tokens(7, 1), tokens(10, 2)
    session, other = session_of(name, budget="12"), session_of(name, budget="12")
    for each in (session, other):
        each.prefill(prompt)
        decode(each, answer)
    if name in EVICTING_METHODS and calls > 6:  # layer 2, the first that is not dense, is done
        other.rewind(0)
    left, before = calls, list(other.tokens)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(tokens(2 * CHUNK, 5), interrupt)
    assert left == 0 and session.tokens == before
    assert {cache.n for cache in session.caches} == {len(before)}
    np.testing.assert_array_equal(session.prefill(question), other.prefill(question))
    np.testing.assert_array_equal(decode(session, answer), decode(other, answer))


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_decode_adds_nothing(name, session_of, monkeypatch):
    session, other = session_of(name, budget="12"), session_of(name, budget="12")
    prompt, question, answer = tokens(3 * CHUNK), tokens(7, 1), tokens(10, 2)
    for each in (session, other):
        each.prefill(prompt)
        decode(each, answer)
    if name == "h2o":  # a layer before the last has dropped a row
        other.rewind(0)
    before = list(other.tokens)
    last = session.caches[-1]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "decode", interrupt)
        patch.setattr(last, "end", interrupt)  # where its step is compiled code
        session.decode(5)
    assert session.tokens == before
    assert {cache.n for cache in session.caches} == {len(before)}
    np.testing.assert_array_equal(session.prefill(question), other.prefill(question))
    np.testing.assert_array_equal(decode(session, answer), decode(other, answer))


# --- generation and the ledger --------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_generation_as_long_as_the_prompt(name, session_of):
    session = session_of(name, budget="10%")
    prompt = tokens(150)
    produced = list(session.generate(prompt, greedy, 150))
    assert len(produced) == 150
    assert session.tokens == prompt + produced[:-1]  # the last one is not decoded
    assert {cache.n for cache in session.caches} == {299}
    again = list(session_of(name, budget="10%").generate(prompt, greedy, 150))
    assert again == produced


def counts_after(session: Session, n_prompt: int, n_steps: int) -> dict[str, int]:
    session.prefill(tokens(n_prompt))
    decode(session, tokens(n_steps, 1))
    counts = session.ledger.as_dict()
    lengths = range(n_prompt + 1, n_prompt + n_steps + 1)
    assert counts["rows_total"] == N_LAYER * N_HEAD * sum(lengths)
    return counts


def test_ledger_of_full(session_of):
    counts = counts_after(session_of("full"), 60, 5)
    assert counts["rows_total"] == counts["rows_scored"] == counts["rows_attended"]
    assert counts.get("sparse_rows_total", 0) == 0 and counts["index_bytes"] == 0
    assert counts["bytes_host"] > 0 and counts["bytes_device"] == counts["bytes_moved"] == 0


def test_ledger_of_streaming(session_of):
    session = session_of("streaming", {"sinks": "3"}, budget="10", dense_layers="0")
    counts = counts_after(session, 60, 5)
    dense = N_HEAD * sum(range(61, 66))
    assert counts["sparse_rows_attended"] == 3 * N_HEAD * 5 * (10 + 3)
    assert counts["rows_attended"] == dense + counts["sparse_rows_attended"]
    assert counts["sparse_rows_scored"] == 0


def test_ledger_of_topk(session_of):
    counts = counts_after(session_of("topk", budget="10%"), 100, 5)
    attended = sum(round(0.1 * n) + N_SINKS for n in range(101, 106))
    assert counts["sparse_rows_scored"] == counts["sparse_rows_total"] > 0
    assert counts["sparse_rows_attended"] == 2 * N_HEAD * attended


@pytest.mark.parametrize("preset", ["tuned", "paper"])
def test_ledger_of_lfps(preset, session_of):
    session = session_of("lfps", {"preset": preset}, budget="10%")
    counts = counts_after(session, 300, 10)
    n_sparse = {"tuned": 3, "paper": 4}[preset]
    limit = sum(max(round(0.1 * n), 7) + N_SINKS for n in range(301, 311))
    assert 0 < counts["sparse_rows_attended"] <= n_sparse * N_HEAD * limit
    assert 0 < counts["sparse_rows_scored"] < 0.9 * counts["sparse_rows_total"]
    assert counts["sparse_rows_scored"] >= counts["sparse_rows_attended"]
    assert counts["heads_stepped"] == n_sparse * N_HEAD * 10
    assert counts["index_bytes"] > 0 and counts["bounds_read"] > 0


@pytest.mark.parametrize("name", EVICTING_METHODS)
def test_evicting_methods_hold_less_however_long_the_answer(name, session_of):
    """Less than the prompt's rows, in memory and in what a step reads."""
    full, session = session_of("full"), session_of(name, budget="10", dense_layers="none")
    for each in (full, session):
        each.prefill(tokens(1900))
        decode(each, tokens(100, 1))
    whole, counts = full.ledger.as_dict(), session.ledger.as_dict()
    assert counts["bytes_host"] < 0.2 * whole["bytes_host"]
    assert counts["bytes_read"] < 0.1 * whole["bytes_read"]
    n_held = {cache.store.n for cache in session.caches}
    assert n_held == {46 + 100 if name == "snapkv" else 13}
    assert counts["rows_dropped"] == N_LAYER * N_KV * (2000 - n_held.pop())


@pytest.mark.parametrize(
    "name", ["topk", "streaming", "quest", "fasa", *EVICTING_METHODS, *TRANSFORMING_METHODS]
)
def test_bytes_read_shrink_with_the_budget(name, session_of):
    full = counts_after(session_of("full"), 300, 5)["bytes_read"]
    small = counts_after(session_of(name, budget="5%", dense_layers="none"), 300, 5)["bytes_read"]
    assert 0 < small < 0.75 * full


# --- StreamingLLM's positions within the cache ----------------------------------------------------


def rotate(x: np.ndarray, positions: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """x (..., n, d) half-split, rotated to ``positions`` (n,)."""
    half = len(theta)
    cos, sin = np.cos(np.outer(positions, theta)), np.sin(np.outer(positions, theta))
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], axis=-1)


def test_repositioned_streaming_numbers_rows_within_the_cache():
    """Two turns: decode, prefill (the sinks are turned back), decode."""
    d, n_kv, n_head, budget, sinks = 64, 2, 4, 20, 3
    theta = 1e4 ** (-np.arange(d // 2) / (d // 2))
    spec = LayerSpec(
        layer=0, n_layer=1, n_head=n_head, n_head_kv=n_kv, head_dim=d, value_dim=d, n_threads=1,
        theta=theta,
    )  # fmt: skip
    options = {"reposition": "true", "sinks": str(sinks), "dense_layers": "none"}
    cache = build_method("streaming", options, budget=str(budget)).layer(spec)
    rng = np.random.default_rng(0)
    nope = {"q": rng.standard_normal((n_head, 200, d)), "k": rng.standard_normal((n_kv, 200, d))}
    v = rng.standard_normal((n_kv, 200, d)).astype(np.float16).astype(np.float32)
    q, k = (rotate(nope[name], np.arange(200), theta).astype(np.float32) for name in "qk")

    def part(start: int, stop: int) -> AttnInput:
        chunk = [x[:, start:stop].copy() for x in (q, k, v, nope["q"], nope["k"])]
        return AttnInput(*chunk, start)

    def prefill(start: int, stop: int) -> np.ndarray:
        out = attend_chunk(cache, part(start, stop))
        cache.finish_prefill()
        return out

    prefill(0, 60)
    for t in [*range(60, 100), *range(150, 180)]:
        if t == 150:
            out = prefill(100, 150)
            expected = attend_dense_ref(q[:, 149], k[:, :150], v[:, :150], d**-0.5)
            np.testing.assert_allclose(out[:, -1], expected, atol=3e-3)  # f16 keys
        kept = [*range(sinks), *range(t + 1 - budget, t + 1)]
        positions = np.arange(len(kept))
        inner_q = rotate(nope["q"][:, [t]], positions[-1:], theta)[:, 0]
        inner_k = rotate(nope["k"][:, kept], positions, theta)
        expected = attend_dense_ref(inner_q, inner_k, v[:, kept], d**-0.5)
        np.testing.assert_allclose(cache.decode(part(t, t + 1)), expected, atol=3e-3)
