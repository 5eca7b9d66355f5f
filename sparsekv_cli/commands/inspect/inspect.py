"""``inspect``: shows what is in a GGUF file, without loading its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.help_page import ModelCommand
from sparsekv_cli.commands.options.model import (
    CHANGE_OPTIONS,
    MODEL_OPTIONS,
    apply_options,
    find_model,
    session_config,
)
from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.tables import count, print_pairs, print_table, size
from sparsekv_cli.commands.shared.terminal import write_json
from sparsekv_cli.errors import SparseKVError, UnsupportedModelError

if TYPE_CHECKING:
    from sparsekv_cli.models.gguf.file import GGUFFile
    from sparsekv_cli.models.layers.layer_params import LayerParams

CONTEXT = 32768  # tokens for which the memory of K and V is shown
SPECIAL_ID_SUFFIX = "_token_id"


@click.command("inspect", cls=ModelCommand)
@click.argument("file", required=False, metavar="[FILE|NAME]", shell_complete=completers.models)
@MODEL_OPTIONS[0]
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--tensors", "list_tensors", is_flag=True, help="List every tensor.")
@click.option("--metadata", "list_metadata", is_flag=True, help="List every key (in JSON: always).")
@click.option(
    "--check-tensors", is_flag=True,
    help="Read all tensors and fail if a float or a block's scale is NaN or infinite.",
)  # fmt: skip
@partial(apply_options, options=CHANGE_OPTIONS)
@verbose_option
def command(
    file: str | None,
    model: str | None,
    as_json: bool,
    list_tensors: bool,
    list_metadata: bool,
    check_tensors: bool,
    **changes: Any,
) -> None:
    """Show what a GGUF file holds: sizes, types, hyper-parameters, tokenizer.

    Give any part of a split model: all parts that are there are shown as one model.
    Vocabulary-only files, adapters and models that this program cannot run can be inspected too.
    The exit code is 1 if the file itself is wrong.
    """
    if file is not None and model is not None:
        raise click.UsageError("the file is given twice: as an argument and with -m")
    config = session_config(changes)
    path = find_model(file if file is not None else model)
    from sparsekv_cli.models.gguf.check import check_tensors as scan
    from sparsekv_cli.models.gguf.file import open_gguf
    from sparsekv_cli.models.sources.listing import find_problem

    with open_gguf(path, vocab_only_ok=True) as gguf:
        gguf.change(config)
        problem = find_problem(gguf)
        summary = summarise(gguf, problem)
        if list_tensors:
            summary["tensors"] = [
                {
                    "name": info.name,
                    "type": info.type.name,
                    "shape": list(info.shape),
                    "bytes": info.n_bytes,
                    "offset": info.offset,
                    "file": gguf.parts[info.part].path.name,
                }
                for info in gguf.tensors.values()
            ]
        if check_tensors:
            result = scan(gguf)
            unchecked = [kind.name for kind in result.unchecked]
            summary["check"] = {"tensors": result.n_tensors, "bad": 0, "unchecked_types": unchecked}
    if as_json:
        write_json(summary, allow_nan=False)
    else:
        _show(summary, list_metadata)
    if problem is not None and not isinstance(problem, UnsupportedModelError):
        raise problem


def summarise(gguf: GGUFFile, problem: SparseKVError | None) -> dict[str, Any]:
    """Returns what ``--json`` prints, without the list of tensors, as plain values."""
    from sparsekv_cli.models.hparams import read_hparams

    hyperparameters: dict[str, Any] | None = None
    rope: dict[str, Any] | None = None
    kv_cache: dict[str, Any] | None = None
    layers: list[dict[str, Any]] | None = None
    with contextlib.suppress(SparseKVError):  # ``problem`` has the reason
        hparams = read_hparams(gguf)
        kv_cache = _kv_cache(hparams.layers, sum(info.n_bytes for info in gguf.tensors.values()))
        hyperparameters = dataclasses.asdict(hparams)
        rope = hyperparameters.pop("rope")
        own = hyperparameters.pop("window_rope")
        rope |= {f"window_{key}": x for key, x in (own or {}).items() if x != rope[key]}
        layers = _by_kind(hparams.layers)
        hyperparameters |= _sizes(hyperparameters.pop("layers"))
    tensors = gguf.tensors.values()
    n_parameters = sum(info.n_elements for info in tensors)
    n_bytes = sum(info.n_bytes for info in tensors)
    architecture = gguf.metadata.get("general.architecture")
    context_key = f"{architecture}.context_length"
    return {
        "path": str(gguf.path),
        "file_bytes": gguf.size,
        "files": [part.path.name for part in gguf.parts],
        "gguf_version": gguf.version,
        "architecture": _plain(architecture),
        "name": _plain(gguf.metadata.get("general.name")),
        "kind": _plain(gguf.metadata.get("general.type", "model")),
        "vocabulary_only": not gguf.tensors,
        "n_tensors": len(gguf.tensors),
        "parameters": n_parameters,
        "tensor_bytes": n_bytes,
        "bits_per_weight": round(8 * n_bytes / n_parameters, 3) if n_parameters else None,
        "types": _type_mix(gguf),
        "context_length": _plain(gguf.metadata.get(context_key)),
        "kv_cache": kv_cache,
        "hyperparameters": hyperparameters,
        "rope": rope,
        "layers": layers,
        "experts": _experts(gguf, str(architecture)),
        "problem": str(problem).removeprefix(f"{gguf.path}: ") if problem else None,
        "tokenizer": _tokenizer(gguf),
        "metadata": {key: _plain(value) for key, value in gguf.metadata.items()},
    }


def _kv_cache(layers: Sequence[LayerParams], n_weights: int) -> dict[str, Any]:
    """Returns type -> bytes of a token's K and V, and the context that fits memory.

    n_weights: bytes of the weights, which need memory too. The context is None if the free memory
    is unknown.
    """
    from sparsekv_cli.cache.row_sizes import CACHE_TYPES, fitting_context, token_bytes
    from sparsekv_cli.system.memory import available_memory

    available = available_memory()
    types = {}
    for kind in CACHE_TYPES:
        size = token_bytes(layers, kind, kind)
        fitting = None if available is None else fitting_context(available - n_weights, size)
        types[kind] = {"bytes_a_token": size, "fitting_context": fitting}
    return {"memory_available": available, "types": types}


def _by_kind(layers: Sequence[LayerParams]) -> list[dict[str, Any]]:
    """Returns each kind of layers, their number and the bytes of their K and V at CONTEXT tokens.

    The bytes are for f16; a quantised cache needs less. Recurrent layers have a state in f32.
    Layers of the kind ``shared`` read the rows of another full layer.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for layer in layers:
        kind = "shared" if layer.source >= 0 and not layer.window else layer.kind
        row = kinds.setdefault(kind, {"kind": kind, "layers": 0, "bytes": 0})
        row["layers"] += 1
        row["bytes"] += layer.kv_bytes(CONTEXT)
    return [{**row, "tokens": CONTEXT} for row in kinds.values()]


