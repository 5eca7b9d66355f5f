"""Conversations that go on past their context, with every method."""

from __future__ import annotations

import contextlib
import gc
import io
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from soaking.usage import Curve

from sparsekv_cli.commands.chat.conversation import ChatSettings, Conversation
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

N_CTX, BUDGET = 384, "64"
WORDS = ["the", "house", "in", "a", "valley", "and", "mill", "at", "river", "were", "sold"]


def check(talk: Conversation, name: str) -> None:
    """Raises SparseKVError unless the caches and the counters agree."""
    sequence = talk.sequence
    n, ledger = len(sequence.tokens), sequence.ledger()
    lengths = {cache.n for cache in sequence.caches}
    if lengths != {n} or n > sequence.n_ctx:
        raise SparseKVError(f"{name}: {n} tokens, and caches of {sorted(lengths)}")
    total, attended = ledger["rows_total"], ledger["rows_attended"]
    if not (attended == total if name == "full" else 0 <= attended <= total):
        raise SparseKVError(f"{name}: {attended} of {total} rows attended")


def turn(talk: Conversation, rng: random.Random, n_answer: int) -> int:
    """One command of a user. Returns the tokens of the answer, of n_answer at most."""
    talk.settings.n_predict = rng.randint(1, n_answer)
    has_answer = bool(talk.messages) and talk.messages[-1]["role"] == "assistant"
    chosen = rng.random() if has_answer else 0.0
    if chosen < 0.8:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
        return len(talk.send(text).tokens)
    if chosen < 0.9:
        return len(talk.regenerate().tokens)
    if chosen < 0.97:
        talk.undo()
    else:
        talk.clear()
    return 0


def soak(path: Path, seconds: float, seed: int, n_answer: int) -> dict[str, Any]:
    """Talks to a model with every method in turn. Raises SparseKVError for what does not hold."""
    rng, talks = random.Random(seed), dict[str, Conversation]()
    counts, tokens, shifts = Counter[str](), Counter[str](), 0
    full = build_method("full", {})
    model = load_model(path, full, SessionConfig(threads=1, ctx_size=N_CTX))
    for name in METHODS:
        method = full if name == "full" else build_method(name, {}, budget=BUDGET)
        settings = ChatSettings(
            SamplingOptions({"temp": 1.0}, ignore_eos=True), seed, context_shift=True
        )
        using = model.using(model.attention_of(method, 0, None))
        talks[name] = Conversation(using, settings, "You are terse.")
    begun = time.monotonic()
    curve = Curve()
    while time.monotonic() - begun < seconds or min(tokens[name] for name in talks) <= N_CTX:
        for name, talk in talks.items():
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                tokens[name] += turn(talk, rng, n_answer)
            shifts += said.getvalue().count("context shift")
            counts[name] += 1
            check(talk, name)
        gc.collect()
        curve.look()
    model.gguf.close()
    past = {name: tokens[name] - N_CTX for name in talks}
    return {
        "model": path.stem, "turns": counts.total(), "context_shifts": shifts,
        "tokens_past_the_context": past, **curve.check("chat"),
    }  # fmt: skip
