"""The fields of known clients that have no effect here: data, and what takes them out of a request.

A field that is not here and not in a model of a request is refused by name. So is a field whose
loss would change what a client relies on, such as the form of its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparsekv_cli.generation.fields import Fields, names_of


class Client(NamedTuple):
    """The fields of a client or a protocol, as paths such as ``tools[].cache_control``."""

    name: str
    left_out: tuple[str, ...]
    refused: tuple[str, ...] = ()


CLIENTS = (
    Client(
        "OpenAI, chat and completions",
        (
            "store", "verbosity", "prediction", "prompt_cache_retention", "prompt_cache_options",
            "web_search_options", "moderation", "stream_options.include_obfuscation",
        ),
        ("audio", "best_of", "echo", "functions", "function_call"),
    ),
    Client(
        "OpenAI, responses; Codex",
        (
            "client_metadata", "text.verbosity", "truncation", "max_tool_calls", "generate",
            "reasoning.summary", "reasoning.generate_summary", "reasoning.context",
            "reasoning.mode", "context_management", "stream_options.reasoning_summary_delivery",
            "tools[].defer_loading", "tools[].output_schema", "tools[].allowed_callers",
            "tools[].tools[].defer_loading", "tools[].tools[].output_schema",
        ),
        ("background", "conversation", "prompt"),
    ),
    Client(
        "Anthropic; Claude Code",
        (
            "betas", "anthropic_beta", "anthropic_version", "container", "mcp_servers",
            "inference_geo", "speed", "user_profile_id", "diagnostics", "fallbacks",
            "output_config.task_budget", "tools[].cache_control", "tools[].eager_input_streaming",
            "tools[].input_examples", "cache_control",
        ),
    ),
    Client(
        "llama.cpp; Cline",
        (
            "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_indent",
            "n_cache_reuse", "min_keep", "timings_per_token", "return_tokens",
            "post_sampling_probs",
            "t_max_predict_ms", "t_max_prompt_ms", "reasoning_format", "reasoning_in_content",
            "parse_tool_calls", "thinking_forced_open", "response_fields",
            "backend_sampling",
        ),
        ("lora", "chat_template", "image_data", "grammar_triggers"),
    ),
    Client(
        "vLLM",
        (
            "priority", "request_id", "cache_salt", "add_special_tokens", "skip_special_tokens",
            "spaces_between_special_tokens", "include_reasoning", "return_token_ids",
            "mm_processor_kwargs", "truncate_prompt_tokens",
        ),
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
         "use_beam_search", "min_tokens", "stop_token_ids"),
    ),
    Client(
        "OpenRouter; LiteLLM; opencode",
        (
            "provider", "transforms", "models", "route", "plugins", "usage", "session_id", "trace",
            "debug", "image_config", "litellm_metadata", "drop_params", "allowed_openai_params",
            "reasoning.exclude",
        ),
    ),
    Client("Ollama; Continue; aider", ("keep_alive", "options"), ("format",)),
)  # fmt: skip
LEFT_OUT = tuple(dict.fromkeys(path for client in CLIENTS for path in client.left_out))
# Tools that a hosted service runs, or whose form only its models know: beginnings of their types.
HOSTED_TOOLS = (
    "web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "computer",
    "image_generation", "mcp", "tool_search", "shell", "apply_patch", "advisor_",
    "programmatic_tool_calling",
)  # fmt: skip


def without_unused(
    kind: type[Fields], values: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Returns a request without the fields and tools that have no effect, and their names.

    kind: the model of the request. A field that it declares stays.
    """
    rest, names, declared = dict(values), set[str](), set(names_of(kind))
    for path in LEFT_OUT:
        parts = path.replace("[]", ".[]").split(".")
        if parts[1:] or path not in declared:
            rest, is_found = _without(rest, parts)
            names |= {path} if is_found else set()
    tools = rest.get("tools")
    if isinstance(tools, list) and (hosted := {*filter(None, map(_hosted, tools))}):
        rest["tools"] = [each for each in tools if not _hosted(each)]
        names |= {f"tools[].type: {kind}" for kind in hosted}
    return rest, names


def _without(value: Any, parts: Sequence[str]) -> tuple[Any, bool]:
    """Returns a value without the field at the end of a path, and whether it was there."""
    first, *others = parts
    if first == "[]" and isinstance(value, list):
        pairs = [_without(each, others) for each in value]
        is_found = any(found for _, found in pairs)
        return ([each for each, _ in pairs], True) if is_found else (value, False)
    if not isinstance(value, dict) or value.get(first) is None:
        return value, False
    if not others:
        return {key: each for key, each in value.items() if key != first}, True
    inner, is_found = _without(value[first], others)
    return ({**value, first: inner} if is_found else value), is_found


def _hosted(tool: Any) -> str:
    """Returns the entry of HOSTED_TOOLS that a tool has; empty: none."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    names = HOSTED_TOOLS if isinstance(kind, str) else ()
    return next((name for name in names if str(kind).startswith(name)), "")