def _experts(gguf: GGUFFile, architecture: str) -> dict[str, Any] | None:
    """Returns the numbers of experts in the file; None if the model has no experts."""
    keys = f"{architecture}.expert_"
    total = gguf.metadata.get(f"{keys}count")
    if not isinstance(total, int) or not total:
        return None
    shared = f"{keys}shared_feed_forward_length", f"{keys}shared_count"
    return {
        "total": total,
        "used": _plain(gguf.metadata.get(f"{keys}used_count")),
        "shared": any(_plain(gguf.metadata.get(key)) not in (None, 0) for key in shared),
    }


def _plain(value: Any) -> Any:
    """Returns a metadata value that JSON can hold. A long array becomes its type and length."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if len(value) <= 16:
        return [_plain(one) for one in value.tolist()]
    dtype = getattr(value, "dtype", None)
    return {"array_of": "string" if dtype is None else dtype.name, "length": len(value)}


def _type_mix(gguf: GGUFFile) -> list[dict[str, Any]]:
    """Returns each type with its tensors, parameters and bytes, most bytes first."""
    mix: dict[str, dict[str, Any]] = {}
    for info in gguf.tensors.values():
        row = mix.setdefault(
            info.type.name, {"type": info.type.name, "tensors": 0, "parameters": 0, "bytes": 0}
        )
        row["tensors"] += 1
        row["parameters"] += info.n_elements
        row["bytes"] += info.n_bytes
    return sorted(mix.values(), key=lambda row: -row["bytes"])


def _tokenizer(gguf: GGUFFile) -> dict[str, Any] | None:
    """Returns model, pre-tokenizer, sizes and special tokens; None without a vocabulary."""
    from sparsekv_cli.models.gguf.file import StringArray

    metadata = gguf.metadata
    prefix = "tokenizer.ggml."
    if f"{prefix}model" not in metadata and f"{prefix}tokens" not in metadata:
        return None
    tokens = metadata.get(f"{prefix}tokens")
    merges = metadata.get(f"{prefix}merges")
    special: dict[str, dict[str, Any]] = {}
    for key, value in metadata.items():
        if key.startswith(prefix) and key.endswith(SPECIAL_ID_SUFFIX):
            text = None
            if isinstance(tokens, StringArray) and isinstance(value, int):
                text = tokens[value] if 0 <= value < len(tokens) else None
            name = key.removeprefix(prefix).removesuffix(SPECIAL_ID_SUFFIX)
            special[name] = {"id": _plain(value), "text": text}
    return {
        "model": _plain(metadata.get(f"{prefix}model")),
        "pre": _plain(metadata.get(f"{prefix}pre")),
        "n_tokens": len(tokens) if isinstance(tokens, StringArray) else 0,
        "n_merges": len(merges) if isinstance(merges, StringArray) else 0,
        "special": special,
        "add_bos": _plain(metadata.get(f"{prefix}add_bos_token")),
        "add_eos": _plain(metadata.get(f"{prefix}add_eos_token")),
        "add_space_prefix": _plain(metadata.get(f"{prefix}add_space_prefix")),
        "has_chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
    }


def _show(summary: dict[str, Any], list_metadata: bool) -> None:
    files = f" in {len(summary['files'])} files" if len(summary["files"]) > 1 else ""
    rows: list[tuple[str, Any]] = [
        ("file", summary["path"]),
        ("architecture", summary["architecture"]),
        ("name", summary["name"]),
        ("size", f"{size(summary['file_bytes'])}{files}, GGUF version {summary['gguf_version']}"),
    ]
    if summary["kind"] != "model":
        rows.append(("kind", summary["kind"]))
    if summary["vocabulary_only"]:
        rows.append(("tensors", "none (vocabulary only)"))
    else:
        weights = f"{count(summary['parameters'])} in {summary['n_tensors']} tensors"
        rows.append(("parameters", f"{weights}, {summary['bits_per_weight']:.2f} bits each"))
    if summary["experts"]:
        experts = summary["experts"]
        shared = ", and a shared one" if experts["shared"] else ""
        rows.append(("experts", f"{experts['used']} of {experts['total']} a token{shared}"))
    rows.append(("context", summary["context_length"]))
    if "check" in summary:
        unchecked = summary["check"]["unchecked_types"]
        note = f"; not checked: {', '.join(unchecked)}" if unchecked else ""
        rows.append(("check", f"{summary['check']['tensors']} tensors, all finite{note}"))
    if summary["problem"]:
        rows.append(("cannot run", summary["problem"]))
    print_pairs("", rows)
    if summary["types"]:
        mix = [
            (row["type"], row["tensors"], count(row["parameters"]), size(row["bytes"]))
            for row in summary["types"]
        ]
        print_table("types", ("type", "tensors", "parameters", "size"), mix)
    if summary["kv_cache"]:
        _show_kv_cache(summary["kv_cache"], summary["context_length"])
    if summary["hyperparameters"]:
        shown = [(k, v) for k, v in summary["hyperparameters"].items() if k != "architecture"]
        print_pairs("hyper-parameters", shown)
        print_pairs("rope", list(summary["rope"].items()))
        kinds = [(each["kind"], each["layers"], size(each["bytes"])) for each in summary["layers"]]
        print_table("layers", ("kind", "layers", f"f16 at {CONTEXT} tokens"), kinds)
    if summary["tokenizer"]:
        print_pairs("tokenizer", _tokenizer_rows(summary["tokenizer"]))
    if list_metadata:
        print_pairs("metadata", list(summary["metadata"].items()))
    if "tensors" in summary:
        lines = [
            (one["name"], one["type"], " x ".join(map(str, one["shape"])), size(one["bytes"]))
            for one in summary["tensors"]
        ]
        print_table("tensors", ("name", "type", "shape", "size"), lines)


def _show_kv_cache(kv_cache: dict[str, Any], n_ctx: int) -> None:
    available = kv_cache["memory_available"]
    rows = []
    for kind, of in kv_cache["types"].items():
        fitting, n_bytes = of["fitting_context"], of["bytes_a_token"]
        rows.append(
            (kind, size(n_bytes), size(n_ctx * n_bytes), "" if fitting is None else fitting)
        )
    free = "" if available is None else f" ({size(available)} of memory available)"
    columns = ("type", "a token", f"{n_ctx} tokens", "tokens that fit memory")
    print_table(f"KV cache{free}", columns, rows)


def _tokenizer_rows(tokenizer: dict[str, Any]) -> list[tuple[str, Any]]:
    rows = [(k, v) for k, v in tokenizer.items() if k != "special" and v is not None]
    for name, token in tokenizer["special"].items():
        text = "" if token["text"] is None else f" {token['text']!r}"
        rows.append((name, f"{token['id']}{text}"))
    return rows


def _sizes(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns name -> size of layers and their experts: one value, or a list if layers differ.

    An ``n_ff`` of 0 means that the layer has experts.
    """
    flat = [{**layer, **(layer["experts"] or {})} for layer in layers]
    names = dict.fromkeys(name for layer in flat for name in layer if name != "experts")
    columns = {name: [layer.get(name, 0) for layer in flat] for name in names}
    sizes = {k: v[0] if all(each == v[0] for each in v) else v for k, v in columns.items()}
    return {"n_layer": len(layers), **sizes}
