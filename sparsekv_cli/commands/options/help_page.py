"""The page of ``--help``: options in groups, those that are used most first."""

import re
from collections.abc import Iterator

import click
from click.parser import _OptionParser
from click.parser import _ParsingState as ParsingState

from sparsekv_cli.commands.options.elsewhere import ELSEWHERE
from sparsekv_cli.commands.options.habits import add_aliases, apply_habits, habits_of
from sparsekv_cli.settings.changes import CHANGES

COMMON = "Common options"
OWN = ""  # stands for a command's own parameters, which are in no group
# Title of a group -> names of parameters, in the order of the page.
GROUPS: dict[str, tuple[str, ...]] = {
    COMMON: ("model", "models", "prompt", "file", "n_predict", OWN, "ctx_size", "method", "methods",
             "budget", "temp", "seed", "as_json", "threads", "verbose", "help"),
    "Prompt": ("system", "chat_template", "raw", "parse_special", "think", "drop_thinking",
               "context_shift", "keep"),
    "Answer": ("stop", "ignore_eos", "json_schema", "grammar", "regex"),
    "Output": ("inline_thinking", "special", "logprobs", "jsonl", "output"),
    "Method": ("method_options", "dense_layers", "sparse_from", "cache_type_k", "cache_type_v",
               "calibration"),
    "Longer contexts": (*CHANGES, "prefill_attention", "prefill_budget"),
    "Sampling": ("top_k", "top_p", "min_p", "typ_p", "top_n_sigma", "xtc_probability",
                 "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "repeat_penalty",
                 "repeat_last_n", "presence_penalty", "frequency_penalty", "dry_multiplier",
                 "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
                 "logit_bias", "samplers"),
    "Prompts on disk": ("cache_dir", "cache_limit", "no_cache", "session", "reuse",
                        "reuse_repair"),
    "Device": ("device", "prefill_dtype", "repack", "activations", "kv", "gpu_weights",
               "vram_limit"),
    "Drafts": ("speculate", "draft_model", "draft_method"),
}  # fmt: skip
WIDE = 70  # columns; on a narrower page a third of it is for the names of options
NUMBER = re.compile(r"=?[-+]?[\d.]")  # a value that may follow a short option directly, as in -n128
# bounds that click adds; the help names bounds only where they matter
BOUNDS = re.compile(r"  \[[^\]]*\bx\b[^\]]*\]$")


Records = list[tuple[str, str]]  # (names of an option, its help)


def grouped_options(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, Records]]:
    """Yields (title, options) for each group of a command; one group for a plain command."""
    parameters = {
        "help" if "--help" in each.opts else each.name: each for each in command.get_params(context)
    }
    named = {name for names in GROUPS.values() for name in names}
    own = [each for name, each in parameters.items() if name not in named]
    groups = GROUPS if isinstance(command, GroupedCommand) else {"Options": (OWN, *named)}
    for title, names in groups.items():
        shown = [
            each
            for name in names
            for each in (own if name == OWN else filter(None, [parameters.get(name)]))
        ]
        records = [record for each in shown if (record := each.get_help_record(context))]
        if records:
            yield title, [(names, BOUNDS.sub("", text)) for names, text in records]


class Parser(_OptionParser):
    """A parser that does not take a mistyped option for a short option with a value.

    ``-n128`` still means ``-n 128``. But ``-sysf`` does not mean ``-s`` with the value ysf.
    """

    def _process_opts(self, arg: str, state: ParsingState) -> None:
        name = arg.partition("=")[0]
        if name not in self._long_opt and name not in self._short_opt:
            option = self._short_opt.get(arg[:2])
            kind = option.obj.type if option is not None and option.takes_value else None
            is_number = isinstance(kind, click.types.IntParamType | click.types.FloatParamType)
            if name in ELSEWHERE or (is_number and not NUMBER.match(arg[2:])):
                raise click.NoSuchOption(name, ctx=self.ctx)
        super()._process_opts(arg, state)


class ModelCommand(click.Command):
    """A command with a model. It also accepts the flags of llama.cpp in habits.py."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *(option for _, option in habits_of(self, ctx.info_name))]

    def make_parser(self, ctx: click.Context) -> _OptionParser:
        parser = Parser(ctx)
        for each in self.get_params(ctx):
            each.add_to_parser(parser, ctx)
        add_aliases(self, parser)
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = ctx
            if isinstance(error, click.NoSuchOption) and len(error.option_name) == 2:
                # click names -n if the user typed -np
                name = next((each for each in typed if each.startswith(error.option_name)), None)
                name = (name or error.option_name).partition("=")[0]
                raise click.NoSuchOption(name, ctx=ctx) from None
            if "unexpected extra argument" in error.message:
                how = "give a model with -m MODEL, and a prompt with -p TEXT"
                raise click.UsageError(f"{error.message}: {how}", ctx) from None
            raise
        apply_habits(self, ctx)
        return rest


class GroupedCommand(ModelCommand):
    """A command whose help page shows its options in the groups of ``GROUPS``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = 30 if formatter.width >= WIDE else formatter.width // 3
        for title, records in grouped_options(self, ctx):
            with formatter.section(title):
                formatter.write_dl(records, width)
