"""``sparsekv-cli methods``: the KV-cache methods, their papers, options and needs."""

from collections.abc import Mapping
from typing import Any

import click

from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.tables import print_pairs, print_table
from sparsekv_cli.commands.shared.terminal import write_json, write_text
from sparsekv_cli.settings.option import Allowed, did_you_mean


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=completers.methods)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@verbose_option
def command(names: tuple[str, ...], as_json: bool) -> None:
    """List the KV-cache methods (or those named), their options and their defaults."""
    from sparsekv_cli.methods import describe_methods

    methods = describe_methods()
    known = [method["name"] for method in methods]
    for name in names:
        if name not in known:
            close, listed = did_you_mean(name, known), ", ".join(known)
            raise click.UsageError(f"no method {name!r}{close}; the methods are {listed}")
    chosen = [method for method in methods if not names or method["name"] in names]
    if as_json:
        write_json(chosen)
    elif names:
        for method in chosen:
            show(method)
    else:
        keys = ("name", "use", "summary", "paper")
        rows = [tuple(method[key] for key in keys) for method in methods]
        print_table("", ("method", "use for", "what a step attends to", "paper"), rows)
        write_text(HINT)


# Options that every method has and that have a flag of their own. They are shown only once.
SHARED = ("dense_layers", "cache_type_k", "cache_type_v")
HINT = """
At a depth of a few thousand tokens take full: other methods gain little there.
'sparsekv-cli methods NAME' shows a method's options.
All take --dense-layers, --cache-type-k and --cache-type-v.
"""


def show(method: Mapping[str, Any]) -> None:
    """Prints a method and its own options, then its defaults of options that all methods have."""
    options = {option["name"]: option for option in method["options"]}
    rows = [
        ("summary", method["summary"]),
        ("paper", method["paper"]),
        ("use for", method["use"]),
        ("needs", method["needs"] or None),
    ]
    print_pairs(method["name"], rows)
    own = [
        (f"-o {name}={_words(option['default'])}", option["allowed"], option["help"])
        for name, option in options.items()
        if name not in SHARED
    ]
    if own:
        print_table("options", ("default", "values", "meaning"), own)
    layers, k, v = (_words(options[name]["default"]) for name in SHARED)
    types = Allowed(tuple(method["cache_types"]))
    shared = [
        ("--dense-layers", layers, options["dense_layers"]["help"]),
        ("--cache-type-k", k, f"type of K in the cache: {types}"),
        ("--cache-type-v", v, f"type of V: {types}"),
    ]
    print_table("as every method", ("option", "default", "meaning"), shared)


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
