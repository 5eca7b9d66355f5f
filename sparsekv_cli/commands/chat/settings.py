"""``/set`` in ``chat``: the settings of a conversation that the user can change."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsekv_cli.commands.chat.conversation import Conversation
from sparsekv_cli.commands.options.sampling import NUMBERS
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import thinking_switch
from sparsekv_cli.sampling.params import (
    MAX_SEED,
    SAMPLER_ORDER,
    SamplingParams,
    params_from_metadata,
)
from sparsekv_cli.settings.changes import CHANGES, ModelChanges
from sparsekv_cli.settings.option import (
    TRUTH,
    allowed_values,
    did_you_mean,
    options_of,
    parse_number_or_word,
)

DEFAULT = "default"
SWITCH_WORDS = {"on": True, "off": False, **TRUTH}


@dataclass(frozen=True)
class Setting:
    """One setting that ``/set`` shows and changes."""

    help: str
    show: Callable[[Conversation], str]  # returns the value as text
    # Sets the value that the text names. Raises ValueError or SparseKVError for a bad text.
    change: Callable[[Conversation, str], None]
    values: Sequence[str] = ()  # words that are possible values, for completion


def show_settings(conversation: Conversation) -> str:
    """Returns all settings, one a line."""
    width = max(map(len, SETTINGS))
    return "\n".join(f"{name:<{width}}  {one.show(conversation)}" for name, one in SETTINGS.items())


def change_setting(conversation: Conversation, text: str) -> str:
    """Sets what ``NAME VALUE`` names. Returns a line with the new value.

    Raises SparseKVError if that is impossible.
    """
    name, _, value = text.partition(" ")
    name = name.replace("-", "_")
    if name not in SETTINGS:
        close = did_you_mean(name, SETTINGS)
        raise SparseKVError(f"/set {name}: no such setting{close}; known: {', '.join(SETTINGS)}")
    if value.strip():
        try:
            SETTINGS[name].change(conversation, value.strip())
        except ValueError as error:
            raise SparseKVError(f"/set {error}") from None
    return f"{name} {SETTINGS[name].show(conversation)}"


def _whole(name: str, text: str, least: int, most: int | None = None) -> int:
    """Returns ``text`` as a whole number. Raises ValueError for others and outside the bounds."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} = {text!r}: must be a whole number {bounds}")
    return value


def _switch(name: str, text: str) -> bool:
    if text.lower() not in SWITCH_WORDS:
        raise ValueError(f"{name} = {text!r}: must be on or off")
    return SWITCH_WORDS[text.lower()]


def _texts(name: str, text: str) -> tuple[str, ...]:
    """Returns the texts in ``text``: a plain text, a JSON text, or a JSON list of texts."""
    values: Any = text
    if text[0] in '["':
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"{name} = {text!r}: must be valid JSON") from None
    values = [values] if isinstance(values, str) else values
    if not all(isinstance(value, str) and value for value in values):
        raise ValueError(f'{name} = {text!r}: must be non-empty texts, as in ["a"]')
    return tuple(values)


def _params(conversation: Conversation) -> SamplingParams:
    settings = conversation.settings
    return params_from_metadata(conversation.model.gguf.metadata, settings.sampling.explicit)


def _change_sampling(conversation: Conversation, name: str, value: Any) -> None:
    """Sets a field of SamplingParams to ``value``; None sets its default."""
    settings = conversation.settings
    explicit = {key: old for key, old in settings.sampling.explicit.items() if key != name}
    if value is not None:
        explicit[name] = value
        SamplingParams(**explicit)
    settings.sampling = replace(settings.sampling, explicit=explicit)
    conversation.renew_sampler()


def _number(name: str) -> Setting:
    """Returns the setting for a number of SamplingParams."""

    def change(conversation: Conversation, text: str) -> None:
        value = None if text == DEFAULT else parse_number_or_word(NUMBERS[name], text)
        _change_sampling(conversation, name, value)

    help = NUMBERS[name].metadata["help"]
    return Setting(help, lambda c: f"{getattr(_params(c), name):g}", change, (DEFAULT,))


def _change_samplers(conversation: Conversation, text: str) -> None:
    names = tuple(each.strip() for each in text.split(";") if each.strip())
    _change_sampling(conversation, "samplers", None if text == DEFAULT else names)


def _change_seed(conversation: Conversation, text: str) -> None:
    seed = _whole("seed", text, -1, MAX_SEED)
    conversation.settings.seed = None if seed == -1 else seed
    conversation.renew_sampler()


def _changing(name: str, parse: Callable[[str, str], Any]) -> Callable[[Conversation, str], None]:
    """Returns a function that parses a text and sets a field of ChatSettings."""

    def change(conversation: Conversation, text: str) -> None:
        setattr(conversation.settings, name, parse(name, text))
        conversation.replace(conversation.messages)

    return change


