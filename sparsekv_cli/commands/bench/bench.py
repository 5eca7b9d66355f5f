"""``sparsekv-cli bench``: speed of prefill and decode at any depth, in llama-bench's form."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.bench.report import REPORTS, BenchModel, BenchResult, BenchTest
from sparsekv_cli.commands.bench.texts import check_text, decode_texts, draft_counts, tokens_of
from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.long_context import warn_beyond_training
from sparsekv_cli.commands.options.method_choice import choose_method
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    build_method,
    check_sparse_from,
    find_model,
    load_model,
    method_of,
    model_options,
    session_option,
    with_context,
)
from sparsekv_cli.commands.options.numbers import (
    WholeRange,
    at_least_one,
    name_list,
    number_list,
    pairs_of_numbers,
)
from sparsekv_cli.commands.options.prefix import PrefixOptions, prefixes_maker
from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.commands.shared.terminal import write_text
from sparsekv_cli.evaluation.roofline import Roofline, decode_roofline, measure_bandwidth

if TYPE_CHECKING:
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.gguf.file import GGUFFile
    from sparsekv_cli.prefix.prompt_rows import PromptRows
    from sparsekv_cli.sequence import Sequence

AUTO = "auto"
DEFAULT_SEED = 0
WARM_UP_TOKENS = 3  # tokens that the untimed run decodes


@click.command(cls=GroupedCommand)
@click.option(
    "-p", "--n-prompt", "n_prompts", metavar="LIST", default="512", callback=number_list,
    help="Prefill this many tokens; 0 leaves the test out. [default: 512]",
)  # fmt: skip
@click.option(
    "-n", "--n-gen", "n_gens", metavar="LIST", default="128", callback=number_list,
    help="Decode this many tokens; 0 leaves the test out. [default: 128]",
)  # fmt: skip
@click.option(
    "-pg", "pairs", metavar="PROMPT,GEN", multiple=True, callback=pairs_of_numbers,
    help="Prefill and decode, timed together; repeatable.",
)  # fmt: skip
@click.option(
    "-d", "--n-depth", "n_depths", metavar="LIST", default="0", callback=number_list,
    help="Tokens in the KV cache before the test starts (not timed). [default: 0]",
)  # fmt: skip
@click.option(
    "-b", "--batch", "n_seqs", metavar="LIST", default="1", callback=at_least_one,
    help="Sequences that decode together, each with its own cache of that depth; t/s counts the "
    "tokens of all. Tests of prefill alone use one. [default: 1]",
)  # fmt: skip
@click.option(
    "--method", "methods", metavar="LIST", shell_complete=completers.methods, default="full",
    callback=name_list, help="KV-cache methods, separated by commas. [default: full]",
)  # fmt: skip
@click.option(
    "-r", "--repetitions", metavar="N", type=WholeRange(min=1), default=5,
    help="Timed runs of each test. [default: 5]",
)  # fmt: skip
@click.option(
    "-O", "--output", type=click.Choice(list(REPORTS)), default="md",
    help="Format on stdout. [default: md]",
)  # fmt: skip
@click.option(
    "--no-warmup", is_flag=True, help="Leave out the untimed run before each test.",
)  # fmt: skip
@click.option(
    "--cache-dir", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
    help="Keep the rows of each depth in DIR, at most 16 GiB, for other methods and later runs.",
)  # fmt: skip
@click.option(
    "-f", "--file", "text", metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use the tokens of this text instead of random ones. Drafts need a text.",
)  # fmt: skip
@session_option("speculate", default="off")
@session_option("draft_model")
@session_option("draft_method")
@session_option("prefill_attention")
@session_option("prefill_budget")
@model_options(bench=True)
def command(
    options: ModelOptions,
    n_prompts: list[int],
    n_gens: list[int],
    pairs: list[tuple[int, int]],
    n_depths: list[int],
    n_seqs: list[int],
    methods: list[str],
    repetitions: int,
    output: str,
    no_warmup: bool,
    cache_dir: Path | None,
    text: Path | None,
) -> None:
    """Measure the speed of prefill (pp) and decode (tg), in llama-bench's shape.

    Tokens are random, with a fixed seed, or a text's. Loading, filling the cache up to the depth
    and a short run before each test are not timed. An option given with -o applies to each method
    that has it. The method auto is chosen for the largest test, and shown by its name. The speed
    that memory allows (the roofline) is shown for tests that only decode.
    """
    shapes = [(n, 0, 1) for n in n_prompts if n]
    shapes += [(0, n, seqs) for n in n_gens if n for seqs in n_seqs]
    shapes += [(prompt, gen, seqs) for prompt, gen in pairs for seqs in n_seqs]
    tests = [BenchTest(prompt, gen, depth, n) for depth in n_depths for prompt, gen, n in shapes]
    if not tests:
        nothing = "nothing to measure: -p and -n are 0 and there is no -pg"
        raise click.UsageError(nothing, click.get_current_context())
    config = with_context(options.config, context_size(tests))
    auto = replace(options, method=AUTO)  # for the largest test
    if AUTO in methods:
        method_of(auto)
    built = [
        (name, build_for_bench("full" if name == AUTO else name, methods, options))
        for name in methods
    ]
    check_sparse_from(options.config, [method for _, method in built])
    check_text(text, options.config.speculate)
    path = find_model(options.model)
    seed = DEFAULT_SEED if options.seed is None else options.seed
    report = REPORTS[output](write_text)
    bandwidth: float | None = None
    try:
        for name, method in built:
            model = load_model(path, method, config)
            if method is built[0][1]:
                warn_beyond_training(model.hparams, config, "depth", max(n_depths))
            if name == AUTO:
                model, chosen = choose_method(model, auto, config.ctx_size)
                name = chosen.method
            described = describe_model(model, config.chunk)
            is_needed = any(test.decodes_only for test in tests) and not described.gpu
            if is_needed and bandwidth is None:  # it is the host's
                bandwidth = measure_bandwidth(model.n_threads)
            rows: PromptRows | None = None
            if cache_dir is not None:
                rows = prefixes_maker(model, PrefixOptions(cache_dir, 16.0, False, None))(
                    model.method
                )
                model.gguf.content.wait()  # prompts on disk belong to the model's hash
            ids = tokens_of(model, text, max(test.n_seqs for test in tests), seed)
            for test, samples, ledger in run_tests(
                model, tests, repetitions, ids, warm_up=not no_warmup, rows=rows
            ):
                method_options = model.method.options()
                report.row(
                    BenchResult(
                        model=described,
                        test=test,
                        method=name,
                        method_options=method_options,
                        budget=str(method_options.get("budget", "")) or None,
                        samples_ns=samples,
                        ledger=ledger,
                        roofline=roofline_of(model, test, repetitions, ledger, bandwidth),
                        sparse_from=model.sparse_from,
                        prefill_attention=config.prefill_attention,
                        prefill_budget=config.sparse_budget,
                    )
                )
            del model  # frees its memory before the next method
            gc.unfreeze()
            gc.collect()
    finally:
        report.close()


def context_size(tests: Ids[BenchTest]) -> int:
    """Returns the tokens of the largest test, and one more for decoding at depth 0."""
    return max(test.n_depth + test.n_tokens for test in tests) + 1


def build_for_bench(name: str, names: Ids[str], options: ModelOptions) -> Method:
    """Returns method ``name`` with the user's options that it has, ``--budget`` included.

    Raises click.UsageError for an option that none of ``names`` has.
    """
    from sparsekv_cli.evaluation.sweep import option_names
    from sparsekv_cli.methods import METHODS

    known = {each: option_names(each) for each in METHODS}
    known_somewhere = {key for other in names for key in known.get(other, ())}

    def concerns(key: str) -> bool:
        return key in known.get(name, ()) or key not in known_somewhere

    return build_method(
        name,
        {key: value for key, value in options.method_options.items() if concerns(key)},
        {key: value for key, value in options.named.items() if concerns(key)},
    )


def run_tests(
    model: Model,
    tests: Ids[BenchTest],
    repetitions: int,
    ids: Ids[Ids[int]],
    *,
    warm_up: bool = True,
    rows: PromptRows | None = None,
) -> Iterator[tuple[BenchTest, list[int], dict[str, Any]]]:
    """Runs every test. Yields it with its nanoseconds and the ledger of its timed parts.

    ids: the tokens of each sequence. warm_up: whether an untimed run comes before each test. rows:
    see ``prefill_to_depth``.
    """
    sequences = [model.sequence() for _ in ids]
    for test in tests:
        samples: list[int] = []
        ledger: dict[str, Any] = {}
        first = sequences[: test.n_seqs]
        if warm_up:
            run_once(model, first, ids, replace(test, n_gen=min(test.n_gen, WARM_UP_TOKENS)), rows)
        for sequence in first:
            sequence.timings.speculation.reset()
        for _ in range(repetitions):
            nanoseconds, before = run_once(model, first, ids, test, rows)
            samples.append(nanoseconds)
            ledger = add_ledger(ledger, before, ledger_of_all(first))
        ledger |= draft_counts(first)
        yield test, samples, ledger


def ledger_of_all(sequences: Ids[Sequence]) -> dict[str, int]:
    """Returns counts and memory of all sequences together."""
    from sparsekv_cli.cache.counters import ledger_of

    return ledger_of(
        [cache for sequence in sequences for cache in sequence.caches],
        [cache for sequence in sequences for cache in sequence.draft_caches],
    )


def run_once(
    model: Model,
    sequences: Ids[Sequence],
    ids: Ids[Ids[int]],
    test: BenchTest,
    rows: PromptRows | None,
) -> tuple[int, dict[str, Any]]:
    """Runs one repetition. Returns its nanoseconds, and the ledger before the timed part."""
    n_last = model.engine.first_steps
    pairs = list(zip(sequences, ids, strict=False))
    left = [prefill_to_depth(sequence, row, test, n_last, rows) for sequence, row in pairs]
    for tokens in zip(*left, strict=True):
        model.engine.decode(sequences, [[token] for token in tokens])
    before = ledger_of_all(sequences)
    return time_once(model, sequences, ids, test), before


def prefill_to_depth(
    sequence: Sequence,
    ids: Ids[int],
    test: BenchTest,
    n_last: int = 1,
    rows: PromptRows | None = None,
) -> Ids[int]:
    """Prefills a sequence up to the test's depth, which builds the method's indexes.

    In a test that only decodes, the last n_last tokens before the depth are not prefilled. They are
    returned, and the caller decodes them: the first decode steps do some work that should not be
    timed. At depth 0 the test starts from one token, because a method needs a prefill before its
    first decode step. rows: finds and stores the rows of the depth on disk.
    """
    n_decoded = min(n_last, test.n_depth - 1) if test.decodes_only and test.n_depth > 1 else 0
    n_prefill = max(test.n_depth - n_decoded, int(test.decodes_only))
    from sparsekv_cli.sequence import N_REFRESH, N_WHOLE

    missing = sequence.keep_common(ids[:n_prefill])
    if rows is not None and len(missing) >= N_WHOLE:  # the disk keeps whole prompts
        sequence.reset()
        missing = ids[:n_prefill]
    if 0 < len(missing) < N_REFRESH:
        sequence.rewind(max(0, n_prefill - N_REFRESH))
        missing = ids[len(sequence.tokens) : n_prefill]
    if missing:
        with PrefillProgress(f"depth {test.n_depth}") as bar:
            sequence.prefill(missing, bar, rows=rows)
        if rows is not None:
            rows.finish()
    return ids[n_prefill : n_prefill + n_decoded]


def time_once(model: Model, sequences: Ids[Sequence], ids: Ids[Ids[int]], test: BenchTest) -> int:
    """Returns the nanoseconds of the timed part: the prefills, then decoding together."""
    start = len(sequences[0].tokens)
    first = start + test.n_prompt
    begin = time.perf_counter_ns()
    if test.n_prompt:
        for sequence, row in zip(sequences, ids, strict=False):
            with PrefillProgress(f"pp {test.n_prompt}", draws=False) as lines:
                sequence.prefill(row[start:first], lines)
    decode_texts(model.engine, sequences, ids, first + test.n_gen)
    return time.perf_counter_ns() - begin


def add_ledger(
    total: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns ``total`` plus the counts from ``before`` to ``after``.

    Entries of memory are those of ``after``.
    """
    from sparsekv_cli.cache.counters import LEDGER_STATES, ledger_since

    return {
        key: value if key.startswith(LEDGER_STATES) else total.get(key, 0) + value
        for key, value in ledger_since(after, before).items()
    }


