"""scripts/accuracy/measure on a tiny model: what it measures, and the verdicts."""

import json
import sys

import numpy as np
import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.compare import build_spec, parse_methods
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

LENGTH, STEPS = 150, 6
CONFIG = SessionConfig(threads=1, prefill_dtype="f32", chunk=64)


accuracy = load_script("accuracy/measure")
lines = sys.modules["accuracy_lines"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return make_model(
        tmp_path_factory.mktemp("tiny") / "model.gguf", n_layer=3, chat_template=template
    )


@pytest.fixture(scope="module")
def model(path):
    return load_model(path, build_method("full", {}), CONFIG)


def random_ids(n):
    return np.random.RandomState(0).randint(3, 512, n).tolist()


def test_measured_figures_of_dense_exact_and_recent_rows(model):
    names = ["full", "topk:budget=100%", "topk:budget=20%;recent=1", "streaming:budget=20%"]
    methods = {name: build_spec(name) for name in names}
    results = {name: accuracy.Result() for name in names}
    accuracy.measure_text(model, methods, random_ids(LENGTH + STEPS), LENGTH, STEPS, results)
    full, everything, best, recent = (results[name].summary() for name in names)
    assert full["kld"] == 0 and full["top1"] == 1 and full["mass"] is None
    assert everything["kld"] == 0 and everything["mass"] == 1 and everything["overlap"] is None
    assert everything["attended"] == 100
    assert best["dots"] == 100 and best["attended"] == pytest.approx(22.6, abs=0.5)
    assert 0.95 < best["overlap"] <= 1  # one recent row is forced
    assert recent["dots"] == 0 and 0 < recent["overlap"] < 0.5
    assert recent["mass"] < best["mass"] < 1 and best["kld"] > 0


def test_texts_are_measured_apart_and_together(model):
    """Two texts: figures of each, and of both that are their mean."""
    methods = {name: build_spec(name) for name in ("full", "streaming:budget=20%")}
    both = {name: accuracy.Result() for name in methods}
    apart = []
    for seed in (0, 1):
        ids = np.random.RandomState(seed).randint(3, 512, LENGTH + STEPS).tolist()
        results = {name: accuracy.Result() for name in methods}
        accuracy.measure_text(model, methods, ids, LENGTH, STEPS, results)
        apart.append(results["streaming:budget=20%"].summary())
        for name, result in results.items():
            both[name].add_text(result)
    pooled = both["streaming:budget=20%"].summary()
    assert pooled["texts"] == apart and apart[0]["kld"] != apart[1]["kld"]
    for name in ("kld", "top1", "mass", "overlap", "attended"):
        assert pooled[name] == pytest.approx((apart[0][name] + apart[1][name]) / 2)


def row(**figures):
    names = ("kld", "top1", "needles", "found", "overlap", "mass", "dots", "attended")
    return {**dict.fromkeys(names), "found": [], "texts": [], **figures}


def test_acceptance_lines():
    methods = parse_methods("topk,streaming,lfps,lfps:preset=paper")
    good = row(kld=0.1, top1=0.9, mass=0.9, dots=9.0, found=[True] * 4)
    known = lines.expected(methods["lfps"], 1650)
    assert known["at_most"]["kld"] == 0.13
    assert lines.broken_lines(good, known) == []
    assert len(lines.broken_lines({**good, "kld": 0.14, "mass": 0.82}, known)) == 2
    assert lines.expected(methods["lfps"], 2400) == {}
    figures = {
        ("full", 1700): row(kld=0, found=[True, True, True, False]),
        ("topk", 1700): row(kld=0.2),
        ("streaming", 1700): row(kld=0.3),
        ("lfps", 1700): {**good, "found": [True, False, False, True]},
        ("lfps:preset=paper", 1700): row(kld=0.4),
    }
    verdicts = [line[:4] for line in lines.lines_across(methods, figures)]
    assert verdicts == ["FAIL", "pass", "pass", "FAIL"]  # topk is worse; two needles are missed
    shares = {1: "FAIL", 10: "pass", 9: "FAIL"}  # of 11 that full finds, at least 10/11
    for n, verdict in shares.items():
        figures["full", 1700] = row(kld=0, found=[True] * 11)
        figures["lfps", 1700] = {**good, "found": [True] * n + [False] * (11 - n)}
        needles = lines.lines_across(methods, figures)[-1]
        assert needles.startswith(f"{verdict}: lfps finds {n} of 11 needles that full finds")
    table = lines.markdown(methods, [1700], figures)
    assert "| lfps | 1700 | 0.100 | 0.90 |" in table


def test_the_figures_are_of_methods_that_exist():
    known = lines.EXPECTED
    assert set(known["default"]) <= set(known["methods"])
    methods = {spec: build_spec(spec) for spec in known["methods"]}
    assert len({*map(repr, methods.values())}) == len(methods), "one method, two names"
    for spec, kinds in known["methods"].items():
        for kind, columns in kinds.items():
            assert kind in ("at_most", "at_least"), spec
            for column, values in columns.items():
                assert column in lines.COLUMNS and len(values) == len(known["lengths"]), spec
    across = [*known["needles_share"], *(s for a, b in known["kld_below"] for s in (a, b))]
    across += [s for a, b, _ in known["kld_within"] for s in (a, b)]
    assert set(across) <= set(methods)
    assert accuracy.named_methods("lfps,topk") == "lfps,topk"
    for word, chosen in (("default", known["default"]), ("all", known["methods"])):
        parsed = parse_methods(accuracy.named_methods(word))
        assert list(parsed.values()) == [methods[spec] for spec in chosen]


def test_lines_within_a_factor_and_at_some_lengths(monkeypatch):
    known = {
        "lengths": [1700, 3300, 6500],
        "methods": {
            "topk": {"at_most": {"kld": [0.1, None, 0.3]}, "at_least": {"top1": [None] * 3}}
        },
        "needles_share": {},
        "kld_below": [],
        "kld_within": [["topk", "streaming", 1.1]],
    }
    monkeypatch.setattr(lines, "EXPECTED", known)
    methods = parse_methods("topk,streaming")
    found = [lines.expected(methods["topk"], n) for n in known["lengths"]]
    assert [f["at_most"].get("kld") for f in found] == [0.1, None, 0.3]
    assert not any(f["at_least"] for f in found)
    figures = {(n, t): row() for n in methods for t in (1700, 3300)}
    for length, kld in ((1700, 0.109), (3300, 0.111)):
        figures["topk", length]["kld"], figures["streaming", length]["kld"] = kld, 0.1
    verdicts = lines.lines_across(methods, figures)
    assert [line[:4] for line in verdicts] == ["pass", "FAIL"] and "1.1 x streaming" in verdicts[0]


def test_texts_and_needles_are_long_enough_and_distinct():
    texts = accuracy.read_texts()
    assert len(texts) == 4 and all(len(text.split()) > 4000 for text in texts)
    assert {needle.text for needle in accuracy.NEEDLES} == {0, 1, 2, 3}
    assert len({needle.value for needle in accuracy.NEEDLES}) == len(accuracy.NEEDLES)
    for needle in accuracy.NEEDLES:
        assert needle.value in needle.fact
        assert not any(needle.value in text for text in texts)
    first = accuracy.NEEDLES[0]
    prompt = accuracy.needle_prompt(first, texts[0], 1200, lambda t: len(t.split()))
    assert prompt.endswith(f"{first.question} Answer in one sentence.")
    assert 1000 < len(prompt.split()) <= 1200 and prompt.count(first.fact) == 1
    with pytest.raises(SparseKVError, match="too short"):
        accuracy.needle_prompt(first, "one\n\ntwo", 1200, len)


def test_command_line(path, tmp_path, capsys, monkeypatch):
    text = "\n\n".join(f"the sand and the thing {i} in an inn" for i in range(90))
    monkeypatch.setattr(accuracy, "read_texts", lambda: [text])
    common = ["-m", str(path), "--threads", "1", "--texts", "1"]
    common += ["--steps", "3", "--needles", "1", "--methods", "streaming"]
    code = accuracy.main([*common, "--lengths", "400", "--json", str(tmp_path / "out.json")])
    assert code == 0 and "| streaming | 400 |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [r["method"] for r in rows] == ["full", "streaming"] and rows[1]["kld"] > 0
    assert accuracy.main([*common, "--lengths", "9000"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: length 9000")
    with pytest.raises(SystemExit) as stopped:
        accuracy.main([*common[:-1], "dense", "--lengths", "400"])
    assert stopped.value.code == 2