def _switched(name: str, help: str) -> Setting:
    """Returns the setting for a field of ChatSettings that is on or off."""

    def show(conversation: Conversation) -> str:
        return "on" if getattr(conversation.settings, name) else "off"

    return Setting(help, show, _changing(name, _switch), ("on", "off"))


def _change_think(conversation: Conversation, text: str) -> None:
    think = None if text == DEFAULT else _switch("think", text)
    thinking_switch(conversation.template, think)
    _changing("think", lambda _name, _text: think)(conversation, text)
    conversation.renew_sampler()


def _change_think_budget(conversation: Conversation, text: str) -> None:
    settings, before = conversation.settings, conversation.settings.sampling
    budget = None if text == DEFAULT else _whole("think_budget", text, 0)
    settings.sampling = replace(before, think_budget=budget)
    try:
        conversation.renew_sampler()
    except SparseKVError:
        settings.sampling = before
        raise


def _change_context(conversation: Conversation, text: str) -> None:
    model, sequence = conversation.model, conversation.sequence
    n = _whole("ctx", text, 0) or model.hparams.n_ctx_train
    if not model.engine.shares_prefill:
        raise SparseKVError("/set ctx: a GPU's context cannot change: start again with -c N")
    if n > max(model.hparams.n_ctx_fit, sequence.n_ctx):
        raise SparseKVError(
            f"/set ctx {n}: the model was trained for {model.hparams.n_ctx_fit} tokens; /set "
            f"rope_scale N stretches them, or start again with -c {n} to go beyond them"
        )
    n_short = model.hparams.rope.n_ctx_original
    if "rope_factors_long.weight" in model.gguf.tensors and (n > n_short) != (
        sequence.n_ctx > n_short
    ):
        raise SparseKVError(
            f"/set ctx {n}: this model (LongRoPE) computes differently beyond {n_short} tokens; "
            f"start again with -c {n}"
        )
    if n <= conversation.n_used:
        raise SparseKVError(
            f"/set ctx {n}: the conversation has {conversation.n_used} tokens: set a larger "
            "number, or /clear it first"
        )
    if n < len(sequence.tokens):
        sequence.reset()
    sequence.n_ctx = n


def _change_of_model(name: str) -> Setting:
    """Returns the setting for a field of ModelChanges. A change opens the model again."""
    declared = options_of(ModelChanges)[name]

    def change(conversation: Conversation, text: str) -> None:
        model = conversation.model
        if not model.engine.shares_prefill:
            flag = "--" + name.replace("_", "-")
            raise SparseKVError(f"/set {name}: the model is on a GPU: start again with {flag}")
        value: Any = declared.default
        if text != DEFAULT:
            value = parse_number_or_word(declared, text)
        config = replace(model.config, **{name: value})
        if config != model.config:
            conversation.reopen(config)

    def show(conversation: Conversation) -> str:
        value = getattr(conversation.model.config, name)
        return f"{value:g}" if isinstance(value, float) else str(value)

    choices = allowed_values(declared).choices
    return Setting(declared.metadata["help"], show, change, (*choices, DEFAULT))


SETTINGS: dict[str, Setting] = {
    **{name: _number(name) for name in NUMBERS},
    "samplers": Setting(
        "the chain, separated by semicolons",
        lambda c: ";".join(_params(c).samplers),
        _change_samplers,
        (DEFAULT, *SAMPLER_ORDER),
    ),
    "seed": Setting(
        "seed of every answer; -1: a random one",
        lambda c: "-1" if c.settings.seed is None else str(c.settings.seed),
        _change_seed,
    ),
    "n_predict": Setting(
        "most tokens of an answer; -1: until it ends",
        lambda c: str(c.settings.n_predict),
        _changing("n_predict", lambda name, text: _whole(name, text, -1)),
    ),
    "stop": Setting(
        'texts that end an answer: one, or a JSON list such as ["a", "\\n"]',
        lambda c: json.dumps(c.settings.stop, ensure_ascii=False),
        _changing("stop", _texts),
        ("[]",),
    ),
    "parse_special": _switched("parse_special", "control tokens in messages are parsed"),
    "think": Setting(
        "whether the model thinks first",
        lambda c: {None: DEFAULT, True: "on", False: "off"}[c.settings.think],
        _change_think,
        ("on", "off", DEFAULT),
    ),
    "think_budget": Setting(
        "most tokens of thinking before an answer",
        lambda c: DEFAULT if (n := c.settings.sampling.think_budget) is None else str(n),
        _change_think_budget,
        (DEFAULT,),
    ),
    "drop_thinking": _switched("drop_thinking", "later prompts leave the thinking out"),
    "ctx": Setting(
        "most tokens of the context; 0: the model's",
        lambda c: str(c.sequence.n_ctx),
        _change_context,
    ),
    "context_shift": _switched("context_shift", "a full context drops the oldest turns"),
    "keep": Setting(
        "turns that begin within so many tokens stay then",
        lambda c: str(c.settings.keep),
        _changing("keep", lambda name, text: _whole(name, text, 0)),
    ),
    **{name: _change_of_model(name) for name in CHANGES},
}
