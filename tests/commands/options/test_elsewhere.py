"""Options that are not here: a line that helps, never a value of another option."""

import click
import pytest
from test_habits import command_of

from sparsekv_cli.commands.options.elsewhere import ELSEWHERE, unknown_option
from sparsekv_cli.commands.options.habits import ALIASES, HABITS

WITH_MODEL = [
    *("run", "chat", "serve", "bench", "compare", "eval perplexity", "eval kld", "eval ruler"),
    *("advise", "plan", "calibrate", "inspect", "tokenize", "warmup"),
]


def names_of(name: str) -> set[str]:
    taken = {each for parameter in command_of(name).params for each in parameter.opts}
    aliases = (set(ALIASES.get(each.name or "", ())) for each in command_of(name).params)
    return taken.union(*aliases, *(habit.names for habit in HABITS))


@pytest.mark.parametrize("name", WITH_MODEL)
def test_each_of_them_is_named(name, pytestconfig):
    """Also where its first letter is a short option with a value.

    Without ``--all``, a fourth of them for each command; another for the next command.
    """
    options = sorted(ELSEWHERE.keys() - names_of(name))
    part = slice(WITH_MODEL.index(name) % 4, None, 4)
    for option in options if pytestconfig.getoption("--all") else options[part]:
        for arguments in ([option], [option, "1"], [f"{option}=1"]):
            with pytest.raises(click.NoSuchOption) as caught:
                command_of(name).make_context(name, arguments)
            assert caught.value.option_name == option, arguments


def test_advice_names_what_exists():
    """No entry advises an option that no command has."""
    known = set().union(*map(names_of, WITH_MODEL))
    for text in set(ELSEWHERE.values()):
        words = (word.strip(",.:;()'`").partition("=")[0] for word in text.split())
        options = {word for word in words if word.startswith("-") and len(word) > 1}
        assert options <= known | {"--help", "-v", "--ray", "-O", "-r"}, text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run --lora x", "No option --lora here: adapters (LoRA)"),
        ("chat --mmproj x", "No option --mmproj here: pictures"),
        ("serve --embeddings", "No option --embeddings here: embeddings"),
        ("run -sysf x", "No option -sysf here: use -sys"),
        ("run -ot x=CPU", "No option -ot here"),
        ("run -lv 1", "No option -lv here: there is no log"),
        ("run --max-tokens 5", "No option --max-tokens here: use -n N"),
        ("run -sabc", "No such option '-sabc'."),
        ("run -tmany", "No such option '-tmany'."),
        ("run --temperatur 1", "No such option '--temperatur' (did you mean --temperature?)."),
        ("run --purple 1", "No such option '--purple'."),
        ("models --jsn", "No such option '--jsn' (did you mean --json?)."),
        ("run -n abc", "'abc': expected a whole number, -1 or more"),
        ("run -n 1.5", "'1.5': expected a whole number, -1 or more"),
        ("run --parallel 0", "'0': expected a whole number, 1 to 256"),
        ("run --temp warm", "'warm': expected a number"),
        ("run --top-k x", "'x': expected a whole number"),
        ("run --max-loss nan", "'nan': expected a number, 0 or more"),
        ("bench -o json", "expected KEY=VALUE (bench's format is -O)"),
    ],
)
def test_the_line(line, words, invoke):
    result = invoke(*line.split())
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1
    for absurd in ("--color", "--prio", "--special", "integer range"):
        assert absurd not in result.err


def test_glued_numbers_are_values():
    values = command_of("run").make_context("run", ["-n128", "-t2", "-s-1", "-c4096"]).params
    assert values["n_predict"] == 128 and values["threads"] == 2 and values["ctx_size"] == 4096


def test_a_short_name_is_not_guessed():
    assert unknown_option("-x", ["-p", "-m"]) == "No such option '-x'."
