"""FASA against its literal twin, its limiting cases, its two variants, and its calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest
from chunks import attend_chunk
from fasa_twin import FASATwin, HeadChoice
from tiny_models import make_model

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.calibration import fasa
from sparsekv_cli.calibration.fasa import SHARES, even_budgets, tips_of
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.cpu.attention.decode import attend_rows_ref
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.fasa import FASA, FASACache
from sparsekv_cli.methods.full import Full
from sparsekv_cli.session import Session, load_session

N_STEPS = 300
TIE = 1e-5  # f32 scores against f64: nearer than this is a tie


pytestmark = pytest.mark.usefixtures("one_thread")


# --- one layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometry:
    n_head: int
    n_head_kv: int
    d: int
    n_rot: int

    def __str__(self) -> str:
        return f"H{self.n_head}-G{self.n_head_kv}-d{self.d}-rot{self.n_rot}"


GEOMETRIES = [
    Geometry(4, 4, 64, 64),
    Geometry(9, 3, 64, 64),
    Geometry(8, 2, 80, 80),
    Geometry(8, 1, 128, 128),
    Geometry(6, 2, 80, 20),
]


class Layer:
    """A layer's cache, its twin, and random rows for both: drifting queries, a few heavy chunks."""

    def __init__(self, geometry: Geometry, seed: int = 0, n_threads: int = 1, **options) -> None:
        g, rng = geometry, np.random.default_rng(seed)
        self.geometry, self.rng = g, rng
        n_chunk = g.n_rot // 2
        rank = np.stack([rng.permutation(n_chunk) for _ in range(g.n_head_kv)]).astype(np.uint8)
        self.spec = LayerSpec(
            layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
            n_threads=n_threads, theta=np.ones(n_chunk),
            calibration={"dom_var": rank, "dom_ca": rank, "tip_budget": even_budgets()},
        )  # fmt: skip
        self.method = FASA(**options)
        cache = self.method.layer(self.spec)
        assert isinstance(cache, FASACache)
        self.cache = cache
        n_tip = self.method.n_tip or g.d // (8 if self.method.metric == "var" else 4)
        forced = self.method.force == "default"
        self.twin = FASATwin(rank, n_tip, self.method.budget.rows, forced, g.n_head)
        self.walk = rng.standard_normal((g.n_head, g.d))
        self.weight = np.ones((g.n_head_kv, 1, g.d))
        for kv in range(g.n_head_kv):
            self.weight[kv, 0, rank[kv, :3]] = 3

    def rows(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q (H, n, d), k (G, n, d), v (G, n, d) of n tokens, K and V representable in f16."""
        g = self.geometry
        queries = []
        for _ in range(n):
            self.walk = 0.9 * self.walk + 0.4 * self.rng.standard_normal(self.walk.shape)
            queries.append(self.walk.copy())
        k = self.rng.standard_normal((g.n_head_kv, n, g.d)) * self.weight
        v = self.rng.standard_normal((g.n_head_kv, n, g.d))
        return np.stack(queries, axis=1).astype(np.float32), half(k), half(v)

    def prefill(self, n: int) -> tuple[np.ndarray, ...]:
        """n tokens into the cache alone, in chunks."""
        q, k, v = self.rows(n)
        prefill(self.cache, q, k, v)
        return q, k, v

    def step(self) -> np.ndarray:
        """One token into the cache alone: a copy of its output (H, d)."""
        q, k, v = (x[:, 0] for x in self.rows(1))
        out = self.cache.decode(row_input(q, k, v, self.cache.n))
        return out[:, : self.geometry.d].copy()

    def decode(self, n_steps: int) -> int:
        """n_steps tokens in both, everything compared; how many choices were ties."""
        ties = 0
        for _ in range(n_steps):
            q, k, v = (x[:, 0] for x in self.rows(1))
            n = self.cache.n + 1
            choices = self.twin.choose(q, k, v)
            out = self.cache.decode(row_input(q, k, v, n - 1))
            if self.method.budget.rows(n) >= n:
                assert self.cache.attended is None
            else:
                assert self.cache.attended is not None
                for h, choice in enumerate(choices):
                    rows, counts = self.cache.attended
                    ties += reconcile(choice, rows[h, : counts[h]])
            expected = self.twin.attend(choices)
            np.testing.assert_allclose(out[:, : expected.shape[1]], expected, atol=1e-4)
        return ties


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def prefill(cache, q, k, v, chunk: int = 64) -> np.ndarray:
    """The dense output of the chunks, (H, n, d)."""
    pos, outs = cache.n, []
    for start in range(0, q.shape[1], chunk):
        parts = [x[:, start : start + chunk].copy() for x in (q, k, v)]
        outs.append(attend_chunk(cache, AttnInput(*parts, parts[0], parts[1], pos + start)))
    cache.finish_prefill()
    return np.concatenate(outs, axis=1)


def row_input(q, k, v, pos: int) -> AttnInput:
    def widen(x):
        wide = np.zeros((len(x), 1, padded(x.shape[1])), np.float32)
        wide[:, 0, : x.shape[1]] = x
        return wide

    q, k, v = widen(q), widen(k), widen(v)
    return AttnInput(q, k, v, q, k, pos)


def reconcile(choice: HeadChoice, actual: np.ndarray) -> bool:
    """Takes over a choice that differs only by a tie; AssertionError if it is none."""
    expected, got = set(choice.rows.tolist()), set(actual.tolist())
    assert len(got) == len(actual) == len(expected) and got >= choice.forced
    if got == expected:
        return False
    differing = choice.importance[sorted(expected ^ got)]
    assert (np.abs(differing - choice.cut) < TIE * (1 + abs(choice.cut))).all()
    choice.rows = np.array(sorted(got))
    return True


VARIANTS = {
    "tuned": {},
    "paper": {"metric": "ca", "force": "none"},
    "share": {"budget": Budget(share=0.2), "n_tip": 3},
    "m": {"variant": "m"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_fasa_equals_its_twin(geometry, variant):
    """Dense at first, sparse from 60 rows on, another prompt, and a rewind to a dense context."""
    options = {"budget": Budget(tokens=60), **VARIANTS[variant]}
    if geometry.n_rot < geometry.d:
        options["n_tip"] = 4
    layer = Layer(geometry, **options)
    _, k, v = layer.prefill(40)
    layer.twin.start(k, v)
    capacity = layer.cache.store.capacity
    assert layer.decode(N_STEPS) <= 2
    assert layer.cache.store.capacity > capacity and layer.cache.store.dom is not None
    assert layer.cache.n == 40 + N_STEPS

    for n in (70, 1):
        _, k, v = layer.prefill(n)
        layer.twin.start(*(np.concatenate(x, 1) for x in ((layer.twin.k, k), (layer.twin.v, v))))
        layer.decode(20)

    for n in (150, 25):
        assert layer.cache.truncate(n) == n
        layer.twin.start(layer.twin.k[:, :n], layer.twin.v[:, :n])
        layer.decode(60)


def test_all_threads():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        n_threads = numba.config.NUMBA_NUM_THREADS
        layer = Layer(GEOMETRIES[1], budget=Budget(tokens=300), n_threads=n_threads)
        _, k, v = layer.prefill(900)
        layer.twin.start(k, v)
        layer.decode(30)
    finally:
        numba.set_num_threads(1)


@pytest.mark.parametrize("force", ["default", "none"])
@pytest.mark.parametrize("n_fac", [1, 2, 3, 5, 19, 20, 21])
def test_small_budgets(n_fac, force):
    layer = Layer(GEOMETRIES[1], budget=Budget(tokens=n_fac), force=force)
    _, k, v = layer.prefill(1)
    layer.twin.start(k, v)
    layer.decode(70)
    assert layer.cache.attended is not None
    assert (layer.cache.attended[1] == n_fac).all()


# --- limiting cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=str)
def test_all_chunks_are_exact_top_k(geometry):
    g = geometry
    layer = Layer(g, n_tip=g.d // 2, budget=Budget(tokens=50), force="none")
    _, keys, values = layer.prefill(200)
    for _ in range(20):
        q, k, v = (x[:, 0] for x in layer.rows(1))
        keys, values = (np.concatenate([a, b[:, None]], 1) for a, b in ((keys, k), (values, v)))
        out = layer.cache.decode(row_input(q, k, v, layer.cache.n))
        group = g.n_head // g.n_head_kv
        exact = [np.argsort(-(keys[h // group] @ q[h]))[:50] for h in range(g.n_head)]
        expected = attend_rows_ref(q, keys, values, exact, g.d**-0.5)
        np.testing.assert_allclose(out[:, : g.d], expected, atol=1e-5)
        rows, _ = layer.cache.attended
        np.testing.assert_array_equal(rows, np.sort(exact, axis=1))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("n_fac", [200, 130])
def test_a_budget_of_the_context_is_full_to_the_bit(geometry, n_fac):
    """Also where K has been split before: a later prompt and a rewind find it as it was."""
    n_tip = {"n_tip": 4} if geometry.n_rot < geometry.d else {}
    layer = Layer(geometry, budget=Budget(tokens=n_fac), **n_tip)
    full = DenseCache(layer.spec)

    def both_prefill(n: int) -> None:
        q, k, v = layer.rows(n)
        expected, actual = (prefill(cache, q, k, v) for cache in (full, layer.cache))
        np.testing.assert_array_equal(actual, expected)

    def both_decode(n: int) -> int:
        same = 0
        for _ in range(n):
            q, k, v = (x[:, 0] for x in layer.rows(1))
            x = row_input(q, k, v, full.n)
            same += np.array_equal(full.decode(x), layer.cache.decode(x))
        return same

    both_prefill(100)
    assert both_decode(100) == n_fac - 100  # from n_fac rows on sparse
    assert (layer.cache.store.dom is not None) == (n_fac == 130)
    both_prefill(70)
    assert layer.cache.store.dom is not None
    assert both_decode(10) == 0
    for cache in (full, layer.cache):
        assert cache.truncate(90) == 90
    assert both_decode(n_fac - 90) == n_fac - 90
    np.testing.assert_array_equal(layer.cache.store.k[:, : full.n], full.store.k[:, : full.n])
    both_prefill(5)


@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=str)
def test_the_variants_give_equal_outputs(geometry):
    layers = [Layer(geometry, variant=variant, budget=Budget(tokens=30)) for variant in "cm"]
    moved = 0
    for layer in layers:
        layer.prefill(100)
    for _ in range(20):
        np.testing.assert_array_equal(*(layer.step() for layer in layers))
        rows = layers[1].cache.attended[0].reshape(geometry.n_head_kv, -1)
        moved += sum(len(set(each.tolist())) for each in rows)
    c, m = (layer.cache for layer in layers)
    counts_c, counts_m = c.counters(), dict(m.counters())
    n_dom = geometry.d // 4
    rest = padded(geometry.d - n_dom) + padded(geometry.d)
    assert counts_m.pop("bytes_moved") == 2 * rest * moved > 0
    assert counts_m == dict(counts_c)
    whole, split = c.memory(), m.memory()
    assert whole.device == whole.index == split.index == 0
    assert split.host + split.device == whole.host == c.store.nbytes
    assert split.device == c.store.dom.nbytes
    assert split.host == 2 * rest * geometry.n_head_kv * c.store.capacity


def test_what_a_step_reads():
    """Kdom of all rows, and again of the blocks with the best and the forced ones; Krest and V of
    the attended ones; K is not stored twice."""
    layer = Layer(Geometry(9, 3, 64, 64), budget=Budget(tokens=25))
    layer.cache.reserve(256)
    layer.prefill(200)
    assert layer.cache.memory().host == 3 * 256 * (16 + 48 + 64) * 2
    assert not layer.cache.counters()
    layer.step()
    counts = layer.cache.counters()
    assert counts["rows_total"] == counts["rows_scored"] == 9 * 201
    assert counts["rows_attended"] == counts["sparse_rows_attended"] == 9 * 25
    blocks = 9 + 1 + 2  # of the 25 - 4 - 12 best rows, of rows 0 to 15, of rows 176 to 200
    read = 3 * 201 * 16 + 9 * blocks * 16 * 16 + 9 * 25 * (48 + 64)
    assert counts["bytes_read"] == 2 * read


def test_whole_keys():
    """For measurements: before K is split, and while it is."""
    layer = Layer(GEOMETRIES[2], budget=Budget(tokens=150))
    _, k, _ = layer.prefill(140)
    for is_split in (False, True):
        assert (layer.cache.store.dom is not None) == is_split
        whole = layer.cache.store.whole_keys(200, 96)
        np.testing.assert_array_equal(whole[:, :140, :80], k)
        assert not whole[:, layer.cache.n :].any() and not whole[..., 80:].any()
        for _ in range(20):
            layer.step()


# --- options --------------------------------------------------------------------------------------


def test_presets():
    tuned, paper = build_method("fasa", {}), build_method("fasa", {"preset": "paper"})
    assert (tuned.metric, tuned.force, tuned.dense_layers) == ("var", "default", (0, 1))
    assert (paper.metric, paper.force, paper.dense_layers) == ("ca", "none", ())
    assert tuned.budget == paper.budget == Budget(tokens=256)
    assert build_method("fasa", {}, budget="5%").budget == Budget(share=0.05)


@pytest.mark.parametrize(
    ("option", "value"),
    [("metric", "cos"), ("force", "all"), ("variant", "x"), ("n_tip", "-1")],
)
def test_a_bad_value_names_the_option(option, value):
    with pytest.raises(ValueError, match=f"{option} = '?{value}'?: must be"):
        build_method("fasa", {option: value})


def test_the_default_n_tip_is_all_chunks_where_few_dims_are_rotated():
    layer = Layer(Geometry(6, 2, 80, 20), metric="ca", budget=Budget(tokens=30))  # d/4 = 20 of 10
    layer.prefill(100)
    layer.step()
    assert layer.cache.store.dom.shape[2] == 20


def test_more_chunks_than_a_head_has_are_refused():
    with pytest.raises(SparseKVError, match="n_tip = 33: this model's heads have 32 chunks"):
        Layer(GEOMETRIES[0], n_tip=33)


@pytest.mark.parametrize("rank", [np.zeros((4, 32), np.uint8), np.tile(np.arange(16), (4, 1))])
def test_a_calibration_that_ranks_other_chunks_is_refused(rank):
    spec = replace(Layer(GEOMETRIES[0]).spec, calibration={"dom_var": rank})
    with pytest.raises(SparseKVError, match="layer 2 ranks other chunks"):
        FASA().layer(spec)


# --- whole models ---------------------------------------------------------------------------------

N_LAYER, N_HEAD, N_KV = 4, 6, 2


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


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.RandomState(seed).randint(3, 512, n).tolist()


def open_session(model, method) -> Session:
    return load_session(model, method, SessionConfig(threads=1, prefill_dtype="f32", chunk=16))


def open_specs(model) -> list[LayerSpec]:
    session = open_session(model, Full())
    specs = session.decoder.layer_specs()
    session.gguf.close()
    return specs


def calibrate(session: Session, method: FASA, ids) -> dict[str, np.ndarray]:
    shares: list[float] = []
    run = CalibrationRun(
        session.decoder.layer_specs(), ids, session.decoder.forward,
        shares.append,
    )  # fmt: skip
    tensors = method.calibrate(run)
    assert shares == sorted(shares) and len(shares) > N_LAYER and shares[-1] == pytest.approx(1)
    return tensors


@pytest.fixture(scope="module")
def tensors(model):
    session = open_session(model, Full())
    yield calibrate(session, FASA(), tokens(300))
    session.gguf.close()


@pytest.fixture
def session_of(model, tensors):
    """Opens sessions with FASA (options as fields) or, without options, with full attention."""

    class Calibrated(FASA):
        """FASA that brings its calibration along."""

        needs = ""

        def layer(self, spec):
            own = {name: array[spec.layer] for name, array in tensors.items()}
            return super().layer(replace(spec, calibration=own))

    opened: list[Session] = []

    def open_with(**options) -> Session:
        opened.append(open_session(model, Calibrated(**options) if options else Full()))
        return opened[-1]

    yield open_with
    for session in opened:
        session.gguf.close()


def decode(session: Session, ids) -> np.ndarray:
    return np.stack([session.decode(token) for token in ids])


@pytest.mark.parametrize("budget", [Budget(share=1.0), Budget(tokens=100_000), Budget(tokens=100)])
def test_a_budget_of_the_context_changes_no_bit(budget, session_of):
    full, sparse = session_of(), session_of(budget=budget, dense_layers=())
    for seed, (n_prompt, n_steps) in enumerate(((70, 10), (10, 10))):
        prompt, text = tokens(n_prompt, seed), tokens(n_steps, seed + 10)
        np.testing.assert_array_equal(full.prefill(prompt), sparse.prefill(prompt))
        np.testing.assert_array_equal(decode(full, text), decode(sparse, text))
    counts = sparse.ledger.as_dict()
    assert counts["sparse_rows_attended"] == counts["sparse_rows_total"] > 0


def test_a_smaller_budget_changes_the_answer(session_of):
    full, sparse = session_of(), session_of(budget=Budget(tokens=10), dense_layers=())
    for session in (full, sparse):
        session.prefill(tokens(80))
    text = tokens(20, 1)
    assert np.abs(decode(full, text) - decode(sparse, text)).max() > 1e-3


@pytest.mark.parametrize("options", [{"metric": "var"}, {"metric": "ca", "variant": "m"}])
def test_a_rewound_session_equals_a_fresh_one(options, session_of):
    """To the end of the prompt, into it, to a context within the budget, and to nothing."""
    prompt, question, answer = tokens(64), tokens(7, 1), tokens(10, 2)
    used = session_of(budget=Budget(tokens=24), **options)
    for keep in (64, 32, 16, 0):
        fresh = session_of(budget=Budget(tokens=24), **options)
        if keep:
            fresh.prefill(prompt[:keep])
        used.rewind(0)
        used.prefill(prompt)
        decode(used, tokens(12, 3))
        used.rewind(keep)
        np.testing.assert_array_equal(used.prefill(question), fresh.prefill(question))
        np.testing.assert_array_equal(decode(used, answer), decode(fresh, answer))


@pytest.mark.parametrize("calls", range(1, 9))
def test_an_interrupted_prefill_adds_nothing(calls, session_of):
    """2 chunks, 4 layers: some layers' K is whole then, some is split."""

    def interrupt(done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    prompt, question, answer = tokens(48), tokens(7, 1), tokens(10, 2)
    session, other = session_of(budget=Budget(tokens=12)), session_of(budget=Budget(tokens=12))
    for each in (session, other):
        each.prefill(prompt)
        decode(each, answer)
    left, before = calls, list(session.tokens)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(tokens(32, 5), interrupt)
    assert session.tokens == before
    np.testing.assert_array_equal(decode(session, answer), decode(other, answer))
    np.testing.assert_array_equal(session.prefill(question), other.prefill(question))
    np.testing.assert_array_equal(decode(session, answer), decode(other, answer))


def test_generation_as_long_as_the_prompt(session_of):
    session = session_of(budget=Budget(share=0.1))
    produced = list(session.generate(tokens(150), lambda logits, _: int(np.argmax(logits)), 150))
    assert len(produced) == 150
    counts = session.ledger.as_dict()
    attended = sum(round(0.1 * n) for n in range(151, 300))
    assert counts["sparse_rows_attended"] == 2 * N_HEAD * attended
    assert counts["sparse_rows_scored"] == counts["sparse_rows_total"]


# --- calibration ----------------------------------------------------------------------------------


class RecordingCache(DenseCache):
    """Keeps the queries and keys that it is shown."""

    def extend(self, x):
        self.seen = [*getattr(self, "seen", []), (x.q.copy(), half(x.k))]
        return super().extend(x)


def test_calibration_is_what_it_says(model, tensors):
    ids = tokens(300)
    session = open_session(model, Full())
    specs = session.decoder.layer_specs()
    caches = [RecordingCache(spec) for spec in specs]
    session.decoder.forward(ids, 0, caches)
    session.gguf.close()
    assert {name: (a.shape, a.dtype) for name, a in tensors.items()} == {
        "score_var": ((N_LAYER, N_HEAD, 32), np.float32),
        "score_ca": ((N_LAYER, N_HEAD, 32), np.float32),
        "dom_var": ((N_LAYER, N_KV, 32), np.uint8),
        "dom_ca": ((N_LAYER, N_KV, 32), np.uint8),
        "tip_kld": ((N_LAYER, len(SHARES)), np.float32),
        "tip_budget": ((N_LAYER, len(SHARES), 2), np.float32),
    }
    positions = [int(75 + (i + 0.5) * 225 / 16) for i in range(16)]
    for layer, cache in enumerate(caches):
        q, k = (
            np.concatenate(parts, 1, dtype=np.float64) for parts in zip(*cache.seen, strict=True)
        )
        var, ca = np.zeros((N_HEAD, 32)), np.zeros((N_HEAD, 32))
        for h in range(N_HEAD):
            for t in positions:
                keys = k[h // 3, : t + 1]
                top = set(np.argsort(-(keys @ q[h, t]))[:64].tolist())
                for i in range(32):
                    scores = keys[:, i] * q[h, t, i] + keys[:, i + 32] * q[h, t, i + 32]
                    var[h, i] += scores.var() / 16
                    own = set(np.argsort(-scores)[:64].tolist())
                    ca[h, i] += len(top & own) / 64 / 16
        np.testing.assert_allclose(tensors["score_var"][layer], var, rtol=1e-4)
        np.testing.assert_allclose(tensors["score_ca"][layer], ca, atol=1e-3)
        for name in ("var", "ca"):
            score = tensors[f"score_{name}"][layer]
            group = (score / score.sum(1, keepdims=True)).reshape(N_KV, 3, 32).sum(1)
            ranked = np.take_along_axis(group, tensors[f"dom_{name}"][layer].astype(int), axis=1)
            assert (np.diff(ranked) <= 1e-6).all()
            assert (np.sort(tensors[f"dom_{name}"][layer]) == np.arange(32)).all()


def test_chunks_go_where_they_save_most(model, tensors):
    """Layers 0 and 1 are dense by default: they have the mean, and no part in the others' sum."""
    kld, budgets = tensors["tip_kld"], tensors["tip_budget"]
    assert not kld[:2].any() and (kld[2:] > 0).all()
    np.testing.assert_array_equal(kld[:, -1], kld[:, -2])
    np.testing.assert_array_equal(budgets[:2], [even_budgets()] * 2)
    for n_tip in (3, 4, 6, 8, 13, 16, 32):
        tips = [tips_of(n_tip, 32, budget) for budget in budgets]
        assert tips[:2] == [n_tip] * 2 and abs(sum(tips[2:]) - 2 * n_tip) <= 1
    calibration = {name: array[2] for name, array in tensors.items()}
    spec = replace(open_specs(model)[2], calibration=calibration)
    for n_tip in (0, 6, 13):
        own, same = (
            FASA(n_tip=n_tip, allocation=allocation).dominant_dims(spec)
            for allocation in ("layers", "uniform")
        )
        assert own[1] == 2 * tips_of(n_tip or 8, 32, calibration["tip_budget"])
        assert same[1] == 2 * (n_tip or 8)


def test_a_layer_has_the_chunks_that_its_calibration_says():
    """A row of budgets that gives this layer half of the chunks where all have a quarter."""
    budgets = np.ones((len(SHARES), 2), np.float32)
    budgets[:4], budgets[4] = 0.1, (0.2, 0.9)
    layer = Layer(GEOMETRIES[1], budget=Budget(tokens=40))
    spec = replace(layer.spec, calibration={**layer.spec.calibration, "tip_budget": budgets})
    assert FASA().dominant_dims(spec)[1] == 32
    assert FASA(allocation="uniform").dominant_dims(spec)[1] == 16
    assert build_method("fasa", {"preset": "paper"}).allocation == "uniform"
    cache = FASA(budget=Budget(tokens=40)).layer(spec)
    prefill(cache, *layer.rows(90))
    assert cache.store.split().shape[2] == 32 and layer.cache.store.dims.shape == (3, 64)


@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[4]], ids=str)
def test_rows_of_a_trial_attend_as_a_step_does(geometry, monkeypatch):
    """What a share of the chunks is judged by is the method's own attention."""
    n_chosen = 40
    monkeypatch.setattr(fasa, "N_CHOSEN", n_chosen)
    layer = Layer(geometry, budget=Budget(tokens=n_chosen), n_tip=4, metric="var")
    dims, n_dom = layer.method.dominant_dims(layer.spec)
    _, k, v = layer.prefill(90)
    new = layer.rows(7)
    outs = [
        layer.cache.decode(row_input(*(x[:, i] for x in new), 90 + i))[:, : geometry.d].copy()
        for i in range(7)
    ]
    store = DenseCache(layer.spec).store
    for rows in ((k, v), new[1:]):
        store.append(*rows)
    out = fasa._attend_best(dims[:, :n_dom], 4, 16)(new[0], store, layer.spec)
    assert out.shape == (geometry.n_head, 7, geometry.d)
    np.testing.assert_allclose(out, np.stack(outs, axis=1), atol=1e-3)


def test_options_do_not_change_the_calibration(model, tensors):
    session = open_session(model, Full())
    other = calibrate(
        session, FASA(metric="ca", n_tip=3, budget=Budget(tokens=7), variant="m"), tokens(300)
    )
    session.gguf.close()
    for name, array in tensors.items():
        np.testing.assert_array_equal(other[name], array)
