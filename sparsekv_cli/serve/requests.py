"""The way from a JSON object to a Request, which the requests of all protocols share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.generation.conversation import chat_template, encode_messages, model_thinking
from sparsekv_cli.generation.fields import path_of
from sparsekv_cli.generation.grammar_trial import GrammarTrial
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.methods import build_method, usable_methods
from sparsekv_cli.methods.base import Method
from sparsekv_cli.model import Model
from sparsekv_cli.models.chat.thinking import switch_of, variables_of
from sparsekv_cli.models.tokenizer.infill import infill_ids
from sparsekv_cli.models.tokenizer.marks import SPELLED, Marks, marks_of
from sparsekv_cli.sampling.grammar import Grammar
from sparsekv_cli.sampling.params import MAX_SEED, params_from_metadata
from sparsekv_cli.serve.forms.schema import CompletionFields, CountFields, ServedFields
from sparsekv_cli.serve.forms.tools import (
    HARMONY,
    LLAMA3,
    ForcedCall,
    ToolFormat,
    forced_call,
    format_of,
)
from sparsekv_cli.serve.forms.volatile import HEADERS, VolatileHeaders
from sparsekv_cli.serve.jobs import ContextFullError, Request
from sparsekv_cli.serve.scheduler import Scheduler
from sparsekv_cli.settings.option import options_of

FORMAT, KWARGS = "response_format", "chat_template_kwargs"
EFFORT = "reasoning_effort"  # a variable of chat templates, too


class RequestError(SparseKVError):
    """A request that is not answered. param: the wrong field, if any; code: a word for programs."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request."""

    tokens: int  # of an answer
    seconds: float  # of a request
    body_bytes: int  # of a request


