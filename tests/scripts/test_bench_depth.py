"""scripts/bench/depth on a tiny model: rows laid end to end are a prefill's, and are counted."""

import json

import numpy as np
import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.cpu.layer import tiles_int8
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig


@pytest.fixture(scope="module")
def script():
    return load_script("bench/depth")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny") / "model.gguf", wtype="Q4_0", n_ctx=512)


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_caches_hold_the_rows_of_a_prefill_again_and_again(script, path, dtype):
    if dtype == "int8" and not tiles_int8.is_available():
        pytest.skip("needs byte products (AVX2)")
    model = load_model(path, build_method("full", {}), SessionConfig(prefill_dtype=dtype))
    ids = model.tokenizer.encode(script.PROSE.read_text("utf-8"), parse_special=False)[:100]
    deep = script.sequence_at(model, model.method, script.record(model, ids), 250)
    assert len(deep.tokens) == 250
    sequence = model.sequence()
    sequence.prefill(ids)
    for laid, prefilled in zip(deep.caches, sequence.caches, strict=True):
        assert laid.n == 250
        for found, once in ((laid.store.k, prefilled.store.k), (laid.store.v, prefilled.store.v)):
            # The rotation is torch's, the prefill's maybe another: a last bit of an f16 may differ.
            np.testing.assert_allclose(found[:, :100], once[:, :100], rtol=2e-3, atol=1e-4)
        v = laid.store.v
        np.testing.assert_array_equal(v[:, 100:200], v[:, :100])
        np.testing.assert_array_equal(v[:, 200:250], v[:, :50])
        assert not np.allclose(laid.store.k[:, 100:200], laid.store.k[:, :100], atol=0.1)


def test_figures(script, path, tmp_path):
    told = tmp_path / "told.json"
    arguments = ["-m", str(path), "--methods", "full,lfps", "--depths", "150,300", "--tokens", "3"]
    arguments += ["--budget", "32", "--rows", "100", "--json", str(told)]
    arguments += ["--rounds", "2"]
    assert script.main(arguments) == 0
    rows = json.loads(told.read_text("utf-8"))
    found = {(row["method"], row["depth"]): row for row in rows}
    assert set(found) == {(name, depth) for name in ("full", "lfps") for depth in (150, 300)}
    assert all(row["token_ms"] > 0 and row["attention_ms"] > 0 for row in rows)
    full, lfps = found["full", 300], found["lfps", 300]
    assert full["of_full"] == full["mb_of_full"] == 1 and lfps["mb_of_full"] > 1
    assert all(row["least"] <= row["tokens_per_s"] <= row["most"] for row in rows)
    assert full["rows_attended"] >= 2 * 4 * 300 > lfps["rows_attended"] > 4 * 300


def test_pairs_with_full(script, path, tmp_path):
    told = tmp_path / "told.json"
    arguments = ["-m", str(path), "--methods", "lfps,full", "--depths", "300", "--tokens", "3"]
    arguments += ["--budget", "32", "--rows", "100", "--json", str(told), "--paired"]
    assert script.main(arguments) == 0
    lfps, full = json.loads(told.read_text("utf-8"))
    assert lfps["of_full"] > 0 and lfps["full_token_ms"] > 0 and lfps["rows_attended"] > 4 * 300
    assert full["of_full"] == 1 and "full_token_ms" not in full


def test_pairs_need_full(script, path, capsys):
    with pytest.raises(SystemExit):
        script.main(["-m", str(path), "--methods", "lfps", "--paired"])
    assert "--paired: needs full among --methods" in capsys.readouterr().err
