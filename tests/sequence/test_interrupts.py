"""Ctrl-C at each line of the program: a change of a sequence comes whole, or not at all.

Each test runs a call once, to see its lines, and then stops it at every one of them. After a stop
the sequence goes on as a sequence would that has its tokens, and for which no call was stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from interrupted import files_of, places_of, stopped_at
from reference_records import LONG_CASES
from tiny_sequences import CHUNK, decoded, tokens

from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.model import Model
from sparsekv_cli.sequence import Sequence

PROMPT, ANSWER = tokens(5 * CHUNK), tokens(4, 1)
QUESTION, LAST = tokens(2 * CHUNK, 2), tokens(2, 3)
FILES = files_of(
    "engine.py", "sequence.py", "cache", "methods", "prefix", "models/forward.py",
    "models/decoder.py", "cpu/lfps", "cpu/freekv", "cpu/sals", "cpu/faedkv", "cpu/fasa",
)  # fmt: skip
SHARE = 101  # without --all one place of so many is tried
# Windows, states, rows that layers share, rows that are key and value at once.
ARCHITECTURES = ("gemma3", "qwen35", "lfm2", "granitehybrid", "falcon-h1", "gemma4", "deepseek2")


class Call(NamedTuple):
    """A change of a sequence that has a prompt and an answer."""

    run: Callable[[Sequence, Model], Any]
    adds: Ids[int] = ()  # the tokens that it adds if it comes to its end
    is_prefill: bool = False  # whether it adds them by a prefill


def _draft(sequence: Sequence, _: Model) -> None:
    """Three rows in a step, of which the last is taken back."""
    n = len(sequence.tokens)
    sequence.engine.decode([sequence], [ANSWER[: min(3, sequence.most_rows(3))]])
    sequence.keep(min(n + 2, len(sequence.tokens)))


def _change(sequence: Sequence, model: Model) -> None:
    sequence.change_method(model.attention_of(build_method("quest", {}, budget="12")))


CALLS = {
    "prefill": Call(lambda sequence, _: sequence.prefill(QUESTION), QUESTION, True),
    "decode": Call(lambda sequence, _: sequence.decode(7), [7]),
    "draft": Call(_draft, ANSWER[:3]),
    "rewind": Call(lambda sequence, _: sequence.rewind(len(PROMPT) - 3)),
    "keep_common": Call(lambda sequence, _: sequence.keep_common([*PROMPT[: 4 * CHUNK], 9, 9])),
    "change_method": Call(_change),
}


def going_on(sequence: Sequence) -> np.ndarray:
    """Logits after a question and of some steps."""
    return np.stack([sequence.prefill(QUESTION[::-1]), *decoded(sequence, LAST)])


def check(model: Model, call: Call, part: tuple[int, int]) -> tuple[int, int]:
    """Stops a call at every line of a part of its lines. Returns the places, and texts that stayed.

    part: the first place, and how many follow each other to the next one.
    """

    def begun() -> Sequence:
        sequence = model.sequence()
        sequence.prefill(PROMPT)
        decoded(sequence, ANSWER)
        return sequence

    whole = [*PROMPT, *ANSWER, *call.adds]

    @cache
    def expected(name: str, n: int) -> np.ndarray:
        sequence = begun()
        if name != sequence.method.name:
            _change(sequence, model)
        sequence.rewind(n)
        if missing := whole[len(sequence.tokens) : n]:
            sequence.prefill(missing) if call.is_prefill else decoded(sequence, missing)
        return going_on(sequence)

    n_stayed = n_places = 0
    failed: list[str] = []
    places = places_of(lambda: call.run(sequence, model), FILES) if (sequence := begun()) else []
    for place in places[part[0] :: part[1]]:
        sequence = begun()
        n_places += stopped_at(place, lambda: call.run(sequence, model), FILES)  # noqa: B023
        try:
            sequence.rewind(len(sequence.tokens))
            n = len(sequence.tokens)
            assert sequence.tokens == whole[:n]
            assert {each.n for each in sequence.caches} == {n}
            error = np.abs(going_on(sequence) - expected(sequence.method.name, n)).max()
            assert error < 5e-3
        except Exception as error:
            failed.append(f"{place}: {error!r:.300}")
        n_stayed += n > 0
    assert not failed, "\n".join(failed)
    return n_places, n_stayed


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, call, sequence_of, pytestconfig):
    at = 7 * list(METHODS).index(name) + 11 * list(CALLS).index(call)
    part = (0, 1) if pytestconfig.getoption("--all") else (at % 40, SHARE)
    n_places, _ = check(sequence_of(name, budget="12").model, CALLS[call], part)
    assert n_places


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_windows_states_and_shared_rows(case, call, sequence_of, pytestconfig, monkeypatch):
    shape = {**LONG_CASES[case], "n_ctx": 420}
    part = (0, 1) if pytestconfig.getoption("--all") else (list(CALLS).index(call), SHARE)
    n_places, _ = check(sequence_of("full", shape=shape).model, CALLS[call], part)
    assert n_places
