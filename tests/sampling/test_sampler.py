"""The sampler chain against what llama.cpp did (data/samplers.json), and its own promises."""

import json
import math
import time
from collections import Counter
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import byte_characters, tiny_vocabulary

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.sampling import chain
from sparsekv_cli.sampling.chain import FUNCTIONS, Candidates, make_sampler
from sparsekv_cli.sampling.dry import (
    common_beginnings,
    dry_penalties,
    find_breakers,
    pieces_of,
    repeated_lengths,
)
from sparsekv_cli.sampling.params import (
    SAMPLER_ORDER,
    SAMPLERS,
    SamplingParams,
    params_from_metadata,
)
from sparsekv_cli.settings.option import options_of

RECORD = json.loads((Path(__file__).parents[1] / "data" / "samplers.json").read_text())
LOGITS = {name: np.array(row, np.float32) for name, row in RECORD["logits"].items()}
NO_TRUNCATION: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def full(logits: np.ndarray) -> Candidates:
    """All tokens as candidates."""
    return Candidates(np.arange(len(logits)), logits, len(logits), is_full=True)


TOKENS, TYPES, _ = tiny_vocabulary(512)
BYTES = {character: value for value, character in enumerate(byte_characters())}


def piece(token: int) -> bytes:
    """Text of a token of the tiny models' vocabulary of 512."""
    if TYPES[token] != 1:
        return TOKENS[token].encode()
    return bytes(BYTES[character] for character in TOKENS[token])


VOCABULARY = pieces_of(512, piece)


def label(case: dict) -> str:
    return "-".join(str(case[key]) for key in ("sampler", "value", "logits") if key in case)


@pytest.mark.parametrize("case", RECORD["truncations"], ids=label)
def test_truncation_keeps_llama_cpps_tokens(case):
    functions = {
        "top_k": lambda candidates, k: chain.top_k(candidates, int(k)),
        "top_p": chain.top_p,
        "min_p": chain.min_p,
        "typical": chain.typical,
        "top_n_sigma": chain.top_n_sigma,
        "xtc": lambda candidates, threshold: chain.xtc(candidates, 1.0, threshold, 0.5),
        "temperature": chain.temperature,
    }
    logits = LOGITS[case["logits"]]
    kept = functions[case["sampler"]](full(logits), case["value"])
    order = np.argsort(kept.ids)
    assert kept.ids[order].tolist() == case["ids"]
    expected = case.get("kept_logits", logits[case["ids"]])
    np.testing.assert_allclose(kept.logits[order], expected, rtol=1e-6)
    assert not kept.is_sorted or np.all(np.diff(kept.logits) <= 0)


@pytest.mark.parametrize("case", RECORD["dynatemp"], ids=lambda case: str(case["arguments"]))
def test_temperature_follows_the_entropy_as_in_llama_cpp(case):
    kept = chain.temperature(full(LOGITS[case["logits"]]), *case["arguments"])
    assert kept.ids.tolist() == case["ids"]
    np.testing.assert_allclose(kept.logits, case["kept_logits"], rtol=1e-5)


@pytest.mark.parametrize("case", RECORD["penalties"], ids=lambda case: str(case["arguments"]))
def test_penalties_change_llama_cpps_logits(case):
    last_n, *amounts = case["arguments"]
    logits = LOGITS[case["logits"]]
    expected = logits.copy()
    for token, value in case["changed"].items():
        expected[int(token)] = value
    recent = chain.last(case["history"], last_n)
    np.testing.assert_allclose(
        chain.penalties(full(logits), recent, *amounts).logits, expected, rtol=1e-6
    )
    some = chain.top_k(full(logits), 20)  # candidates that are neither all nor in order
    np.testing.assert_allclose(
        chain.penalties(some, recent, *amounts).logits, expected[some.ids], rtol=1e-6
    )


