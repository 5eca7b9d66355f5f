"""Drafts in a server: the same texts, right counts, no memory that is left."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from asked import FULL, METHODS, Asked
from next_token_models import knowing
from tiny_sequences import open_tiny, tokens

from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.serve.jobs import Event, Failed, Finished, NewToken
from sparsekv_cli.serve.scheduler import Scheduler
from sparsekv_cli.settings.config import SessionConfig

LIKELY = dict.fromkeys(range(40, 44), 30.0)
FEW_TOKENS = SamplingOptions({"temp": 0.0, "logit_bias": LIKELY}, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Iterator[Model]:
    model = open_tiny(tiny_model, "full", ctx_size=1024).model
    yield model
    model.gguf.close()


def test_drafts_of_a_next_token_block(tmp_path):
    """The block's rows count as those of one more layer."""
    path, told = knowing(tmp_path / "tiny.gguf", "qwen35moe"), []
    for source in ("off", "mtp"):
        config = SessionConfig(threads=1, prefill_dtype="f32", speculate=source)
        model = load_model(path, FULL, config)
        scheduler = Scheduler(model, n_parallel=3, n_queue=9, kv_bytes=1 << 30)
        scheduler.start()
        asked = [Asked(scheduler, tokens(60 + 9 * i), 40) for i in range(5)]
        n_bytes = scheduler.bytes_of(asked[0].job.request)[0]
        told.append(([each.text for each in asked], n_bytes // (3 if source == "mtp" else 2)))
        scheduler.stop()
        assert (scheduler.stats.accepted_tokens > 0) == (source == "mtp")
        model.gguf.close()
    assert told[0] == told[1]


def drafting(model: Model, source: str, n: int = 1) -> Scheduler:
    config = replace(model.config, speculate=source)
    return Scheduler(replace(model, config=config), n_parallel=n, n_queue=99, kv_bytes=1 << 30)


def test_drafts_change_no_text(model):
    """Answers of few different tokens, together; a client that asks for rows gets them a step."""
    texts, stats, n_steps, last_rows = [], [], [], []
    few: dict[str, Any] = {"sampling": FEW_TOKENS}
    for source in ("off", "ngram"):
        scheduler = drafting(model, source, 3)
        scheduler.start()
        asked = [
            Asked(scheduler, tokens(60 + 9 * i, i % 4), 50, method=METHODS[i % 3], **few)
            for i in range(8)
        ]
        asked.append(Asked(scheduler, tokens(80), 50, n_bins=4, **few))
        texts.append([each.text for each in asked])
        scheduler.stop()
        stats.append(scheduler.stats)
        news = [event for event in asked[-1].events if isinstance(event, NewToken)]
        assert sum(event.n_tokens for event in news) == 50
        assert news[0].rows is None and all(event.rows for event in news[1:])
        n_steps.append(len(news) - 1)
        last_rows.append(news[-1].rows)
    assert texts[0] == texts[1] and last_rows[0] == last_rows[1]
    assert n_steps[0] == 49 > n_steps[1]
    off, drafted = stats
    assert off.drafted_tokens == 0 < 20 < drafted.accepted_tokens <= drafted.drafted_tokens
    assert drafted.n_steps < off.n_steps and drafted.step_tokens == off.step_tokens
    assert (off.rows_total, off.rows_attended) == (drafted.rows_total, drafted.rows_attended)


def test_counts_of_answers_that_end_within_a_draft(model):
    """By a stop string, or by a token that ends the answer and is not in it."""
    scheduler, reasons = drafting(model, "ngram"), set()
    scheduler.start()
    text = Asked(scheduler, tokens(60), 50, sampling=FEW_TOKENS).text
    given: list[dict[str, Any]] = [{"stops": (text[i : i + 6],)} for i in range(8, 44, 2)]
    bias = dict.fromkeys(model.tokenizer.eog_ids, 27.0) | {40: 30.0}
    ending = SamplingOptions({"temp": 1.0, "logit_bias": bias})
    given += [{"seed": seed, "sampling": ending} for seed in range(12)]
    for options in given:
        before = scheduler.stats.accepted_tokens
        asked = Asked(scheduler, tokens(60), 50, **{"sampling": FEW_TOKENS, "n_bins": 4} | options)
        assert isinstance(asked.end, Finished)
        news = [event for event in asked.events if isinstance(event, NewToken)]
        assert sum(event.n_tokens for event in news) == asked.end.n_generated
        accepted = [event.n_accepted for event in news]
        assert sum(accepted) == scheduler.stats.accepted_tokens - before
        is_end = asked.end.stop_reason == "eos"
        for event in news:
            assert event.n_tokens - event.n_accepted == (0 if is_end and event is news[-1] else 1)
        reasons |= {asked.end.stop_reason} if any(accepted[-1:]) else set()
    scheduler.stop()
    assert reasons >= {"stop", "eos"}


def test_a_parked_sequence_has_no_copies_of_a_draft(model):
    """Its client left while the step of a draft was on its way."""
    scheduler, parked = drafting(model, "ngram"), []
    asked = Asked(scheduler, tokens(60), 300, sampling=FEW_TOKENS)
    running, job, park = scheduler._running, asked.job, scheduler._park

    def look(sequence: Sequence) -> None:
        parked.append((len(sequence.tokens), [cache._saved for cache in sequence.caches]))
        park(sequence)

    def leave(event: Event) -> None:
        asked._tell(event)
        if isinstance(event, NewToken) and event.n_accepted > 3:
            job.abort()

    running._park, job.emit = look, leave
    scheduler.start()
    assert isinstance(asked.end, Failed)
    scheduler.stop()
    n_told = sum(event.n_tokens for event in asked.events if isinstance(event, NewToken))
    ((n_tokens, copies),) = parked
    assert n_tokens > 60 + n_told and not any(copies)