class Service:
    """One open model and the settings of its requests.

    method_options, sampling, seed: the defaults of requests, as on the command line.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        limits: RequestLimits,
        method_options: Mapping[str, str],
        sampling: SamplingOptions,
        seed: int | None = None,
        name: str = "",
        volatile: Sequence[str] = HEADERS,
    ) -> None:
        """name: in responses; empty: that of the model's file. volatile: see VolatileHeaders."""
        self.model, self.tokenizer, self._seed = model, model.tokenizer, seed
        self.scheduler, self.limits = scheduler, limits
        self.volatile = VolatileHeaders(volatile, scheduler.stats.volatile_lines)
        self.name = name or model.gguf.path.stem
        self.template = chat_template(model.gguf)
        self.thinking = model_thinking(model)
        self.thinking_switch = switch_of(self.template)
        self.variables = variables_of(self.template)
        self.tool_format: ToolFormat | None = format_of(self.template)
        self.marks: Marks = SPELLED  # of the format
        if self.tool_format is not None:
            self.marks = marks_of(self.tokenizer, self.tool_format.marks)
        # The tokens of calls. gpt-oss needs them in all answers, and Llama 3 calls without them.
        marks = {} if self.tool_format in (HARMONY, LLAMA3) else self.marks.ids or {}
        self._call_tokens = tuple(marks.values())
        if sampling.think_budget is not None and self.thinking is None:
            raise SparseKVError(
                "--think-budget: the chat template of this model has no markers of thinking"
            )
        self.grammars = GrammarTrial(model.gguf.path)
        self._method, self._method_options = model.method.name, dict(method_options)
        self._sampling = sampling
        self.layers = model.hparams.layers

    def method_of(self, fields: ServedFields) -> tuple[Method, int]:
        """Returns the method of a request with its options, and the depth up to which it is dense.

        Raises RequestError, which lists the methods.
        """
        name = self._method if fields.method is None else fields.method
        options = dict(fields.method_options)
        if name == self._method:
            options = {**self._method_options, **options}
        if fields.budget is not None:
            options["budget"] = fields.budget
        model = self.model
        default = model.sparse_from if name == self._method else model.config.sparse_from
        sparse_from = default if fields.sparse_from is None else fields.sparse_from
        try:
            method = build_method(name, options)
            method.check_layers(self.layers)
        except (ValueError, SparseKVError) as error:
            param = "method" if str(error).startswith("unknown method") else "method_options"
            raise RequestError(str(error), param=param) from None
        self._check_sizes(method, fields.method_options)
        self._check_calibrated(method)
        return method, sparse_from

    def _check_sizes(self, method: Method, names: Iterable[str]) -> None:
        """Raises RequestError for an option above the context: some take memory for each row."""
        declared = options_of(method)
        for name in names:
            name = method.renamed.get(name, name)
            value = getattr(method, name, None)
            if isinstance(value, int | float) and name in declared:
                default: Any = declared[name].default
                most = max(self.model.n_ctx, default)
                if value > most:
                    raise RequestError(
                        f"method_options.{name} = {value}: expected at most {most}, because the "
                        f"context of this server holds {self.model.n_ctx} tokens",
                        param="method_options",
                    )

    def _check_calibrated(self, method: Method) -> None:
        """Raises RequestError for a method without a calibration: other requests would wait."""
        if method.name != self._method and not self.model.calibrations.has(method):
            raise RequestError(
                f"{method.name} must measure the model first, and other requests would have to "
                f"wait: run 'sparsekv-cli calibrate --method {method.name}' with this model once, "
                f"or start the server with --prepare {method.name}",
                param="method",
            )

    def defaults(self) -> dict[str, Any]:
        """Returns the default sampling settings of requests, under llama-server's names."""
        values = asdict(params_from_metadata(self.model.gguf.metadata, self._sampling.explicit))
        values["temperature"], values["typical_p"] = values.pop("temp"), values.pop("typ_p")
        values["seed"] = -1 if self._seed is None else self._seed
        del values["logit_bias"]
        return {**values, "n_predict": self.limits.tokens, "method": self._method}

    def methods(self) -> list[str]:
        """Returns the names of the methods that requests may ask for."""
        return usable_methods(self.layers, self._method, self.model.calibrations.has)

    def described_method(self) -> dict[str, Any]:
        """Returns the method of requests that name none, its options, and ``sparse_from``.

        sparse_from: for each method the tokens up to which it attends to all rows by default.
        """
        depth_of = self.model.sparse_from_of
        depths = {name: depth_of(build_method(name, {})) for name in self.methods()}
        depths[self._method] = self.model.sparse_from
        options = {"method": self._method, "method_options": self._method_options}
        return {**options, "sparse_from": depths}

    def close(self) -> None:
        """Ends the scheduler and the process that reads grammars, and closes the model."""
        self.scheduler.stop()
        self.grammars.close()
        self.model.close()

    def shows_tools(self, fields: ServedFields | CountFields) -> bool:
        """Returns whether the prompt has the request's tools.

        Tools that must not be called are there too, so that a conversation keeps its beginning. The
        answer cannot have the tokens of a call. If there are none, the tools are left out.
        """
        return not fields.forbids_calls or bool(self._call_tokens)

    def format_for(self, has_tools: bool) -> ToolFormat | None:
        """Returns the format of an answer. gpt-oss writes on channels even without tools."""
        kind = self.tool_format
        return kind if has_tools or kind == HARMONY else None

    def request(
        self,
        ids: Sequence[int],
        fields: ServedFields,
        *,
        max_tokens: int | None,
        stops: Sequence[str],
        schema: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        kind: ToolFormat | None = None,
        forced: ForcedCall | None = None,
        thinks: bool = True,
        think: bool | None = None,
        think_budget: int | None = None,
    ) -> Request:
        """Returns the request for the scheduler.

        max_tokens: None or -1: as many as the server allows. schema: the schema that the answer
        must fit. kind: see ``format_for``. forced: the call that the answer must be, of
        ``forced_call``. thinks: whether thinking before the answer is possible. think: whether the
        model shall think; None: as the template says. think_budget: for requests whose ``fields``
        have none.
        """
        thinking = self.thinking if thinks and forced is None else None
        if forced is not None:
            ids = [*ids, *self._ids_ahead_of(forced, ids)]
        n_ctx = self.model.n_ctx
        if len(ids) >= n_ctx:
            param = "prompt" if isinstance(fields, CompletionFields) else "messages"
            hint = f"the context of this server holds {n_ctx}, answer included"
            raise ContextFullError(len(ids), 0, n_ctx, param, hint)
        method, sparse_from = self.method_of(fields)
        required = {} if schema is None else {FORMAT: schema}
        options = fields.sampling(self._sampling, required, self.grammars.read)
        if fields.forbids_calls:
            bans = dict.fromkeys(self._call_tokens, -math.inf)
            biases = {**options.explicit.get("logit_bias", {}), **bans}
            options = replace(options, explicit={**options.explicit, "logit_bias": biases})
        if forced is not None:
            options = replace(options, grammar=self._grammar_of(forced, options))
        if thinking is None and fields.think_budget is not None:
            raise RequestError(
                "think_budget: the model does not think before this answer: leave it out",
                param="think_budget",
            )
        if thinking is None:
            options = replace(options, think_budget=None)
        elif fields.think_budget is None and think_budget is not None:
            options = replace(options, think_budget=think_budget)
        try:
            constraint = new_constraint(self.tokenizer, options, thinking, think)
        except SparseKVError as error:
            param = FORMAT
            raise RequestError(str(error).removeprefix("--"), param=param) from None
        n_predict = self.limits.tokens if max_tokens is None or max_tokens < 0 else max_tokens
        new_sampler(self.model, options, 0)  # makes DRY's table in this thread; it is remembered
        return Request(
            ids=ids,
            method=method,
            sparse_from=sparse_from,
            n_predict=min(n_predict, self.limits.tokens, n_ctx - len(ids)),
            sampling=options,
            seed=self._seed if fields.seed is None else fields.seed,
            stops=stops,
            logprobs=logprobs,
            constraint=constraint,
            marks=self.marks if kind is not None and forced is None else SPELLED,
            thinking=None if kind == HARMONY else thinking,
            n_bins=fields.sparsekv_rows,
        )

    def _ids_ahead_of(self, forced: ForcedCall, ids: Sequence[int]) -> list[int]:
        """Returns the ids after the prompt of a forced call: its first words, and no thinking."""
        thinking = self.thinking
        is_open = thinking is not None and thinking.opened_by(self.tokenizer, ids)
        text = (thinking.closing("") if thinking and is_open else "") + forced.prompt
        return self.tokenizer.encode(text, add_bos=False, add_eos=False, parse_special=True)

    def forced_call(self, name: str | None, functions: Mapping[str, Any]) -> ForcedCall:
        """Returns the call that a request's ``tool_choice`` requires: of ``name``, or of any.

        functions: the schemas of their arguments. Raises RequestError if the function does not
        exist.
        """
        chosen = {key: schema for key, schema in functions.items() if name in (None, key)}
        if not chosen:
            what = f"no tool {name!r}" if name is not None else "no tools"
            raise RequestError(
                f"tool_choice asks for a call, but the request has {what}", param="tool_choice"
            )
        return forced_call(self.tool_format, self.template, chosen)

    def _grammar_of(self, forced: ForcedCall, options: SamplingOptions) -> Grammar:
        if options.grammar is not None or options.ignore_eos:
            raise RequestError(
                "tool_choice asks for a call: leave out ignore_eos, grammar, regex and "
                "response_format",
                param="tool_choice",
            )
        try:
            return self.grammars.read("tool_choice", forced.lark)
        except BusyError:
            raise
        except SparseKVError as error:
            raise RequestError(str(error).removeprefix("--"), param="tools") from None

    def gap_ids(
        self, prefix: str, suffix: str, *others: Any, param: str | None = None
    ) -> list[int]:
        """See ``infill_ids``. Raises RequestError if the model cannot fill a gap."""
        try:
            return infill_ids(self.tokenizer, prefix, suffix, *others)
        except SparseKVError as error:
            raise RequestError(str(error), param=param, code="not_supported") from None

    def thinking_of(
        self, think: bool | None, budget: int | None = None
    ) -> tuple[bool | None, int | None]:
        """Returns the template's switch and the budget of thinking that a request asks for.

        think: see ``encode_messages``. A model that always thinks gets a budget of 0 instead.
        """
        if self.thinking_switch or think is None:
            return think, budget
        return (None, 0 if think is False else budget) if self.thinking else (think, budget)

    def effort_of(self, effort: str | None) -> str | None:
        """Returns the template's ``reasoning_effort``; None if it has no such variable."""
        return effort if EFFORT in self.variables else None

    def unused(self, fields: Any) -> set[str]:
        """Returns the names of a request's fields that have no effect with this model."""
        effort = getattr(fields, "effort", None)
        return set() if effort in (None, "none") or self.effort_of(effort) else {EFFORT}

    def variables_of(self, given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        """Returns the variables of the chat template that a request sets, by name.

        given: from ``chat_template_kwargs``. effort: from ``reasoning_effort``. Raises RequestError
        for a variable that the template does not read.
        """
        named = {f"{KWARGS}.{name}": (name, value) for name, value in given.items()}
        if effort is not None:
            named[EFFORT] = (EFFORT, effort)
        for field, (name, _) in named.items():
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise RequestError(
                    f"{path_of([field])}: the model's chat template has no such variable; "
                    f"it has: {known}",
                    param=path_of([field]),
                )
        return dict(named.values())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        think: bool | None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Returns a conversation's ids. Raises RequestError if the template does not accept it.

        variables: of the template.
        """
        try:
            return encode_messages(
                self.tokenizer,
                self.template,
                messages,
                tools=tools or None,
                think=think,
                variables=variables or {},
                continues=continues,
                add_generation_prompt=add_generation_prompt,
            )
        except SparseKVError as error:
            raise RequestError(str(error), param="messages") from None

    def choices(self, request: Request, n: int) -> list[Request]:
        """Returns the request n times, each with its own seed."""
        seed = -1 if request.seed is None else request.seed
        seeds = [seed if seed == -1 else (seed + i) % (MAX_SEED + 1) for i in range(n)]
        constraints = [request.constraint] + [
            request.constraint and request.constraint.copy() for _ in range(n - 1)
        ]
        pairs = zip(seeds, constraints, strict=True)
        return [replace(request, seed=seed, constraint=each) for seed, each in pairs]