@pytest.mark.parametrize("case", RECORD["dry"], ids=lambda case: str(case["breakers"]))
def test_dry_subtracts_what_llama_cpp_does(case):
    breakers = find_breakers(case["breakers"], VOCABULARY, RECORD["tokens"].__getitem__)
    multiplier, base, allowed_length, last_n = case["arguments"]
    recent = chain.last(case["history"], last_n)
    tokens, amounts = dry_penalties(recent, multiplier, base, allowed_length, breakers)
    actual = dict(zip(tokens.tolist(), amounts.tolist(), strict=True))
    expected = {int(token): amount for token, amount in case["penalty"].items()}
    assert actual == pytest.approx(expected, rel=1e-6)


def test_chain_draws_from_llama_cpps_distribution():
    case = RECORD["chain"]
    sample = make_sampler(SamplingParams(seed=3, **case["params"]))
    n_draws = 4000
    counts = Counter(sample(LOGITS[case["logits"]], case["history"]) for _ in range(n_draws))
    expected = {int(token): mass for token, mass in case["probabilities"].items()}
    assert counts.keys() == expected.keys()
    chi_square = sum(
        (counts[token] - n_draws * mass) ** 2 / (n_draws * mass) for token, mass in expected.items()
    )
    assert chi_square < 50  # 18 degrees of freedom: 1e-4 of the seeds are above 50


def test_top_p_beyond_the_first_tokens_sorted():
    rng = np.random.RandomState(0)
    logits = np.round(rng.standard_normal(5000), 2).astype(np.float32)  # flat, with many ties
    kept = chain.top_p(full(logits), 0.9)
    order = np.argsort(-logits, kind="stable")
    mass = np.cumsum(np.exp(logits[order].astype(np.float64)))
    n_kept = int(np.searchsorted(mass / mass[-1], 0.9)) + 1
    assert n_kept > chain.FIRST_SORTED
    assert sorted(kept.ids.tolist()) == sorted(order[:n_kept].tolist())


@pytest.mark.parametrize("n_vocab", [1, 63, 300, 30000])
@pytest.mark.parametrize("k", [1, 40, 100])
def test_top_k_is_the_head_of_a_stable_sort(n_vocab, k):
    logits = np.random.RandomState(k).randint(-50, 50, n_vocab).astype(np.float32)
    assert chain.top_k(full(logits), k).ids.tolist() == (
        np.argsort(-logits, kind="stable")[:k].tolist()
    )


