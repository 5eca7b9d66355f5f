"""The models that ``-m`` finds by name, with what their headers say."""

import itertools
from pathlib import Path
from typing import Any

from sparsekv_cli.errors import SparseKVError

MOST_READ = 8  # headers that are read; one with a large vocabulary takes a tenth of a second


def models(problems: list[str]) -> list[dict[str, Any]]:
    """Returns a description of every model: name, where, path, architecture, bytes, problem.

    Only the first MOST_READ headers are read. The other models have None for architecture and
    bytes.
    """
    from sparsekv_cli.models.sources.locate import SOURCES

    found = []
    for where, find in SOURCES.items():
        try:
            found += [(name, where, path) for name, path in find()]
        except (OSError, RuntimeError, SparseKVError) as error:  # RuntimeError: no home folder
            problems.append(f"models of the {where}: {error}")
    read = [_read(*model) for model in found[:MOST_READ]]
    read += [_described(*model) for model in itertools.islice(found, MOST_READ, None)]
    problems += [f"model {model['name']}: {model['problem']}" for model in read if model["problem"]]
    return read


def _read(name: str, where: str, path: Path) -> dict[str, Any]:
    from sparsekv_cli.models.gguf.file import check_whole_model, open_gguf

    model = _described(name, where, path)
    try:
        with open_gguf(path, vocab_only_ok=True) as file:
            architecture = file.metadata.get("general.architecture")
            model["architecture"] = architecture if isinstance(architecture, str) else None
            model["file_bytes"] = file.size
            check_whole_model(file)
    except (OSError, SparseKVError) as error:
        model["problem"] = str(error).removeprefix(f"{path}: ")
    return model


def _described(name: str, where: str, path: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"name": name, "where": where, "path": str(path)}
    return model | {"architecture": None, "file_bytes": None, "problem": None}
