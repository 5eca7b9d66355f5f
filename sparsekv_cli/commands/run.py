"""``sparsekv-cli run``: one completion, made for pipelines: text (or one JSON object) on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.answer import (
    STOP_INTERRUPT,
    Answer,
    PrefillInterrupted,
    ledger_line,
    speed,
    stream_answer,
    timing_line,
)
from sparsekv_cli.commands.options import Invocation, ModelOptions, model_options, open_session
from sparsekv_cli.commands.prompt import (
    chat_template,
    check_utf8,
    encode_messages,
    messages_of,
    parse_special_option,
    read_prompt,
)
from sparsekv_cli.commands.sampling_options import (
    SamplingOptions,
    new_constraint,
    new_sampler,
    sampling_options,
    stop_option,
)
from sparsekv_cli.commands.terminal import say, write_text
from sparsekv_cli.errors import SparseKVError

if TYPE_CHECKING:
    from sparsekv_cli.session import Session


@click.command(short_help="Complete one prompt; made for pipelines.")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; after a piped text, if any.")
@click.option("-f", "--file", metavar="FILE", help="Read the prompt from FILE; - is stdin.")
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="System message.")
@click.option(
    "--raw",
    is_flag=True,
    help="Give the prompt as it is: no chat template, and control tokens in it such as <|im_end|> "
    "are parsed, as llama.cpp does it. So it is with a model that has no template.",
)
@parse_special_option
@click.option(
    "-n",
    "--n-predict",
    metavar="N",
    type=click.IntRange(min=-1),
    default=-1,
    help="Most tokens to generate; -1: until the answer ends or the context is full. [default: -1]",
)
@stop_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@model_options()
@sampling_options
@click.pass_context
def command(
    context: click.Context,
    options: ModelOptions,
    sampling: SamplingOptions,
    prompt: str | None,
    file: str | None,
    system: str | None,
    raw: bool,
    parse_special: bool,
    n_predict: int,
    stop: tuple[str, ...],
    as_json: bool,
) -> None:
    """Complete one prompt and print the text.

    The prompt is -p TEXT, -f FILE or what is piped to stdin; a piped text and -p give the text, a
    blank line, then TEXT. The model's chat template is applied unless --raw is given. The text goes
    to stdout, everything else to stderr.
    """
    if raw and system is not None:
        raise click.UsageError("-sys needs the chat template, which --raw switches off", context)
    text = read_prompt(prompt, file)
    if system is not None:
        system = check_utf8(system, "the system message given with -sys")
    session = open_session(options)
    ids = _prompt_ids(session, text, system, raw, parse_special)
    constraint = new_constraint(session, sampling.grammar)
    sampler = new_sampler(session, sampling, options.seed, constraint)
    write = _ignore if as_json else write_text
    try:
        answer = stream_answer(session, ids, sampler, n_predict, stop, write, constraint)
    except PrefillInterrupted:
        answer = Answer("", [], STOP_INTERRUPT)
    if as_json:
        click.echo(json.dumps(result(session, ids, answer, options.method)))
    else:
        if sys.stdout.isatty() and not answer.text.endswith("\n"):
            write_text("\n")
        say(timing_line(session))
        if context.ensure_object(Invocation).verbose:
            say(ledger_line(session, options.method))
    if answer.stop_reason == STOP_INTERRUPT:
        raise KeyboardInterrupt


def _ignore(_text: str) -> None:
    """The writer of ``--json``: the text is part of the object."""


def _prompt_ids(
    session: Session, text: str, system: str | None, raw: bool, parse_special: bool
) -> list[int]:
    template = chat_template(session.gguf.metadata)
    if raw or template is None:
        if system is not None:
            raise SparseKVError(
                "this model has no chat template, so there is no place for a system message: "
                "leave out -sys and put it into the prompt"
            )
        return session.tokenizer.encode(text, add_eos=False, parse_special=True)
    messages = messages_of(system, text)
    return encode_messages(session.tokenizer, template, messages, parse_special=parse_special)


def result(session: Session, ids: list[int], answer: Answer, method: str) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    timings = session.timings
    return {
        "text": answer.text,
        "prompt_tokens": len(ids),
        "generated_tokens": len(answer.tokens),
        "tokens": [int(token) for token in answer.tokens],
        "stop_reason": answer.stop_reason,
        "timings": {
            "load_s": timings.load_s,
            "prefill_s": timings.prefill_s,
            "prefill_tps": speed(timings.prefill_tokens, timings.prefill_s),
            "decode_s": timings.decode_s,
            "decode_tps": speed(timings.decode_tokens, timings.decode_s),
        },
        "method": {
            "name": method,
            "options": session.method_options(),
            "sparse_from": session.sparse_from,
        },
        "ledger": session.ledger.as_dict(),
    }