def roofline_of(
    model: Model,
    test: BenchTest,
    repetitions: int,
    ledger: Mapping[str, Any],
    bandwidth: float | None,
) -> Roofline | None:
    """Returns the roofline of a test that only decodes; None for other tests.

    ledger: of all repetitions. Sequences that decode together read the weights once, and each
    chosen expert once.
    """
    if bandwidth is None or not test.decodes_only:
        return None
    weight_bytes = model.decoder.weights.bytes_a_step(test.n_seqs) // test.n_seqs
    return decode_roofline(weight_bytes, ledger, repetitions * test.n_gen * test.n_seqs, bandwidth)


def describe_model(model: Model, n_batch: int) -> BenchModel:
    """Returns the fields of a row that describe the model and the machine."""
    file = model.gguf
    n_params = sum(tensor.n_elements for tensor in file.tensors.values())
    return BenchModel(
        path=file.path,
        type=model_type(file, n_params),
        size=sum(tensor.n_bytes for tensor in file.tensors.values()),
        n_params=n_params,
        n_threads=model.n_threads,
        n_batch=n_batch,
        gpu=model.engine.gpu,
    )


def model_type(file: GGUFFile, n_params: int) -> str:
    """Returns architecture, size and most frequent type of weights: ``llama 135M Q4_1``."""
    from sparsekv_cli.models.sources.listing import weight_type

    size = file.metadata.get("general.size_label")
    if not isinstance(size, str):
        size = f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"
    return f"{file.metadata['general.architecture']} {size} {weight_type(file)}"
