"""What scripts/references/logits recorded of llama.cpp, and how to compare logits with it.

tests/data/logits/tiny.npz         last rows of the tiny models' logits, one entry a case
tests/data/logits/architectures.npz    some logits of every architecture after long prompts
tests/data/logits/smollm2_*.npz    the default model on 512 tokens of prose: the most likely tokens
                                   of every position, from llama.cpp and from reference_decoder
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reference_decoder import log_softmax
from tiny_architectures import TRAITS, Experts
from tiny_gemma4 import Gemma4Layers
from tiny_models import WEIGHT_TYPES

DATA = Path(__file__).parents[1] / "data"
TINY_FILE = DATA / "logits" / "tiny.npz"
ARCHITECTURES_FILE = DATA / "logits" / "architectures.npz"
SMOLLM2_LLAMA_FILE = DATA / "logits" / "smollm2_llama.npz"
SMOLLM2_REFERENCE_FILE = DATA / "logits" / "smollm2_reference.npz"
PROSE_FILE = DATA / "text" / "tide_mill.txt"

_IDS = """
    1 262 280 17 310 99 266 4 401 267 35 511 263 81 198 350 35 172 280 280 444 60 299 310
"""
REFERENCE_IDS = tuple(int(token) for token in _IDS.split())
REFERENCE_ROWS = 8  # logits kept: those of the last positions

# Prompts in which long contexts show, and positions of which a few logits are kept.
LONG_PROMPT = 420
LONG_POSITIONS = (99, 418, 419)
LONG_TOKENS = 64  # of the vocabulary, evenly spread

# Arguments of tiny_models.make_model. Weight types are compared on one small layer with mild
# attention: llama.cpp rounds activations to 8 bits, and a larger model only amplifies that.
ARCHITECTURE_CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_untied": {"tied": False},
    "llama_mha": {"n_head_kv": 4},
    "llama_gqa4": {"n_head_kv": 1},
    "llama_head32": {"head_dim": 32},
    "llama_head80": {"head_dim": 80},
    "llama_biases": {"biases": True},
    "llama_rope_freqs": {"rope_freqs": True, "freq_base": 500000.0},
    "llama_linear": {"rope_scaling": ("linear", 4.0)},
    "llama_yarn": {"rope_scaling": ("yarn", 4.0, 32)},
    "qwen2": {"arch": "qwen2"},
    "qwen2_untied": {"arch": "qwen2", "tied": False, "freq_base": 1000000.0},
    "qwen2_yarn": {"arch": "qwen2", "rope_scaling": ("yarn", 4.0, 512)},
    "qwen3": {"arch": "qwen3", "head_dim": 128},
    "qwen3_mha": {"arch": "qwen3", "head_dim": 64, "n_head_kv": 4, "tied": False},
    "qwen3_linear": {"arch": "qwen3", "head_dim": 32, "rope_scaling": ("linear", 2.0)},
}
WEIGHT_CASES: dict[str, dict[str, Any]] = {
    f"llama_{wtype}": {
        "wtype": wtype,
        "seed": 4,
        "n_layer": 1,
        "n_ff": 256,
        "attention_gain": 1.0,
        "tied": False,
    }
    for wtype in WEIGHT_TYPES
}
REFERENCE_CASES = {**ARCHITECTURE_CASES, **WEIGHT_CASES}

# Every architecture beyond these, on LONG_PROMPT tokens; attention is mild, since the rounding of
# keys and values to f16 adds up in long contexts. llama.cpp's own rounding of activations decides
# what quantised weights can be held to, so they are compared by their probabilities.
_MILD = {"n_embd": 128, "n_head": 2, "n_head_kv": 1, "n_ff": 128, "attention_gain": 1.0}
# smollm3's fourth is not rotated, gemma3's sixth has no window, two of gemma4's read others' rows.
_LAYERS = {"smollm3": 4, "gemma3": 6, "gemma4": 6}
LONG_CASES: dict[str, dict[str, Any]] = {
    name: {"arch": name, "n_layer": _LAYERS.get(name, 2), **_MILD}
    for name in TRAITS
    if name not in ("llama", "qwen2", "qwen3")
}
LONG_CASES |= {
    "mixtral": {"arch": "llama", "experts": Experts(own_length=False), "n_layer": 2, **_MILD},
    "qwen2moe": {**LONG_CASES["qwen2moe"], "tied": False},
    "gpt-oss": {**LONG_CASES["gpt-oss"], "tied": False},
    "granite_without_rope": {
        **LONG_CASES["granite"],
        "metadata": {"granite.rope.scaling.finetuned": False},
    },
    "granite_with_experts": {
        **LONG_CASES["granite"], "experts": Experts(own_length=False),
    },
    "gemma4_with_experts": {
        **LONG_CASES["gemma4"], "n_layer": 2, "seed": 3, "experts": Experts(beside=True),
        "layers": Gemma4Layers(n_shared=0, n_input=0),
    },
}  # fmt: skip
QUANTISED_CASES = {
    f"{name}_Q8_0": {**LONG_CASES[name], "wtype": "Q8_0", "n_layer": 1}
    for name in ("qwen2moe", "qwen3moe", "granitemoe", "phi3", "mistral3", "gemma2", "gpt-oss")
}
QUANTISED_CASES |= {  # the second layer has attention
    f"{name}_Q8_0": {**LONG_CASES[name], "wtype": "Q8_0"} for name in ("lfm2moe", "qwen35moe")
}
QUANTISED_CASES |= {
    f"{name}_Q8_0": {**LONG_CASES[name], "wtype": "Q8_0"}
    for name in ("gemma4", "gemma4_with_experts")
}
QUANTISED_CASES["gpt-oss_MXFP4"] = {**QUANTISED_CASES["gpt-oss_Q8_0"], "wtype": "MXFP4"}


def long_prompt() -> tuple[int, ...]:
    """LONG_PROMPT tokens of the tiny vocabulary, BOS first."""
    rng = np.random.RandomState(5)
    return (1, *(int(token) for token in rng.randint(3, 512, LONG_PROMPT - 1)))


def kept_tokens(logits: np.ndarray) -> np.ndarray:
    """What is recorded of rows of logits (T, V): (T, LONG_TOKENS)."""
    return logits[:, :: logits.shape[1] // LONG_TOKENS]


N_TOP = 256  # tokens kept a position
N_EXACT = 32  # of them with f32 log-probabilities; the others in f16


class TinyReference(NamedTuple):
    """llama.cpp's logits (REFERENCE_ROWS, V) f32 of a case, and the fingerprint of its model."""

    logits: np.ndarray
    fingerprint: str


