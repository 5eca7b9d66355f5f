"""Help pages: options in groups, each once, on pages of any width."""

import re
from importlib import import_module

import click
import pytest

from sparsekv_cli.cli import COMMANDS
from sparsekv_cli.commands.options.help_page import COMMON, GROUPS, OWN, GroupedCommand

LOADED = {name: import_module(module).command for name, (module, _) in COMMANDS.items()}
GROUPED = [name for name, command in LOADED.items() if isinstance(command, GroupedCommand)]


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("width", [60, 100])
def test_every_option_once(name, width):
    context = click.Context(
        LOADED[name], info_name=name, terminal_width=width, help_option_names=["-h", "--help"]
    )
    page = LOADED[name].get_help(context)
    assert all(len(line) <= width for line in page.splitlines() if "[" not in line)
    for option in LOADED[name].get_params(context):
        if getattr(option, "hidden", False):
            assert option.opts[0] not in page.split()
            continue
        lines = re.findall(rf"^  (?:-\S+, )*{re.escape(option.opts[0])}(?=[, \n])", page, re.M)
        assert len(lines) == 1, option.opts
    assert page.index(f"{COMMON}:") < page.index("Method:" if "Method:" in page else "Device:")
    assert not re.search(r"\dx|x>", page)


def test_serve_has_no_option_of_one_request():
    names = {each.name for each in LOADED["serve"].params}
    assert not names & {"session", "json_schema", "grammar", "regex"} and "cache_dir" in names


def test_groups_name_what_there_is():
    known = {each.name for command in LOADED.values() for each in command.params}
    named = [name for names in GROUPS.values() for name in names if name not in (OWN, "help")]
    assert len(named) == len(set(named))
    assert set(named) <= known
    assert GROUPED[:4] == ["run", "chat", "serve", "bench"]
