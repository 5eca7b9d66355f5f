"""What the requests of all protocols have in common: from a JSON object to what it wishes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import chat_template, encode_messages, model_thinking
from sparsekv_cli.generation.fields import SAMPLING, read_sampling
from sparsekv_cli.generation.sampler import SamplingOptions, constraint_maker
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.chat.thinking import switch_of
from sparsekv_cli.serve.jobs import Wish
from sparsekv_cli.serve.scheduler import Scheduler
from sparsekv_cli.serve.tools import HARMONY, ForcedCall, ToolFormat, forced_call, format_of
from sparsekv_cli.session import Session

TOO_LONG = "context_length_exceeded"
BAN = -100  # a bias of OpenAI's protocol that bans a token
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BINS = 256


class RequestError(SparseKVError):
    """A request that is not answered. param: the field, if it is one; code: a word for programs."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class RequestLimits:
    """tokens: of an answer; seconds, body_bytes: of a request."""

    tokens: int
    seconds: float
    body_bytes: int


class Service:
    """One open model and what requests may ask of it.

    method_options, sampling, seed: of requests that have none of their own, as on the command line.
    """

    def __init__(
        self,
        session: Session,
        scheduler: Scheduler,
        limits: RequestLimits,
        method_options: Mapping[str, str],
        sampling: SamplingOptions,
        seed: int | None = None,
    ) -> None:
        self._seed = seed
        self.session, self.scheduler, self.limits = session, scheduler, limits
        self.tokenizer = session.tokenizer
        self.name = session.gguf.path.stem
        self.template = chat_template(session.gguf.metadata)
        self.thinking = model_thinking(session)
        self.can_switch_thinking = switch_of(self.template) is not None
        self.tool_format: ToolFormat | None = format_of(self.template)
        if sampling.think_budget is not None and self.thinking is None:
            raise SparseKVError(
                "--think-budget: the chat template of this model names no markers of thinking"
            )
        self._make_constraint = constraint_maker(session)
        self._method, self._method_options = session.method.name, dict(method_options)
        self._sampling = sampling
        self.kinds = [layer.kind for layer in session.hparams.layers]

    def method_of(self, values: Mapping[str, Any]) -> tuple[Method, int]:
        """The method that a request names with its options, and up to where it is dense.

        RequestError lists what there is.
        """
        name = taken(values, "method", str, self._method)
        given = taken(values, "method_options", dict, {})
        options = {key: _text(f"method_options.{key}", value) for key, value in given.items()}
        if name == self._method:
            options = {**self._method_options, **options}
        if "budget" in values:
            options["budget"] = _text("budget", values["budget"])
        dense_rows = taken(values, "sparse_from", int, self.session.config.sparse_from)
        try:
            method = build_method(name, options)
            method.check_layers(self.kinds)
        except (ValueError, SparseKVError) as error:
            param = "method" if str(error).startswith("unknown method") else "method_options"
            raise RequestError(str(error), param=param) from None
        self._check_calibrated(method)
        if dense_rows < -1:
            raise RequestError(
                f"sparse_from = {dense_rows}: must be 0 or more", param="sparse_from"
            )
        return method, dense_rows

    def _check_calibrated(self, method: Method) -> None:
        """Raises RequestError for a method that measures the model first: others would wait."""
        if method.name != self._method and not self.session.calibrations.has(method):
            raise RequestError(
                f"{method.name} measures the model first, for which other requests would have to "
                f"wait: run 'sparsekv-cli calibrate --method {method.name}' with this model once, "
                f"or start the server with --prepare {method.name}",
                param="method",
            )

    def format_for(self, has_tools: bool) -> ToolFormat | None:
        """The format for which an answer is read; gpt-oss writes on channels without tools, too."""
        kind = self.tool_format
        return kind if has_tools or kind == HARMONY else None

    def wish(
        self,
        ids: Sequence[int],
        values: Mapping[str, Any],
        *,
        max_tokens: int | None,
        stops: Sequence[str],
        sampling: Mapping[str, Any],
        logprobs: int | None = None,
        kind: ToolFormat | None = None,
        forced: ForcedCall | None = None,
        thinks: bool = True,
        think: bool | None = None,
    ) -> Wish:
        """What to ask of the scheduler. sampling: fields beside those of ``values``, by our names.

        max_tokens: None: as many as the server allows. kind: of ``format_for``. forced: what the
        answer has to be, of ``forced_call``. thinks: something may be thought ahead of the answer.
        think: whether the model is to do so; None: as the template has it.
        """
        thinking = self.thinking if thinks and forced is None else None
        if forced is not None:
            ids = [*ids, *self._ids_ahead_of(forced, ids)]
        n_ctx = self.session.n_ctx
        if len(ids) >= n_ctx:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and the context of this server holds {n_ctx}, "
                "the answer among them: shorten the prompt",
                param="messages" if "messages" in values else "prompt",
                code=TOO_LONG,
            )
        method, dense_rows = self.method_of(values)
        options = self._sampling_of({**values, **sampling})
        if forced is not None:
            options = replace(options, grammar=_grammar_of(forced, options))
        if thinking is None:
            if values.get("think_budget") is not None:
                raise RequestError(
                    "think_budget: nothing is thought ahead of this answer: leave it out",
                    param="think_budget",
                )
            options = replace(options, think_budget=None)
        try:
            constraint = self._make_constraint(options, thinking, think)
        except SparseKVError as error:
            param = "response_format"
            raise RequestError(str(error).removeprefix("--"), param=param) from None
        n_predict = self.limits.tokens if max_tokens is None else max_tokens
        seed = taken(values, "seed", int, self._seed)
        return Wish(
            ids=ids,
            method=method,
            dense_rows=dense_rows,
            n_predict=min(n_predict, self.limits.tokens, n_ctx - len(ids)),
            sampling=options,
            seed=None if seed is None else seed % 2**63,
            stops=stops,
            logprobs=logprobs,
            constraint=constraint,
            special=kind is not None and kind.special and forced is None,
            thinking=None if kind == HARMONY else thinking,
            n_bins=in_range(values, "sparsekv_rows", 0, MAX_BINS, 0),
        )

    def _ids_ahead_of(self, forced: ForcedCall, ids: Sequence[int]) -> list[int]:
        """What follows a prompt whose answer has to be a call: no thinking, and its first words."""
        thinking = self.thinking
        is_open = thinking is not None and thinking.opened_by(self.tokenizer, ids)
        text = (thinking.closing(b"") if thinking and is_open else "") + forced.prompt
        return self.tokenizer.encode(text, add_bos=False, add_eos=False, parse_special=True)

    def forced_call(self, name: str | None, functions: Mapping[str, Any]) -> ForcedCall:
        """The call that a request's ``tool_choice`` asks for, of the function ``name`` or of any.

        functions: the schemas of their arguments. RequestError where there is no such function.
        """
        chosen = {key: schema for key, schema in functions.items() if name in (None, key)}
        if not chosen:
            what = f"no tool {name!r}" if name is not None else "no tools"
            raise RequestError(
                f"tool_choice asks for a call, but the request has {what}", param="tool_choice"
            )
        return forced_call(self.tool_format, self.template, chosen)

    def _sampling_of(self, values: Mapping[str, Any]) -> SamplingOptions:
        named = {**SAMPLING_NAMES, **{name: name for name in SAMPLING}}
        fields = {named[key]: value for key, value in values.items() if key in named}
        fields = {key: value for key, value in fields.items() if value is not None}
        for key in ("json_schema", "grammar", "regex", "ignore_eos", "think_budget"):
            if values.get(key) is not None:
                fields[key] = values[key]
        bias = fields.get("logit_bias")
        try:
            options = read_sampling(fields, self._sampling)
            if bias:
                banned = {
                    token: -math.inf if value <= BAN else value
                    for token, value in options.explicit["logit_bias"].items()
                }
                options = replace(options, explicit={**options.explicit, "logit_bias": banned})
        except SparseKVError as error:
            raise RequestError(str(error).removeprefix("--")) from None
        return options

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        think: bool | None,
        *,
        continues: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a conversation; RequestError where the template does not take it."""
        if self.tool_format == HARMONY:
            messages = [_on_channels(message) for message in messages]
        try:
            return encode_messages(
                self.tokenizer,
                self.template,
                messages,
                tools=tools or None,
                think=think,
                continues=continues,
                add_generation_prompt=add_generation_prompt,
            )
        except SparseKVError as error:
            raise RequestError(str(error), param="messages") from None

    def choices(self, wish: Wish, n: int) -> list[Wish]:
        """The wish n times, each with a seed of its own."""
        seeds = [None if wish.seed is None else wish.seed + i for i in range(n)]
        constraints = [wish.constraint] + [
            wish.constraint and wish.constraint.copy() for _ in range(n - 1)
        ]
        pairs = zip(seeds, constraints, strict=True)
        return [replace(wish, seed=seed, constraint=each) for seed, each in pairs]


def _on_channels(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as gpt-oss' template takes it: one text is thought ahead of a call."""
    thought, text = message.get("reasoning_content"), message["content"]
    if not thought:
        return message
    if text and message.get("tool_calls"):
        return {**message, "content": f"{thought}\n\n{text}"}
    return {**message, "thinking": thought}


