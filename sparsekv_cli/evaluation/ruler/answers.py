"""Lets methods answer samples of RULER's tasks. Each sample is prefilled once for all methods."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sparsekv_cli.evaluation.prefill import MethodPrefill, greedy_answer, prefill_each
from sparsekv_cli.evaluation.rows_read import rows_read
from sparsekv_cli.evaluation.ruler.records import Key, key_of
from sparsekv_cli.evaluation.ruler.samples import Encode, RulerPlan, RulerPrompt, make_prompt
from sparsekv_cli.evaluation.ruler.tasks import score
from sparsekv_cli.methods.base import Method

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.forward import OnProgress

RulerPoint = tuple[int, str, int]  # length, task and number of a sample


def answer_all(
    model: Model,
    settings: Mapping[str, Method],
    plan: RulerPlan,
    encode: Encode,
    done: Collection[Key],
    on_prefill: OnProgress | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Yields the new records of each sample: one for each method that has no record in ``done``."""
    for sample in plan.samples():
        missing = missing_settings(settings, sample, done)
        yield answer_sample(model, missing, plan, sample, encode, on_prefill)


def missing_settings(
    settings: Mapping[str, Method], sample: RulerPoint, done: Collection[Key]
) -> dict[str, Method]:
    """Returns the methods of ``settings`` that have no record of ``sample`` in ``done``."""
    return {
        spec: method
        for spec, method in settings.items()
        if key_of({**_place(sample), "name": method.name, "options": method.options()}) not in done
    }


def answer_sample(
    model: Model,
    settings: Mapping[str, Method],
    plan: RulerPlan,
    sample: RulerPoint,
    encode: Encode,
    on_prefill: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Returns the records of a sample, one for each method. They do not depend on each other."""
    if not settings:
        return []
    length, task, number = sample
    n_answer = plan.room(task)
    prompt = make_prompt(task, length, number, plan.seed, n_answer, encode)
    n_read = prompt.n_context if plan.question_by_decode else len(prompt.ids)
    n_steps = len(prompt.ids) - n_read + n_answer
    started = prefill_each(
        model, settings, prompt.ids[:n_read], n_steps=n_steps, progress=on_prefill
    )
    records = []
    for spec, start in started:
        method = settings[spec]
        result = answer(model, prompt, n_read, start, n_answer)
        del start  # frees the memory of this method before the next one starts
        what = {"name": method.name, "options": method.options()}
        records.append({**_place(sample), **what, **result})
    return records


def _place(sample: RulerPoint) -> dict[str, Any]:
    length, task, number = sample
    return {"task": task, "length": length, "sample": number}


def answer(
    model: Model, prompt: RulerPrompt, n_read: int, start: MethodPrefill, n_answer: int
) -> dict[str, Any]:
    """Returns the greedy answer to a prompt, and its score.

    start: the prefill of the first ``n_read`` tokens; the others are decoded. The answer ends where
    the model ends it, or as soon as it contains all references. More text cannot change the score
    then.
    """
    references = prompt.sample.references
    logits, sequence, _ = start
    for token in prompt.ids[n_read:]:
        logits = sequence.decode(token)
    tokens: list[int] = []
    text = ""
    for token in greedy_answer(sequence, logits, model.tokenizer.eog_ids, n_answer):
        tokens.append(token)
        text = model.tokenizer.decode(tokens, skip_special=True)
        if score(text, references) == 1:
            break
    attended = rows_read(sequence.caches, len(sequence.tokens) - n_read)
    return {
        "score": score(text, references),
        "answer": text,
        "references": references,
        "depths": prompt.sample.depths,
        "prompt_tokens": len(prompt.ids),
        "rows_attended_mean": attended.mean,
    }
