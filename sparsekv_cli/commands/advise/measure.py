"""The measurements of ``advise``: every method on the document's rows, and the answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from sparsekv_cli.cache.spec import FULL
from sparsekv_cli.commands.options.model import ModelOptions
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.errors import SparseKVError

if TYPE_CHECKING:
    from sparsekv_cli.commands.advise.reader import Reader
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model
    from sparsekv_cli.planning.advice import Advice
    from sparsekv_cli.planning.reading import LossTask
    from sparsekv_cli.sequence import Sequence as Tokens

# The order in which methods are tried. The most promising come first, because the time may end.
ORDER = ("fasa", "quest", "lfps", "topk", "snapkv", "sals", "freekv", "faedkv", "streaming", "h2o")
MOST_S = 60.0  # seconds for all work after the reading
PLANT_S = 10.0  # seconds of MOST_S for reading the part with planted facts
STARTS = (0.0, 0.25, 0.5, 0.75)  # where this part may begin, as a share of the document
LEAST_PART = 704  # least tokens of this part; fewer new rows are not stored for all methods
N_SAME = 32  # tokens of a prompt on disk that are computed in any case
N_ANSWER = 64  # most tokens of an answer
N_SHORT = 24  # steps that measure the speed of ``full`` after a short document


def candidates(options: ModelOptions) -> tuple[dict[str, Method], dict[str, str]]:
    """Returns name -> method with the user's options, and name -> reason for methods left out.

    Raises click.UsageError for an option that no method has.
    """
    from sparsekv_cli import methods
    from sparsekv_cli.evaluation.sweep import option_names

    found, left_out = {}, {}
    for name in ORDER:
        known = option_names(name)
        given = {key: text for key, text in options.named.items() if text and key in known}
        try:
            found[name] = methods.build_method(name, given)
        except ValueError as error:
            left_out[name] = str(error)
    if not found:
        raise click.UsageError(next(iter(left_out.values())))
    return found, left_out


def runnable(
    model: Model, methods: dict[str, Method], left_out: dict[str, str], calibrate: bool
) -> dict[str, Method]:
    """Returns the methods that the model can run. Reasons for the others go to ``left_out``."""
    from sparsekv_cli.planning.kept import NOT_CALIBRATED

    found = {}
    kinds = [layer.kind for layer in model.hparams.layers]
    if FULL not in kinds:
        reason = "no layer of this model attends to all rows, so a method changes nothing"
        left_out |= dict.fromkeys(methods, reason)
        return {}
    for name, method in methods.items():
        if reason := method.misfit(model.hparams.layers):
            left_out[name] = f"it {reason}"
        elif not calibrate and not model.calibrations.has(method):
            left_out[name] = f"{NOT_CALIBRATED}, or advise --calibrate"
        elif method.n_queried is None:
            left_out[name] = "it reads the whole document anew each time, and none of it from disk"
        else:
            found[name] = method
    for method in found.values():
        method.check_layers(model.hparams.layers)
    return found


def plant(reader: Reader, model: Model, body: Sequence[int]) -> LossTask:
    """Returns the task on this document, with facts in as much of it as PLANT_S seconds allow."""
    from sparsekv_cli.planning.reading import make_task

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_bos=False, add_eos=False, parse_special=False)

    last = 1 - LEAST_PART / len(body)
    starts = [*(start for start in STARTS if start < last), max(0.0, last)]
    tasks = [make_task(body, start, encode, model.tokenizer.decode) for start in starts]
    known = [reader.on_disk(task.prompt) for task in tasks]
    for task, n in zip(tasks, known, strict=True):
        if n > len(task.prompt) - N_SAME:
            return task
    for task, n in zip(tasks, known, strict=True):
        seconds = reader.expected(len(task.prompt), n)
        if seconds <= PLANT_S or task is tasks[-1]:
            say(
                f"reading {len(task.prompt) - n} tokens again with {len(task.facts)} facts planted "
                f"in them: about {seconds:.0f} s"
            )
            break
    return task


def try_all(
    reader: Reader,
    task: LossTask,
    full: Method,
    methods: dict[str, Method],
    begin: float,
    max_loss: float,
    left_out: dict[str, str],
    n_answers: int,
) -> Advice:
    """Tries the methods until the time is over. Reasons for the others go to ``left_out``.

    begin: the time when the reading ended. n_answers: the number of answers that follow.
    """
    from sparsekv_cli.planning.advice import Advice
    from sparsekv_cli.planning.trial import Trials

    sequence = reader.read(task.prompt, full)
    say("measuring full")
    trials = Trials(task, sequence, full)
    until = begin + MOST_S - n_answers * N_ANSWER * trials.full_step_s
    found, first, n_tried = [], time.perf_counter(), 0
    for i, (name, method) in enumerate(methods.items(), 1):
        now = time.perf_counter()
        if now + (now - first) / max(1, n_tried) > until:
            left_out[name] = f"not measured, {MOST_S:.0f} s would have been over"
            continue
        n_tried += 1
        say(f"measuring {name} ({i} of {len(methods)})")
        try:
            trial = trials.try_method(reader.read(task.prompt, method), method)
        except (MemoryError, SparseKVError) as error:
            left_out[name] = str(error) or "out of memory"
            continue
        found.append(trial)
        if not len(trial.same):
            memory = f"{trial.n_bytes / trials.full.n_bytes:.0%} of its memory"
            speed = f"{trial.speedup:.2f} times as fast as full"
            left_out[name] = f"nothing to gain here: {speed}, {memory}"
    return Advice(
        trials.full,
        trials.full_step_s,
        found,
        max_loss,
        left_out,
        trials.is_uneven,
        len(task.facts),
        task.first,
    )


def short_advice(
    sequence: Tokens,
    full: Method,
    max_loss: float,
    methods: Collection[str],
    left_out: dict[str, str],
) -> Advice:
    """Returns the advice ``full``, for a short document. Reasons go to ``left_out``."""
    from sparsekv_cli.planning.advice import Advice
    from sparsekv_cli.planning.auto import LEAST_TEXT
    from sparsekv_cli.planning.reading import LossTask
    from sparsekv_cli.planning.trial import Trials

    reason = f"below {LEAST_TEXT} tokens methods leave out too few rows"
    left_out |= dict.fromkeys(methods, reason)
    ids = list(sequence.tokens)
    following = [ids[i % len(ids)] for i in range(N_SHORT)]
    trials = Trials(LossTask(ids, following, (), 0), sequence, full)
    return Advice(trials.full, trials.full_step_s, [], max_loss, left_out, trials.is_uneven, 0, 0)


def answer_all(reader: Reader, model: Model, ids: Sequence[int], advice: Advice) -> dict[str, str]:
    """Returns the greedy answers of ``full`` and of the advised method, or of the best other."""
    from sparsekv_cli.evaluation.prefill import greedy_answer
    from sparsekv_cli.methods import spec_of

    trials = [advice.full]
    other = advice.chosen if advice.chosen is not advice.full else next(iter(advice.best), None)
    if other is not None:
        trials.append(other)
    answers = {}
    for trial in trials:
        say(f"answering with {spec_of(trial.method)}")
        sequence = reader.read(ids, trial.method)
        assert sequence.checkpoint is not None
        logits, tokenizer = sequence.checkpoint.logits, model.tokenizer
        tokens = list(greedy_answer(sequence, logits, tokenizer.eog_ids, N_ANSWER))
        answers[spec_of(trial.method)] = tokenizer.decode(tokens, skip_special=True).strip()
    return answers
