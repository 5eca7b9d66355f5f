"""An answer with drafts of the model's next-token block is the answer without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_states import differing, state_of
from kept_prompts import keep, keeping
from next_token_models import SHAPE, knowing
from opened import sequence_of
from tiny_models import make_model
from tiny_recurrent import DeltaNet

from sparsekv_cli.cache.counters import Speculation
from sparsekv_cli.drafts.mtp import LONGEST_DRAFT as MOST_MTP
from sparsekv_cli.errors import OptionError, SparseKVError
from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.generation.sampler import SamplingOptions, new_sampler
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

PROMPT = [3 + i * i % 400 for i in range(150)]
SAMPLINGS = {"greedy": {"temp": 0.0}, "seeded": {"temp": 1.0}}


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
def path(request: Any, tmp_path_factory: Any) -> Path:
    return knowing(tmp_path_factory.mktemp("m") / "tiny.gguf", request.param)


def opened(path: Path, name: str = "full", **options: Any) -> Model:
    config = SessionConfig(
        threads=1, prefill_dtype="f32", sparse_from=0, **{"speculate": "mtp", **options}
    )
    method = build_method(name, {}, budget=None if name == "full" else "24")
    return load_model(path, method, config)


def answered(model: Model, sequence: Sequence, source: str, sampling: dict[str, float]) -> Any:
    """The tokens of an answer."""
    sequence.timings.speculation = Speculation(source)
    if source == "off":
        sequence.drafts = None
    sample = new_sampler(model, SamplingOptions(sampling, ignore_eos=True), 5)
    generation = Generation(model.tokenizer, sequence, sample, n_predict=60)
    while not generation.choose():
        step(model.engine, [generation])
    return generation.finish().tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["full", "lfps", "h2o"])
def test_an_answer_with_drafts_is_the_same(name, sampling, path):
    model = opened(path, name)
    used, plain = model.sequence(), model.sequence()
    for sequence in (used, plain):
        sequence.prefill(PROMPT)
    answers = [
        answered(model, sequence, source, SAMPLINGS[sampling])
        for sequence, source in ((used, "mtp"), (plain, "off"))
    ]
    assert answers[0] == answers[1] and used.tokens == plain.tokens
    for a, b in zip(used.caches, plain.caches, strict=True):
        assert differing(state_of(a), state_of(b)) == []
    told = used.timings.speculation
    assert 0 < told.accepted < told.drafted <= MOST_MTP * told.steps
    assert told.accepted > 10 or sampling == "seeded"
    assert plain.timings.speculation.steps == 0
    rows = [sequence.next_rows for sequence in (used, plain)]
    assert len(rows[0]._positions) >= len(used.tokens) - 8
    assert len(rows[1]._positions) >= len(PROMPT) + 30  # rows are computed without drafts too
    model.gguf.close()


def test_rejected_rows_leave_the_block_as_it_was(path, monkeypatch):
    """The same drafts follow, and the same rows of K and V, also after a draft is interrupted."""
    model = opened(path)
    used, plain = model.sequence(), model.sequence()
    for sequence in (used, plain):
        sequence.prefill(PROMPT)
    draft = used.next_rows.draft(7, 3)
    step_of, n_steps = plain.next_rows._step, []

    def interrupted(x: Any, pos: int) -> Any:
        n_steps.append(step_of(x, pos))
        if len(n_steps) == 2:
            raise KeyboardInterrupt
        return n_steps[-1]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(plain.next_rows, "_step", interrupted)
        plain.next_rows.draft(7, 3)
    assert plain.next_rows.draft(7, 3) == []  # until a step brings another hidden row
    model.engine.decode([used], [[7, *[(token + 1) % 500 for token in draft]]])
    used.keep(len(PROMPT) + 1)
    plain.decode(7)
    drafts = [sequence.next_rows.draft(9, 3) for sequence in (used, plain)]
    assert drafts[0] == drafts[1]
    a, b = (sequence.next_rows.cache for sequence in (used, plain))
    assert a.n == b.n == len(PROMPT) + 1
    others = differing(state_of(a), state_of(b))  # but for the counts of the steps made
    assert [name for name in others if "counters" not in name and "ledger" not in name] == []
    model.gguf.close()


def block_rows(sequence: Sequence) -> dict[int, np.ndarray]:
    """K of the block's rows by their positions, also of those that were pending."""
    sequence.next_rows.draft(9, 1)
    positions, rows = sequence.next_rows._positions, sequence.next_rows.cache.store.keys()
    assert positions == sorted(set(positions))
    return dict(zip(positions, rows.swapaxes(0, 1), strict=True))


