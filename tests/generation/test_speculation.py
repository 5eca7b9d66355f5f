"""An answer with drafts is the answer without: text, tokens, probabilities, caches, counts.

The drafts of these tests know the answer, and have mistakes at some places.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_states import differing, state_of
from tiny_models import make_model

from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.models.tokenizer.marks import CONTROLS_SHOWN
from sparsekv_cli.sampling.grammar import read_grammar
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

N_CTX = 420
PROMPT = [3 + i * i % 400 for i in range(150)]


class Knowing:
    """Drafts of a known text. A draft at the end of n tokens has a mistake after n % 7 tokens."""

    alone = False
    sequence = None

    def __init__(self, truth: list[int]) -> None:
        self.truth = truth
        self.told: list[tuple[int, int]] = []  # tokens of each draft, and those accepted
        self.n_begun = 0

    def begin(self, tokens: list[int]) -> None:
        self.n_begun += 1

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        assert n_drafted == self.last_drafted and seconds > 0
        self.told.append((n_drafted, n_accepted))

    def draft(self, tokens: list[int], last: int, most: int) -> list[int]:
        n = len(tokens) + 1
        assert self.truth[:n] == [*tokens, last]
        draft = self.truth[n : n + min(most, 12)]
        if len(draft) > n % 7:
            draft[n % 7] = (draft[n % 7] + 1) % 500
        self.last_drafted = len(draft)
        return draft


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculation")
    return make_model(folder / "tiny.gguf", n_layer=2, wtype="Q8_0", attention_gain=4.0)


def opened(path: Path, name: str = "full", n_ctx: int = N_CTX, **options: str) -> Model:
    config = SessionConfig(ctx_size=n_ctx, threads=1, prefill_dtype="f32")
    return load_model(path, build_method(name, options), config)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    loaded = opened(path)
    yield loaded
    loaded.gguf.close()


def begun(
    model: Model, drafts: Knowing | None, seed: int, sampling: dict[str, Any], **given: Any
) -> Any:
    """A generation after PROMPT, and the pieces of its text."""
    grammar = given.pop("grammar", None)
    options = SamplingOptions(
        sampling,
        ignore_eos=given.pop("ignore_eos", False),
        grammar=None if grammar is None else read_grammar(*grammar),
    )
    constraint = new_constraint(model.tokenizer, options, None)
    sequence = model.sequence()
    sequence.drafts = drafts
    sequence.prefill(given.pop("prompt", PROMPT))
    pieces: list[str] = []
    generation = Generation(
        model.tokenizer, sequence, new_sampler(model, options, seed, constraint),
        constraint=constraint, write=pieces.append, **given,
    )  # fmt: skip
    return generation, pieces


def answered(
    model: Model, drafts: Knowing | None, *arguments: Any, **given: Any
) -> tuple[Any, Sequence]:
    """All that an answer tells, and its sequence."""
    generation, pieces = begun(model, drafts, *arguments, **given)
    while not generation.choose():
        step(model.engine, [generation])
    answer = generation.finish()
    told = vars(answer), "".join(pieces), generation.is_cut
    return (told, answer.logprobs), generation.sequence


def assert_alike(one: Sequence, other: Sequence) -> None:
    assert one.tokens == other.tokens
    assert one.timings.decode_tokens == other.timings.decode_tokens
    for a, b in zip(one.caches, other.caches, strict=True):
        assert differing(state_of(a), state_of(b)) == []


def compare(model: Model, *arguments: Any, **given: Any) -> Sequence:
    """The same answer without drafts and with drafts; the sequence with them."""
    first, plain = answered(model, None, *arguments, **given)
    answer = first[0][0]["tokens"]
    prompt = given.get("prompt", PROMPT)
    drafts = Knowing([*prompt, *answer, *[5] * 100])
    again, drafted = answered(model, drafts, *arguments, **given)
    assert again == first
    assert_alike(drafted, plain)
    told = drafted.timings.speculation
    assert told.drafted == sum(n for n, _ in drafts.told) and drafts.n_begun == 1
    assert told.accepted == sum(n for _, n in drafts.told) <= told.drafted
    assert plain.timings.speculation.as_dict()["steps"] == 0
    return drafted


GREEDY, WARM = {"temp": 0.0}, {"temp": 1.3}
LETTERS = ("regex", "[a-z ]{40}")


@pytest.mark.parametrize(
    ("sampling", "given"),
    [
        (GREEDY, {}),
        (WARM, {}),
        ({**WARM, "top_k": 5, "xtc_probability": 0.5, "xtc_threshold": 0.1}, {}),
        ({**WARM, "repeat_penalty": 1.3, "presence_penalty": 0.4, "dry_multiplier": 0.8}, {}),
        (WARM, {"logprobs": 3}),
        (GREEDY, {"grammar": LETTERS}),
        (WARM, {"grammar": LETTERS, "logprobs": 2}),
        (WARM, {"marks": CONTROLS_SHOWN}),
    ],
)
def test_an_answer_with_drafts_is_the_same(sampling, given, model):
    given = {"ignore_eos": "grammar" not in given, "n_predict": 120, **given}
    drafted = compare(model, 7, sampling, **given)
    told = drafted.timings.speculation
    assert told.accepted > 10 and told.drafted - told.accepted > 5
    assert told.steps + told.accepted <= drafted.timings.decode_tokens
    assert told.as_dict()["mean_length"] == 1 + told.accepted / told.steps


@pytest.mark.parametrize("n_predict", [0, 1, 2, 3, 17])
def test_a_draft_ends_with_the_answer(n_predict, model):
    drafted = compare(model, 7, WARM, n_predict=n_predict, ignore_eos=True)
    assert len(drafted.tokens) == len(PROMPT) + max(0, n_predict - 1)


@pytest.mark.parametrize("room", [1, 2, 3, 9, 30])
def test_a_draft_ends_with_the_context(room, path):
    model = opened(path, n_ctx=len(PROMPT) + room)
    drafted = compare(model, 7, WARM, ignore_eos=True)
    assert drafted.is_full
    model.gguf.close()


def test_a_stop_string_and_an_end_within_a_draft(model):
    (told, _), _ = answered(model, None, 3, WARM, n_predict=60, ignore_eos=True)
    text = told[1]
    for start in range(10, 40, 3):
        drafted = compare(
            model, 3, WARM, n_predict=60, ignore_eos=True,
            stops=(text[start : start + 3],),
        )  # fmt: skip
        assert len(drafted.tokens) < len(PROMPT) + 59
    ended = 0
    for seed in range(12):  # a likely end token ends some answers early
        ends = {int(token): 2.0 for token in model.tokenizer.eog_ids}
        drafted = compare(model, seed, {**WARM, "logit_bias": ends}, n_predict=60)
        ended += 5 < len(drafted.tokens) - len(PROMPT) < 59
    assert ended > 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lfps", {"budget": "12"}),
        ("lfps", {"budget": "200", "scout": "128"}),
        ("h2o", {"budget": "12"}),
        ("freekv", {"budget": "32", "window": "8", "sinks": "4"}),
        ("quest", {"budget": "32"}),
    ],
)
def test_methods(name, options, path):
    model = opened(path, name, **options)
    drafted = compare(model, 7, WARM, n_predict=120, ignore_eos=True)
    assert drafted.timings.speculation.accepted > 20
    model.gguf.close()


def test_sequences_that_draft_and_one_that_does_not(model):
    """One of them is left in the middle."""
    seeds, expected = (1, 2, 3), []
    for seed in seeds:
        expected.append(answered(model, None, seed, WARM, n_predict=50, ignore_eos=True))
    truths = [[*PROMPT, *told[0][0]["tokens"], *[5] * 100] for (told, _) in expected]
    drafts = [Knowing(truths[0]), None, Knowing(truths[2])]
    running = [
        begun(model, each, seed, WARM, n_predict=50, ignore_eos=True)[0]
        for each, seed in zip(drafts, seeds, strict=True)
    ]
    generations, n_steps = list(running), 0
    while generations:
        generations = [each for each in generations if not each.choose()]
        if n_steps == 3:
            generations.remove(running[2])
        if generations:
            step(model.engine, generations)
        n_steps += 1
    for each, (told, plain) in list(zip(running, expected, strict=True))[:2]:
        assert each.finish().tokens == told[0][0]["tokens"]
        assert_alike(each.sequence, plain)
    left = running[2]
    n = len(left.sequence.tokens)
    assert left.sequence.timings.speculation.accepted > 0
    assert left.sequence.tokens == expected[2][1].tokens[:n]
    left.sequence.rewind(len(PROMPT))
    told, plain = expected[2]
    again = Generation(
        model.tokenizer, left.sequence,
        new_sampler(model, SamplingOptions(WARM, ignore_eos=True), 3), n_predict=50,
    )  # fmt: skip
    again.drafts = None
    while not again.choose():
        step(model.engine, [again])
    assert again.finish().tokens == told[0][0]["tokens"]


@pytest.mark.parametrize("name", ["full", "lfps", "h2o", "sals"])
def test_a_step_that_is_interrupted(name, path, monkeypatch):
    """The sequence is then at the tokens that it had, or goes back to its prompt."""
    model = opened(path, name, **({} if name == "full" else {"budget": "12"}))
    _, plain = answered(model, None, 7, WARM, n_predict=40, ignore_eos=True)
    truth = [*plain.tokens, *[5] * 100]
    generation, _ = begun(model, Knowing(truth), 7, WARM, n_predict=40, ignore_eos=True)
    for _ in range(2):
        assert not generation.choose()
        step(model.engine, [generation])
    assert not generation.choose()
    sequence, before = generation.sequence, list(generation.sequence.tokens)
    last, n_added = sequence.caches[-1], list[int]()

    def interrupt(rows: Any) -> Any:
        n_added.extend(cache.n - len(before) for cache in sequence.caches)
        decode_rows(rows[:2])  # some of the rows; the layer before has all of them
        raise KeyboardInterrupt

    decode_rows = last.decode_rows
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "decode_rows", interrupt)
        step(model.engine, [generation])
    assert n_added[0] > 2 and n_added[1] == 0
    n = len(sequence.tokens)
    assert sequence.tokens == before[:n] and n in (len(before), len(PROMPT), 0)
    assert {cache.n for cache in sequence.caches} == {n}
    assert not any(cache._saved for cache in sequence.caches)
    model.gguf.close()
