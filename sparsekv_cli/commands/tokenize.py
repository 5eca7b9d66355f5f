"""``tokenize``: shows the token ids of a text, as the model gets them."""

import json
import sys
from pathlib import Path

import click

from sparsekv_cli.commands.options.help_page import ModelCommand
from sparsekv_cli.commands.options.model import MODEL_OPTION, find_model
from sparsekv_cli.commands.options.prompt import file_option
from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.prompt import check_utf8, decode_file, read_stdin
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import write_text


@click.command("tokenize", cls=ModelCommand)
@click.argument("text", required=False, metavar="[TEXT]")
@MODEL_OPTION
@click.option("-p", "--prompt", metavar="TEXT", help="The text.")
@file_option("File with the text, or a PDF or Word file; - is stdin. A byte order mark is dropped.")
@click.option("--ids", "ids_only", is_flag=True, help="Print a list of ids: [1, 2].")
@click.option("--json", "as_json", is_flag=True, help='Print {"ids": [...], "tokens": [...]}.')
@click.option("--no-bos", is_flag=True, help="Do not add BOS or EOS, even if the model wants them.")
@click.option(
    "--no-parse-special", is_flag=True,
    help="Read special tokens in the text, such as <|im_end|>, as plain text.",
)  # fmt: skip
@verbose_option
def command(
    text: str | None,
    model: str | None,
    prompt: str | None,
    file: str | None,
    ids_only: bool,
    as_json: bool,
    no_bos: bool,
    no_parse_special: bool,
) -> None:
    """Turn text into token ids, one line a token.

    The text is TEXT, -p TEXT, a file, or the text that is piped to stdin. It is not changed, but a
    byte order mark at its start is dropped. A file with a vocabulary and no weights is enough as a
    model.
    """
    if len([source for source in (text, prompt, file) if source is not None]) > 1:
        raise click.UsageError("the text is given more than once: use TEXT, -p or -f")
    if ids_only and as_json:
        raise click.UsageError("--ids and --json exclude each other")
    path = find_model(model)
    source = read_text(text if text is not None else prompt, file)

    from sparsekv_cli.models.gguf.file import open_gguf
    from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

    with open_gguf(path, vocab_only_ok=True) as gguf:
        tokenizer = load_tokenizer(gguf.metadata)
    ids = tokenizer.encode(
        source, add_bos=False if no_bos else None, parse_special=not no_parse_special
    )
    if ids_only:
        write_text(f"{ids}\n")
        return
    pieces = [tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in ids]
    if as_json:
        write_text(json.dumps({"ids": ids, "tokens": pieces}, ensure_ascii=False) + "\n")
    elif sys.stdout.isatty():
        rows = [(i, repr(piece)) for i, piece in zip(ids, pieces, strict=True)]
        print_table(f"{len(ids)} tokens", ("id", "text"), rows)
    else:  # the lines of llama-tokenize
        write_text("".join(f"{i:6d} -> '{piece}'\n" for i, piece in zip(ids, pieces, strict=True)))


def read_text(text: str | None, file: str | None) -> str:
    """Returns the text to tokenize, from the command line, a file or stdin.

    Raises SparseKVError for text that is not UTF-8, OSError for a file that cannot be read.
    """
    if text is not None:
        return check_utf8(text, "the text")
    if file is None and sys.stdin.isatty():
        raise click.UsageError("no text: give TEXT, -p TEXT, -f FILE, or pipe it to stdin")
    if file is None or file == "-":
        name, data = "stdin", read_stdin()
    else:
        name, data = file, Path(file).read_bytes()
    return decode_file(data, name)
