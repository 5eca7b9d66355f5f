"""Opens a model for the library: the function ``load``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.library.language_model import LanguageModel, built
from sparsekv_cli.library.prompts import plain
from sparsekv_cli.model import load_model
from sparsekv_cli.models.reuse.repair import check_movable, share_repaired
from sparsekv_cli.models.sources.locate import resolve_model
from sparsekv_cli.prefix.folder import check_folder
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.settings.option import did_you_mean

OWN = {"ctx_size": "n_ctx"}  # field of SessionConfig -> its name here
# Setting of another library -> what to use here.
ELSEWHERE = {
    "n_gpu_layers": 'device="cuda" takes a GPU for all layers',
    "gpu_layers": 'device="cuda" takes a GPU for all layers',
    "model_path": "the model's file is the first argument",
    "model": "the model's file is the first argument",
    "n_threads": "it is threads here",
    "n_batch": "it is chunk here",
    "n_ubatch": "it is chunk here",
    "type_k": 'method_options={"cache_type_k": ...} sets it',
    "type_v": 'method_options={"cache_type_v": ...} sets it',
    "options": "they are method_options here",
}
PER_CALL = ("seed", "stop", "stream", "max_tokens", "temperature", "top_p", "top_k", "min_p")


def load(
    name_or_path: str | Path,
    method: str = "full",
    budget: str | int | None = None,
    *,
    method_options: Mapping[str, Any] | None = None,
    n_ctx: int = 0,
    threads: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    cache_dir: str | Path | None = None,
    cache_limit: float | None = None,
    reuse: Literal["exact", "passages"] = "exact",
    reuse_repair: float | None = None,
    **settings: Any,
) -> LanguageModel:
    """Opens a model. The result is a context manager, which closes the model at its end.

    name_or_path: a file or a name, as for ``-m`` on the command line. method, budget,
    method_options: how calls attend by default. n_ctx: the most tokens of prompt and answer; 0: as
    many as the model was trained for. threads: 0: one for each physical core. cache_dir: a folder
    that stores the rows of prompts, as for ``run --cache-dir``. cache_limit: its most GiB; None: a
    tenth of the free disk, at most 16. reuse, reuse_repair: as ``run --reuse`` and
    ``--reuse-repair``, the second from 0 to 1. settings: other fields of SessionConfig, such as
    ``prefill_dtype``. Raises SparseKVError for a model that cannot be opened. Raises ValueError for
    a method, an option or a setting that does not exist.
    """
    _check(settings)
    chosen = built(method, budget, method_options)
    given = plain({"ctx_size": n_ctx, "threads": threads, "device": device, **settings})
    config = SessionConfig(**given)
    if not isinstance(name_or_path, str | Path):
        found = type(name_or_path).__name__
        raise SparseKVError(f"the model is of type {found}: expected a name or a path")
    folder = None if cache_dir is None else Path(cache_dir)
    if folder is not None:
        check_folder(folder)
    repair = share_repaired(reuse, reuse_repair)
    if repair is not None and folder is None:
        raise SparseKVError("reuse='passages' needs kept prompts: give cache_dir")
    model = load_model(resolve_model(str(name_or_path)), chosen, config)
    try:
        if repair is not None:
            check_movable(model)
        return LanguageModel(model, folder, cache_limit, repair)
    except BaseException:
        model.close()
        raise


def _check(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that does not exist, with the right name if one is known."""
    known = [OWN.get(each.name, each.name) for each in fields(SessionConfig)]
    known += [
        "method",
        "budget",
        "method_options",
        "cache_dir",
        "cache_limit",
        "reuse",
        "reuse_repair",
    ]
    for name in settings:
        if name in known:
            continue
        hint = f": {ELSEWHERE[name]}" if name in ELSEWHERE else did_you_mean(name, known)
        if name in OWN:
            hint = f": it is {OWN[name]} here"
        if name in PER_CALL:
            hint = ": give it to chat and generate"
        raise ValueError(f"load has no setting {name}{hint}")