class CompactLogits(NamedTuple):
    """The likeliest tokens of T positions; every other token is one lump.

    ids: (T, N_TOP) token ids. logp: (T, N_TOP) f32. rest: (T,) f32 mass of all other tokens.
    top1: (T,) the most likely token.
    """

    ids: np.ndarray
    logp: np.ndarray
    rest: np.ndarray
    top1: np.ndarray


def tiny_reference(case: str, file: Path = TINY_FILE) -> TinyReference:
    """The record of one of REFERENCE_CASES, or with ARCHITECTURES_FILE of the others."""
    with np.load(file) as record:
        return TinyReference(record[case], str(record[f"{case}.fingerprint"]))


def smollm2_tokens() -> np.ndarray:
    """The 512 token ids of the default model's records, i32."""
    with np.load(SMOLLM2_LLAMA_FILE) as record:
        return record["tokens"]


def smollm2_record(source: str) -> CompactLogits:
    """The default model's record: source "llama" (llama.cpp) or "reference" (float32)."""
    files = {"llama": SMOLLM2_LLAMA_FILE, "reference": SMOLLM2_REFERENCE_FILE}
    with np.load(SMOLLM2_LLAMA_FILE) as shared, np.load(files[source]) as record:
        logp = np.concatenate([record["logp_exact"], record["logp_tail"]], axis=-1)
        ids = shared["ids"].astype(np.int64)
        return CompactLogits(ids, logp, record["rest"], record["top1"].astype(np.int64))


def compact(logits: np.ndarray, ids: np.ndarray | None = None) -> CompactLogits:
    """Reduce logits (T, V) to the tokens `ids` (T, N_TOP), or to each row's most likely ones."""
    logp = log_softmax(logits.astype(np.float64))
    if ids is None:
        ids = np.argsort(-logp, axis=-1, kind="stable")[:, :N_TOP]
    kept = np.take_along_axis(logp, ids, axis=-1)
    rest = np.maximum(1.0 - np.exp(kept).sum(axis=-1), 1e-12)
    return CompactLogits(
        ids, kept.astype(np.float32), rest.astype(np.float32), logits.argmax(axis=-1)
    )


def stored(record: CompactLogits) -> Mapping[str, np.ndarray]:
    """The arrays of a record as they go into an npz; ids are kept once, by the caller."""
    return {
        "logp_exact": record.logp[:, :N_EXACT],
        "logp_tail": record.logp[:, N_EXACT:].astype(np.float16),
        "rest": record.rest,
        "top1": record.top1.astype(np.uint16),
    }


def compact_kl(expected: CompactLogits, logits: np.ndarray) -> np.ndarray:
    """KL(expected || softmax(logits)) of each position, (T,) f64 nats; logits (T, V).

    All tokens outside the record count as one: never more than the divergence over all tokens.
    """
    actual = compact(logits, expected.ids)
    logp = expected.logp.astype(np.float64)
    rest = expected.rest.astype(np.float64)
    inside = np.sum(np.exp(logp) * (logp - actual.logp), axis=-1)
    return inside + rest * np.log(rest / actual.rest)


def top1_agreement(expected: CompactLogits, logits: np.ndarray) -> float:
    """Fraction of positions whose most likely token is the record's."""
    return float(np.mean(logits.argmax(axis=-1) == expected.top1))
