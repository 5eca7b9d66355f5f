"""Runs several methods on one prompt: how much each changes the logits, and how fast each is.

The prompt is prefilled once for all methods that fit memory together. Then each method decodes the
same continuation, and its logits are compared with those of ``full``, which comes first. In watched
steps, the attended rows are compared with exact attention. This takes time, so other steps are
timed. On a GPU each method has a prefill of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekv_cli import warmup
from sparsekv_cli.cache.counters import total_counters
from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.row_sizes import check_memory
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.observer import Measured, Observer
from sparsekv_cli.evaluation.prefill import Keys, exact_keys, prefill_each
from sparsekv_cli.evaluation.result import MethodResult, method_result
from sparsekv_cli.evaluation.sweep import option_names, swept
from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.hparams import room_for
from sparsekv_cli.settings.option import did_you_mean

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.forward import OnProgress
    from sparsekv_cli.sequence import Sequence

UNTIMED = 2  # steps between watched and timed steps on a GPU, in which a graph is captured
LEAST_STEPS = 4  # one step for the time to the first token, then watched and timed steps


def parse_methods(
    text: str, common: Mapping[str, str] | None = None, sweeps: Iterable[tuple[str, Ids[str]]] = ()
) -> dict[str, Method]:
    """Returns the methods of a text such as ``lfps,topk:budget=2%``, by their own texts.

    Options follow a colon, separated by ``;`` or ``,``. ``full`` is always there and comes first;
    ``all`` means every method. common: options for every method that has them and does not state
    them. ``full``, the reference of the others, always keeps its rows as f16. sweeps: options with
    several values, as ``parse_sweep`` returns them. Raises ValueError for a wrong text.
    """
    specs: list[str] = ["full"]
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, _ = part.partition(":")
        if not colon and "=" in part and len(specs) > 1:
            specs[-1] += (";" if ":" in specs[-1] else ":") + part
        elif not colon and part.lstrip("-").isdigit() and "=" in specs[-1]:
            specs[-1] += "," + part  # dense_layers=0,1
        elif part == "all":
            specs.extend(METHODS)
        elif name not in METHODS:
            close, listed = did_you_mean(name, METHODS), ", ".join(METHODS)
            raise ValueError(f"unknown method {name!r}{close}: choose from {listed} or all")
        else:
            specs.append(part)
    for option, values in sweeps:
        specs = swept(specs, option, values)
    common = common or {}
    known = {option for spec in specs for option in option_names(spec)}
    for option in common:
        if option not in known:
            close = did_you_mean(option, known)
            raise ValueError(f"none of the methods has an option {option!r}{close}")
    exact = {key: text for key, text in common.items() if not key.startswith("cache_type_")}
    if len(exact) < len(common) and set(specs) == {"full"}:
        raise ValueError("cache types: full is the reference and stays f16; name another method")
    return {spec: build_spec(spec, exact if spec == "full" else common) for spec in specs}


def build_spec(spec: str, common: Mapping[str, str] | None = None) -> Method:
    """Returns the method of a text such as ``lfps:preset=paper;a=0.4``.

    common: options that the method gets if it has them and the text does not state them.
    """
    name, _, options = spec.partition(":")
    pairs = [option.partition("=") for option in options.split(";") if option]
    given = {key.strip(): value.strip() for key, _, value in pairs}
    if common:
        names = option_names(spec)
        given = {**{key: value for key, value in common.items() if key in names}, **given}
    return build_method(name, given)


def decode_tokens(
    sequence: Sequence,
    tokens: Iterable[int],
    result: Measured,
    keys: Keys,
    watched: Collection[int],
    see: Callable[[np.ndarray], None],
) -> None:
    """Decodes ``tokens`` after a sequence's prompt. ``see`` is called with each step's logits.

    result: collects the measurements. keys: the prompt's exact keys, one array a layer. watched:
    the steps whose attended rows are compared with exact attention. Layers that do not choose rows
    are never watched. After the last watched step the caches are as they were.
    """
    layers, shared = sequence.caches, sequence.engine.shares_prefill
    observers: list[Observer] = []
    if watched and shared:
        caches: list[Any] = [
            Observer(cache, k, result) if cache.attends_to_some else cache
            for cache, k in zip(layers, keys, strict=True)
        ]
        observers = [cache for cache in caches if isinstance(cache, Observer)]
        sequence.caches = caches
    elif watched:
        from sparsekv_cli.evaluation import device_observer

        observers = list(device_observer.observe(layers, keys, result))
    so_far: Counter[str] = Counter()
    for step, token in enumerate(tokens):
        for observer in observers:
            observer.active = step in watched
        if observers and step > max(watched, default=-1):
            sequence.caches, observers = layers, []
            if not shared:
                device_observer.leave_alone(layers)
        before = sequence.timings.decode_s
        logits = sequence.decode(token)
        result.step_s.append(sequence.timings.decode_s - before)
        counts = total_counters(layers)
        result.end_step({name: count - so_far[name] for name, count in counts.items()})
        so_far = counts
        see(logits)


def greedy_tokens(
    first: np.ndarray, seen: Ids[np.ndarray], n: int, banned: Collection[int]
) -> Iterator[int]:
    """Yields n greedy tokens. The first follows the logits ``first``, the others ``seen[-1]``.

    The caller adds the logits of each step to ``seen``. banned: tokens that are never chosen,
    because they would end the text.
    """
    allowed = np.ones(len(first), np.bool_)
    allowed[[token for token in banned if 0 <= token < len(first)]] = False
    logits = first
    for _ in range(n):
        yield int(np.where(allowed, logits, -np.inf).argmax())
        logits = seen[-1]


def split_steps(n: int, n_between: int = 0) -> tuple[range, range]:
    """Returns which of n decode steps are watched and which are timed. The first is neither.

    n_between: steps between both ranges that are neither, if enough are left to watch. With n = 8
    the ranges are 1 .. 3 and 4 .. 7.
    """
    n_timed = n // 2
    return range(1, max(2, n - n_timed - n_between)), range(n - n_timed, n)


def compare(
    model: Model,
    methods: Mapping[str, Method],
    ids: Ids[int],
    n_steps: int,
    continuation: Ids[int] | None = None,
    on_prefill: OnProgress | None = None,
    on_step: OnProgress | None = None,
) -> Iterator[MethodResult]:
    """Yields each method's result on the prompt ``ids`` and ``n_steps`` tokens, ``full``'s first.

    methods: by their texts. continuation: the tokens that all methods decode; None: those that
    ``full`` chooses. Raises SparseKVError if prompt and steps do not fit the context.
    """
    n_context = len(ids) + n_steps
    if n_context > model.n_ctx:
        raise SparseKVError(
            f"{len(ids)} tokens and {n_steps} steps do not fit the context of {model.n_ctx}: "
            f"shorten the prompt, or {room_for(model.hparams, n_context)}"
        )
    n_bytes = 4 * n_steps * model.hparams.n_vocab
    check_memory(f"the logits of {n_steps} steps", n_bytes, "give fewer --steps")
    shared = model.engine.shares_prefill
    if shared:
        for method in methods.values():
            last_layer = full_layers(model.calibrations.specs(method))[-1:]
            warmup.load_method_kernels(method, last_layer, model.decoder.rows_dtype)
    keys: Keys = ()
    watched, timed = split_steps(n_steps, 0 if shared else UNTIMED)
    reference: list[np.ndarray] = []
    tokens: list[int] = list(continuation or ())[:n_steps]
    each = prefill_each(model, methods, ids, n_steps=n_steps, progress=on_prefill)
    # no enumerate here: it would keep the last sequence alive
    for spec, (logits, sequence, seconds) in each:
        i, result, layers = list(methods).index(spec), Measured(), sequence.caches
        if i == 0 and shared:
            keys = exact_keys(layers, len(ids))
        elif i == 0:
            from sparsekv_cli.evaluation import device_observer

            keys = device_observer.exact_keys(layers, len(ids))

        def see(logits: np.ndarray, i: int = i, result: Measured = result) -> None:
            if i == 0:
                reference.append(logits)
            step = len(result.kld)
            result.add_step(reference[step], logits)
            if on_step is not None:
                on_step(i * n_steps + step + 1, len(methods) * n_steps)

        greedy = greedy_tokens(logits, reference, n_steps, model.tokenizer.eog_ids)
        decode_tokens(sequence, tokens or greedy, result, keys, watched, see)
        tokens = list(sequence.tokens[len(ids) :])
        yield method_result(spec, methods[spec], layers, result, seconds, timed)
        del layers, sequence  # frees the memory of this method before the next one starts