@pytest.mark.parametrize("extra", [{}, {"xtc_probability": 0.9}, {"typ_p": 0.9}])
def test_seed_decides_the_tokens(extra):
    logits = LOGITS["medium"]

    def tokens(seed: int) -> list[int]:
        sample = make_sampler(SamplingParams(seed=seed, **extra))
        return [sample(logits, []) for _ in range(40)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(-1) != tokens(-1)


def test_temperature_zero_takes_the_best_after_penalties_and_bias():
    logits = np.array([1.0, 3.0, 2.9, 2.0], np.float32)
    before = logits.copy()
    assert make_sampler(SamplingParams(temp=0))(logits, [1]) == 1
    assert make_sampler(SamplingParams(temp=0, repeat_penalty=1.2))(logits, [1]) == 2
    assert make_sampler(SamplingParams(temp=0, logit_bias={1: -math.inf}))(logits, []) == 2
    assert make_sampler(SamplingParams(temp=0, logit_bias={0: 5.0}))(logits, []) == 0
    np.testing.assert_array_equal(logits, before)


def test_temperature_zero_after_xtc_takes_the_best_that_is_left():
    logits = np.array([0.0, 3.0, 2.9, -2.0], np.float32)
    params = SamplingParams(temp=0, xtc_probability=1.0, xtc_threshold=0.3, seed=0)
    assert make_sampler(params)(logits, []) == 2


def test_repeat_last_n_looks_at_the_end_of_the_history():
    logits = np.array([0.0, 3.0, 2.9, 2.0], np.float32)
    history = [1] + [3] * 70
    for last_n, expected in ((64, 1), (-1, 2), (0, 1)):
        params = SamplingParams(temp=0, repeat_penalty=1.5, repeat_last_n=last_n)
        assert make_sampler(params)(logits, history) == expected


def test_the_order_of_the_chain_matters():
    logits = np.array([3.0, 2.9, 2.8], np.float32)
    bans: dict[str, Any] = {"temp": 0, "presence_penalty": 5.0, "top_k": 1}
    penalties_first = SamplingParams(**bans)
    top_k_first = SamplingParams(**bans, samplers=("top_k", "penalties", "temperature"))
    assert make_sampler(penalties_first)(logits, [0]) == 1
    assert make_sampler(top_k_first)(logits, [0]) == 0


def test_dry_in_the_chain_stops_a_loop():
    logits = np.zeros(512, np.float32)
    logits[10], logits[11] = 2.0, 1.9
    history = [10, 20, 30] * 4
    loop: dict[str, Any] = {"temp": 0, "dry_sequence_breakers": ()}
    assert make_sampler(SamplingParams(**loop))(logits, history) == 10
    assert make_sampler(SamplingParams(dry_multiplier=0.8, **loop))(logits, history) == 11


def test_dry_needs_a_vocabulary_for_its_breakers():
    with pytest.raises(ValueError, match="vocabulary"):
        make_sampler(SamplingParams(dry_multiplier=0.8))


def test_what_dry_may_be_asked_for_has_bounds():
    """Of breakers, and of a context that repeats one token: seconds a token without bounds."""
    for texts in (["a"] * 65, ["b" * 1025]):
        with pytest.raises(ValueError, match="at most 64 texts of 1024 bytes in all"):
            SamplingParams(dry_sequence_breakers=texts)
    rng = np.random.default_rng(0)
    words = [rng.bytes(6) for _ in range(50_000)]
    texts = [chr(97 + i % 26) * 8 + str(i) for i in range(64)]
    started = time.thread_time()
    many = find_breakers(texts, pieces_of(len(words), words.__getitem__), lambda text: [1, 2])
    recent = np.full(50_000, int(many[1, 2][0]))
    dry_penalties(recent, 1.0, 1.00001, 2, many)
    assert time.thread_time() - started < 12


def test_lengths_of_repetitions_are_the_same_by_either_algorithm():
    rng = np.random.default_rng(1)
    for period in (1, 2, 7):
        backwards = np.tile(rng.integers(0, 2, period), 400)[:400]
        backwards[rng.integers(0, 400, 3)] = 5
        expected = common_beginnings(backwards.tolist())
        for limit in (3, 400):
            lengths = repeated_lengths(backwards, limit)
            assert lengths.tolist() == np.minimum(expected, limit).tolist()


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_logits_without_a_number_are_refused(temp):
    sample = make_sampler(SamplingParams(temp=temp, seed=0))
    for bad in ([1.0, np.nan, 0.0], [-np.inf] * 3):
        with pytest.raises(SparseKVError, match="highest logit is"):
            sample(np.array(bad, np.float32), [])
    with pytest.raises(SparseKVError, match="token 9: the vocabulary has 3"):
        make_sampler(SamplingParams(logit_bias={9: 1.0}))(np.zeros(3, np.float32), [])


def test_banned_tokens_are_never_drawn():
    logits = np.full(6, -np.inf, np.float32)
    logits[[1, 4]] = 0.0
    sample = make_sampler(SamplingParams(seed=0, **NO_TRUNCATION, typ_p=0.99, top_n_sigma=3.0))
    assert {sample(logits, []) for _ in range(60)} == {1, 4}
    for chance in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        assert chain.draw(full(logits), chance) in (1, 4)


def test_defaults_are_llama_cpps():
    """common_params_sampling in llama.cpp's common/common.h."""
    llama_cpps = {
        "temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typ_p": 1.0, "top_n_sigma": -1.0,
        "xtc_probability": 0.0, "xtc_threshold": 0.1,
        "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
        "repeat_last_n": 64, "repeat_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ("\n", ":", '"', "*"), "logit_bias": {},
        "samplers": SAMPLER_ORDER, "seed": -1,
    }  # fmt: skip
    assert asdict(SamplingParams()) == llama_cpps


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temp", math.nan), ("temp", "hot"), ("top_p", 1.5), ("min_p", -0.1), ("top_k", 1.5),
        ("top_k", -2), ("repeat_penalty", 0.0), ("repeat_last_n", -2), ("dry_base", 0.5),
        ("dry_sequence_breakers", ("",)), ("dry_sequence_breakers", "abc"),
        ("logit_bias", {-1: 0.0}), ("logit_bias", {1: math.nan}),
        ("samplers", ("top_k", "mirostat")), ("samplers", ("top_k", "top-k")), ("seed", True),
        ("seed", 2**64),
    ],
)  # fmt: skip
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} = "):
        SamplingParams(**{field: value})


