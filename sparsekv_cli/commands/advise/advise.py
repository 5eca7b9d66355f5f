"""``sparsekv-cli advise``: what each method gains and loses on a document, on this machine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.advise.document import Document, Reading, command_line, read_document
from sparsekv_cli.commands.advise.measure import (
    answer_all,
    candidates,
    plant,
    runnable,
    short_advice,
    try_all,
)
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.long_context import warn_of_long_context
from sparsekv_cli.commands.options.model import (
    CONTEXT_OPTION,
    MAX_LOSS_OPTION,
    READING,
    ModelOptions,
    build_method,
    check_calibration,
    find_model,
    load_model,
    model_options,
    prepare_methods,
    session_option,
)
from sparsekv_cli.commands.options.numbers import FiniteRange
from sparsekv_cli.commands.options.prefix import PrefixOptions, folder_options
from sparsekv_cli.commands.options.prompt import file_option
from sparsekv_cli.commands.shared.progress import CompileProgress, warn_of_load
from sparsekv_cli.commands.shared.prompt import check_utf8
from sparsekv_cli.commands.shared.terminal import say, write_json
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import prompt_ids
from sparsekv_cli.settings.changes import CHANGES
from sparsekv_cli.settings.config import SessionConfig

if TYPE_CHECKING:
    from sparsekv_cli.commands.advise.reader import Reader
    from sparsekv_cli.model import Model
    from sparsekv_cli.planning.advice import Advice
    from sparsekv_cli.sequence import Sequence as Tokens

LONG = 8192  # tokens; of longer documents --max-read limits the reading
ENOUGH = 0.5  # share of the tokens that may be read; if so many are on disk, no more are read
ROOM = 384  # tokens after the document: planted facts, steps or an answer
CACHE_TYPES = ("cache_type_k", "cache_type_v")


@click.command(cls=GroupedCommand)
@click.option("-p", "--prompt", metavar="TEXT", help="A question about the document.")
@file_option("The document; - is stdin. [default: what is piped, or a built-in text]")
@click.option(
    "--max-read", metavar="SECONDS", type=FiniteRange(min=1), default=120.0,
    help=f"Most time for reading a document of more than {LONG} tokens. [default: 120]",
)  # fmt: skip
@click.option(
    "--calibrate", is_flag=True,
    help="Also calibrate the methods that need it, once. Each takes a minute or more.",
)  # fmt: skip
@MAX_LOSS_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a report.")
@CONTEXT_OPTION
@folder_options
@session_option("prefill_attention")
@session_option("prefill_budget")
@model_options(bench=True, sparse_from=False, seed=False)
def command(
    options: ModelOptions,
    prefix: PrefixOptions,
    prompt: str | None,
    file: str | None,
    max_read: float,
    calibrate: bool,
    as_json: bool,
) -> None:
    """Say what each method gains and loses, on your document and your machine.

    The document is read once, and its rows are kept on disk. Then each method decodes the same
    tokens after it. They repeat a passage of the document, continue its end, and name facts that
    were planted in it. The report has the speed and memory of full and of the best three methods.
    It says how often each chooses the same word as full, and how many facts it finds. With -p it
    has the answers to a question. All is measured, within a minute after the reading. The last line
    is the command to type.

    It measures the CPU. An advised method has a mean KLD to full of at most --max-loss. It misses
    at most one of the facts that full finds.
    """
    if options.config.device == "cuda":
        raise click.UsageError("advise measures the CPU: for a GPU use bench and compare")
    if options.method_options:
        raise click.UsageError("advise tries methods with their default options: leave -o out")
    check_calibration(options, "advise")
    full = build_method("full", {}, {key: options.named[key] for key in CACHE_TYPES})
    methods, left_out = candidates(options)
    question = None if prompt is None else check_utf8(prompt, "the question given with -p")
    document, max_loss = read_document(file), options.allowed_loss
    path = find_model(options.model)
    is_busy = warn_of_load()  # before the model's own work
    compiling = CompileProgress()
    model = load_model(path, full, replace(options.config, device="cpu"), compiling)
    warn_of_long_context(model)
    from sparsekv_cli.commands.advise.reader import Reader
    from sparsekv_cli.commands.advise.report import as_object, print_report
    from sparsekv_cli.planning.auto import LEAST_TEXT

    methods = runnable(model, methods, left_out, calibrate)
    text, encode = fit_context(model, document, question)
    n_bytes = 2 * model.row_bytes(len(encode(text)) + ROOM)
    with Reader(model, prefix, n_bytes) as reader:
        reading, sequence = read(reader, document, text, encode, max_read)
        begin = time.perf_counter()
        body = reading.ids[: len(reading.ids) - reading.n_after]
        if len(body) < LEAST_TEXT:
            advice = short_advice(sequence, full, max_loss, methods, left_out)
        else:
            del sequence  # frees it before the next one
            prepare_methods(model, methods.values(), compiling)
            begin = time.perf_counter()
            task = plant(reader, model, body)
            n_answers = 0 if question is None else 2
            advice = try_all(reader, task, full, methods, begin, max_loss, left_out, n_answers)
        advice = replace(advice, is_busy=is_busy or advice.is_busy)
        answers = {} if question is None else answer_all(reader, model, reading.ids, advice)
        seconds = time.perf_counter() - begin
    line = advised_line(options, prefix, reading, question, advice)
    found = as_object(model, reading, advice, answers, line, seconds)
    if as_json:
        write_json(found)
    else:
        print_report(found, advice)


def fit_context(model: Model, document: Document, question: str | None) -> tuple[str, Any]:
    """Returns the beginning of the document that fits the context, and an encoder.

    The encoder returns the prompt's ids for a text, with the question if there is one. Raises
    SparseKVError if the context has no room for a document.
    """
    from sparsekv_cli.models.hparams import room_for
    from sparsekv_cli.planning.reading import fitting_text

    def encode(text: str) -> list[int]:
        prompt = text if question is None else f"{text}\n\n{question}"
        return prompt_ids(model, prompt, None, raw=False, parse_special=False)

    most = model.n_ctx - ROOM
    if most <= len(encode("")):
        raise SparseKVError(
            f"the context of {model.n_ctx} tokens has no room for a document and {ROOM} tokens "
            f"after it: shorten the question, or {room_for(model.hparams, model.n_ctx + 1)}"
        )
    text, ids = fitting_text(document.text, encode, most)
    if len(text) < len(document.text):
        say(
            f"the document does not fit the context of {model.n_ctx} tokens: only the first "
            f"{len(ids)} are read, {share(text, document)} of it"
        )
    return text, encode


def share(text: str, document: Document) -> str:
    """Returns in per cent which part of the document ``text`` is."""
    return f"{100 * len(text) / len(document.text):.3g} %"


def read(
    reader: Reader, document: Document, text: str, encode: Any, max_read: float
) -> tuple[Reading, Tokens]:
    """Reads a document, or as much of a long one as ``max_read`` seconds allow.

    Returns the part that was read, and its sequence.
    """
    from sparsekv_cli.planning.auto import LEAST_TEXT
    from sparsekv_cli.planning.reading import affordable_tokens, fitting_text

    ids = encode(text)
    if len(ids) > LONG and (n_known := reader.on_disk(ids)) < len(ids) - LEAST_TEXT:
        n = affordable_tokens(reader.expected, len(ids), max_read, LEAST_TEXT)
        if n < len(ids):
            n = n_known if n_known > ENOUGH * n else n
            text, ids = fitting_text(text, encode, n)
            say(
                f"only the first {len(ids)} tokens are read, {share(text, document)} of the "
                "document: --max-read SECONDS allows more"
            )
    sequence, seconds, again_s = reader.read_first(ids)
    n_after, is_kept = len(encode("")), reader.keeps_rows and reader.on_disk(ids) > 0
    return Reading(document, text, ids, n_after, seconds, again_s, is_kept), sequence


def advised_line(
    options: ModelOptions,
    prefix: PrefixOptions,
    reading: Reading,
    question: str | None,
    advice: Advice,
) -> str:
    """Returns the command line that the user can type to use the advice."""
    from sparsekv_cli.methods import stated_options

    method = advice.chosen.method
    model = [] if options.model is None else ["-m", options.model]
    rest = ["--method", method.name]
    for key, text in stated_options(method).items():
        rest += ["-o", f"{key}={text}"]
    if method.work_of_a_head:
        rest += ["--sparse-from", "0"]
    machine = "threads", "prefill_dtype", "activations", "repack"
    for name in ("ctx_size", *machine, *READING, *CHANGES):
        if (value := getattr(options.config, name)) != getattr(SessionConfig, name):
            rest += [f"--{name.replace('_', '-')}", str(value)]
    if prefix.directory is not None:
        rest += ["--cache-dir", str(prefix.directory)]
    return command_line(reading.document, reading.text, question, model, rest)