def _grammar_of(forced: ForcedCall, options: SamplingOptions) -> Any:
    from sparsekv_cli.sampling.grammar import read_grammar

    if options.grammar is not None or options.ignore_eos:
        raise RequestError(
            "tool_choice asks for a call: leave out ignore_eos, grammar, regex and response_format",
            param="tool_choice",
        )
    try:
        return read_grammar("tool_choice", forced.lark)
    except SparseKVError as error:
        raise RequestError(str(error).removeprefix("--"), param="tools") from None


SAMPLING_NAMES = {"temperature": "temp", "repetition_penalty": "repeat_penalty"}


def taken(values: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """A field of a type, or the default where it is missing or null; RequestError otherwise."""
    value = values.get(key)
    if value is None:
        return default
    is_bool = isinstance(value, bool)
    fits = isinstance(value, kind) and (kind is bool or not is_bool)
    if kind is float:
        fits = isinstance(value, int | float) and not is_bool
    if not fits:
        raise RequestError(f"{key} is {shown(value)}: expected {WORDS[kind]}", param=key)
    return value


WORDS = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false",
    dict: "an object", list: "a list",
}  # fmt: skip


def in_range(values: Mapping[str, Any], key: str, low: int, high: int, default: Any) -> Any:
    """A whole number of a field, or the default."""
    value = taken(values, key, int, None)
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"{key} = {value}: expected {low} to {high}", param=key)
    return value


def content_text(where: str, content: Any) -> str:
    """A message's text: itself, or its parts of type text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise RequestError(
        f"{where}.content: expected a text, or a list of parts of type text", param=where
    )


def texts(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A text or a list of texts, none of them empty."""
    value = values.get(key)
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if (
        not isinstance(given, list)
        or len(given) > MAX_STOPS
        or not all(isinstance(each, str) and each for each in given)
    ):
        raise RequestError(
            f"{key} is {shown(value)}: expected a text or up to {MAX_STOPS} texts, none empty",
            param=key,
        )
    return tuple(given)


def _text(key: str, value: Any) -> str:
    """The value of a method's option as the command line would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and all(isinstance(each, int) for each in value):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, str | int | float):
        return str(value)
    raise RequestError(f"{key} is {shown(value)}: expected a text or a number", param=key)


def shown(value: Any) -> str:
    """A value in an error message."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."
