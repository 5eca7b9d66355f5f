"""The user's models folder. ``-m`` accepts its files by name."""

import os
from pathlib import Path

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.naming import SUFFIX, split_name

ENVIRONMENT_VARIABLE = "SPARSEKV_MODELS"


def models_folder() -> Path | None:
    """Returns the folder SPARSEKV_MODELS, or one in the user's data folder; None without a home."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_DATA_HOME")
    try:
        data = Path(base) if base else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return data / "sparsekv-cli" / "models"


def models_by_name() -> dict[str, Path]:
    """Returns name -> path of the folder's models. Names have no suffix and no part number.

    The path of a split model is its first existing part. A missing folder has no models.
    """
    folder = models_folder()
    try:
        files = sorted(os.listdir(folder)) if folder is not None else []
    except FileNotFoundError:
        files = []
    except OSError as error:
        raise SparseKVError(f"{folder}: models cannot be listed: {error.strerror}") from None
    models: dict[str, Path] = {}
    for file in files:
        if folder is not None and file.lower().endswith(SUFFIX):
            models.setdefault(split_name(file)[0], folder / file)
    return models


def find_by_name(name: str) -> Path | None:
    """Returns the path of the folder's model ``name``, or None. Case and suffix do not matter."""
    models = models_by_name()
    wanted = split_name(name)[0]
    if wanted in models:
        return models[wanted]
    alike = [each for each in models if each.casefold() == wanted.casefold()]
    if len(alike) > 1:
        raise SparseKVError(
            f"{name}: {' and '.join(alike)} are both in {models_folder()}; name one of them exactly"
        )
    return models[alike[0]] if alike else None