@pytest.mark.parametrize(
    ("way", "given", "kept"),
    [("reset", [], 0), ("change_method", [], 0), ("rewind", [0], 0), ("rewind", [150], 150),
     ("rewind", [151], 150), ("rewind", [152], 152)],
)  # fmt: skip
def test_a_sequence_that_goes_back_has_the_rows_of_its_tokens(way, given, kept, path):
    """The block's rows are those of a sequence that never had other tokens."""
    model = opened(path)
    used, fresh = model.sequence(), model.sequence()
    used.prefill(PROMPT)
    model.engine.decode([used], [PROMPT[:9]])
    used.keep(152)
    block_rows(used)
    if way == "change_method":
        given = [model.attention_of(build_method("quest", {}))]
    getattr(used, way)(*given)
    assert len(used.tokens) == kept
    other = [7 + i * i % 300 for i in range(50)]
    fresh.prefill([*used.tokens, *other])
    used.prefill(other)
    rows, expected = block_rows(used), block_rows(fresh)
    assert set(expected) - set(rows) <= {kept - 1}
    for position, row in rows.items():
        np.testing.assert_allclose(row, expected[position], atol=2e-2, err_msg=str(position))
    model.gguf.close()


def test_rows_from_disk_are_not_those_of_the_block(path, tmp_path):
    """It has rows of the tokens that are computed, at their positions."""
    model, ids = opened(path), [3 + i * i % 400 for i in range(600)]
    writer, reader, fresh = (sequence_of(model) for _ in range(3))
    keeping(writer, tmp_path)
    keep(writer, ids)
    keeping(reader, tmp_path)
    for each in (reader, fresh):
        each.prefill([*ids, *PROMPT])
    assert reader.timings.cached_tokens >= 512
    rows, expected = block_rows(reader), block_rows(fresh)
    assert sorted(rows) == list(range(reader.timings.cached_tokens, len(ids) + len(PROMPT)))
    for position, row in rows.items():
        np.testing.assert_allclose(row, expected[position], atol=2e-2, err_msg=str(position))
    model.gguf.close()


def test_sequences_together(path):
    """One of them makes no drafts, and all take the hidden rows of the same steps."""
    model = opened(path)
    alone, together = [], []
    for seed in range(3):
        sequence = model.sequence()
        sequence.prefill(PROMPT[seed * 9 :])
        drafts = sequence.drafts
        alone.append(answered(model, sequence, "off", SAMPLINGS["greedy"]))
        sequence.rewind(len(PROMPT) - seed * 9)
        sequence.drafts = None if seed == 1 else drafts
        sample = new_sampler(model, SamplingOptions({"temp": 0.0}, ignore_eos=True), 5)
        together.append(Generation(model.tokenizer, sequence, sample, n_predict=60))
    running = list(together)
    while running := [each for each in running if not each.choose()]:
        step(model.engine, running)
    assert [each.finish().tokens for each in together] == alone
    assert [each.sequence.timings.speculation.accepted > 5 for each in together] == [1, 0, 1]
    model.gguf.close()


def test_what_is_refused(tmp_path):
    plain = make_model(tmp_path / "plain", arch="qwen35", **{**SHAPE, "recurrent": DeltaNet()})
    with pytest.raises(OptionError, match="plain has no next-token block"):
        opened(plain)
    missing = "blk.4.nextn.eh_proj.weight"
    cut = make_model(tmp_path / "cut", arch="qwen35", **SHAPE, omit=[missing])
    opened(cut, speculate="off").gguf.close()
    with pytest.raises(SparseKVError, match=f"tensor {missing} is missing"):
        opened(cut)
