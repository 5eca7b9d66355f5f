"""How a model attends: the measures against plain sums, and ``inspect --attention``."""

import json

import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cli import main
from sparsekv_cli.planning import attention
from sparsekv_cli.planning.attention import N_PAST, N_QUERIES, PAGE, best_mass, rate_pages

N = 400


def layer(**more):
    return LayerSpec(0, 1, 2, 1, 8, 8, 1, **more)


def test_weights_are_causal_with_softcaps_and_sinks():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 9), np.float32)
    spec = layer(softcap=np.float32(2), sinks=np.array([0.5, 1.5], np.float32))
    weights = attention.softmax(scores.copy(), spec, 1)
    for i in range(3):
        seen = np.exp(2 * np.tanh(scores[i, : 7 + i] / 2))
        np.testing.assert_allclose(weights[i, : 7 + i], seen / (seen.sum() + np.exp(1.5)), 1e-5)
        assert not weights[i, 7 + i :].any()


def test_each_rule_finds_what_it_is_made_for():
    """Mass on four rows, on one distance, and on rows that no query before attended to."""
    queries = np.arange(N - N_QUERIES, N)
    columns, distance, fresh = np.zeros((3, N_QUERIES, N))
    columns[:, [50, 90, 130, 200]] = 0.25
    distance[np.arange(N_QUERIES), queries - 77] = 1
    fresh[np.arange(N_QUERIES), 5 * np.arange(N_QUERIES) + 8] = 1
    rates = [attention.rate_rules(weights) for weights in (columns, distance, fresh)]
    names = ("vertical", "slash", "past", "sinks", "recent")
    found = [[round(rate[name], 6) for name in names] for rate in rates]
    assert found == [[1, 0, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    sinks = np.zeros((N_QUERIES, N))
    sinks[:, :4], sinks[:, 300] = 0.2, 0.2
    sinks[np.arange(N_QUERIES), queries] += 1 - sinks.sum(-1)
    rate = attention.rate_rules(sinks)
    assert (rate["sinks"], rate["recent"]) == (pytest.approx(0.8), pytest.approx(0))
    np.testing.assert_allclose(best_mass(columns), [1, 1, 1, 1])
    even = np.full((N_QUERIES, N), 1 / N)
    np.testing.assert_allclose(best_mass(even), [0.01, 0.02, 0.05, 0.1])


def test_pages_are_chosen_by_bounds_of_their_keys():
    keys = np.zeros((N, 2), np.float32)
    keys[96:101] = 3, -3  # a page with large bounds
    q = np.tile(np.float32([1, -1]), (N_QUERIES, 1))
    weights = np.zeros((N_QUERIES, N))
    weights[:, 96 : 96 + PAGE] = 0.5 / PAGE
    weights[:, 0], weights[:, 200] = 0.3, 0.2
    assert rate_pages(weights, q, keys) == pytest.approx(0.8)  # not row 200's page


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model.gguf", arch="gemma3", n_layer=6, n_ff=256, n_ctx=4096)


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", *map(str, arguments)])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_attention_of_full_layers_as_json_and_picture(model, tmp_path, capsys):
    text, png = tmp_path / "text.txt", tmp_path / "picture.png"
    text.write_text("ab cd. " * 600)
    given = (model, "--attention", "-f", text, "--tokens", 1100)
    code, out, err = call(capsys, *given, "--json", "--png", png)
    assert code == 0, err
    found = json.loads(out)
    (only,) = found["layers"]
    assert (found["tokens"], found["queries"], only["layer"]) == (1100, 2 * N_QUERIES, 5)
    n_head, n_head_kv = 4, len(only["rank"])
    for name in ("mass_1%", "mass_10%", "sinks", "recent", "vertical", "slash", "past", "pages"):
        assert len(only[name]) == n_head
        assert all(0 <= share <= 1.0001 for share in only[name]), name
    assert all(a < b for a, b in zip(only["mass_1%"], only["mass_10%"], strict=True))
    assert all(
        past <= best + 1e-3 for past, best in zip(only["past"], only["mass_5%"], strict=True)
    )
    assert sum(only["spectrum"]) == pytest.approx(1, abs=0.01)
    assert 1 <= n_head_kv < n_head
    assert found["method"] in ("lfps", "quest", "streaming", "topk")
    assert "sparse attention" in found["sentence"]
    assert png.read_bytes().startswith(b"\x89PNG")
    code, out, err = call(capsys, *given[:-1], 1024)
    assert code == 0
    assert out.splitlines()[-1].split()[0] == "5"
    assert found["sentence"].split(":")[0] in err


def test_attention_of_too_little_text(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a short one")
    code, _, err = call(capsys, model, "--attention", "-f", text)
    assert code == 1
    assert "at least 1024" in err
    code, _, err = call(capsys, model, "--png", "x.png")
    assert code == 2
    assert "--attention" in err
    assert N_PAST < N_QUERIES
