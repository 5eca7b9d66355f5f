"""``sparsekv-cli methods``: the KV-cache methods, their papers, options and needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from sparsekv_cli.commands.options import verbose_option
from sparsekv_cli.commands.terminal import write_text
from sparsekv_cli.option import did_you_mean


@click.command(short_help="List the KV-cache methods and their options.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
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
        write_text(json.dumps(chosen, indent=2) + "\n")
    else:
        write_text("\n\n".join(describe(method) for method in chosen) + "\n")


def describe(method: Mapping[str, Any]) -> str:
    """A method as a paragraph: what it is, then an option a line."""
    lines = [f"{method['name']}: {method['summary']}"]
    if method["paper"]:
        lines.append(f"  paper: {method['paper']}")
    if method["needs"]:
        lines.append(f"  needs: {_words(method['needs'])}")
    options = method["options"]
    heads = [f"-o {o['name']}={_words(o['default'])}" for o in options]
    width = max((len(head) for head in heads), default=0)
    for head, option in zip(heads, options, strict=True):
        kind = f"{option['type']}: {option['allowed']}" if option["allowed"] else option["type"]
        lines.append(f"  {head:<{width}}  {option['help']} ({kind})")
    return "\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return "" if value is None else str(value)