def test_the_file_overrides_defaults_and_the_user_overrides_the_file():
    metadata = {
        "general.sampling.temp": np.float32(0.6),
        "general.sampling.top_k": "20",
        "general.sampling.penalty_last_n": 32,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.sequence": "top_k;temp",
        "general.name": "some model",
    }
    params = params_from_metadata(metadata, {"top_k": 7, "min_p": None})
    assert (params.top_k, params.repeat_last_n, params.repeat_penalty) == (7, 32, 1.1)
    assert params.temp == pytest.approx(0.6)
    assert params.min_p == 0.05
    assert params.samplers == ("top_k", "temperature")
    assert params_from_metadata({}, {}) == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value"),
    [("temp", "warm"), ("top_k", 1.5), ("top_p", 7.0), ("sequence", "top_k;nonsense")],
)
def test_bad_metadata_is_an_error_of_the_file(key, value):
    with pytest.raises(SparseKVError, match=rf"^general\.sampling\.{key} "):
        params_from_metadata({f"general.sampling.{key}": value}, {})
    params_from_metadata(
        {f"general.sampling.{key}": value},
        {"temp": 0.0, "top_k": 1, "top_p": 1.0, "samplers": ("top_k",)},
    )


def test_mirostat_in_the_file_is_refused_unless_the_user_sets_a_temperature():
    metadata = {"general.sampling.mirostat": 2}
    with pytest.raises(SparseKVError, match="mirostat"):
        params_from_metadata(metadata, {})
    assert params_from_metadata(metadata, {"temp": 0.5}).temp == 0.5
    assert params_from_metadata({"general.sampling.mirostat": 0}, {}) == SamplingParams()


def test_unknown_parameters_of_the_user_are_named():
    with pytest.raises(ValueError, match="typical_p: no such"):
        params_from_metadata({}, {"typical_p": 0.9})


def test_the_table_names_functions_and_declared_fields():
    declared = options_of(SamplingParams)
    used = [field for sampler in SAMPLERS for field in sampler.fields or (sampler.name,)]
    assert sorted(used) == sorted(declared.keys() - {"seed"})
    for sampler in SAMPLERS:
        n_values = len(sampler.values(SamplingParams()))
        n_more = {"vocabulary": 1, "chance": 1}.get(sampler.takes, 0)
        assert len(signature(FUNCTIONS[sampler.name]).parameters) == 1 + n_values + n_more
    assert FUNCTIONS.keys() == set(SAMPLER_ORDER)


def test_every_sampler_can_be_switched_off():
    off = SamplingParams(
        repeat_penalty=1, dry_multiplier=0, top_n_sigma=-1, top_k=0, typ_p=1, top_p=1, min_p=0,
        xtc_probability=0, temp=1,
    )  # fmt: skip
    assert not any(sampler.is_on(off) for sampler in SAMPLERS)
    on = {
        "penalties": {"presence_penalty": 0.1}, "dry": {"dry_multiplier": 0.5},
        "top_n_sigma": {"top_n_sigma": 2.0}, "top_k": {"top_k": 3}, "typ_p": {"typ_p": 0.9},
        "top_p": {"top_p": 0.9}, "min_p": {"min_p": 0.1}, "xtc": {"xtc_probability": 0.5},
        "temperature": {"temp": 0.5},
    }  # fmt: skip
    for name, values in on.items():
        changed = replace(off, **values)
        assert [sampler.name for sampler in SAMPLERS if sampler.is_on(changed)] == [name]
