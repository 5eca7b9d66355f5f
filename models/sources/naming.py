"""Reads the names of GGUF files: a model's parts, its quantisation, and files without a model.

The names come from a hub, so they are not trusted. ``is_plain_path`` says which of them may become
paths. Source of the rules: llama.cpp's ``-hf`` (common/download.cpp).
"""

import re
from collections.abc import Iterable

SUFFIX = ".gguf"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
TAG = re.compile(r"[-./]((?:UD-)?[A-Z][A-Z0-9]*\d[A-Z0-9_]*)$", re.IGNORECASE)
NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
MOST_BYTES = 255  # of a name in a folder, on common file systems
DRIVE = re.compile(r"[A-Za-z]:")


def is_plain_path(name: object) -> bool:
    """Returns whether a hub's name is a path that stays in its folder and can be printed."""
    return isinstance(name, str) and all(map(_is_plain_name, name.split("/")))


def _is_plain_name(part: str) -> bool:
    return (
        part not in ("", ".", "..")
        and part.isprintable()
        and "\\" not in part
        and not part.startswith("-")
        and not DRIVE.match(part)
        and len(part.encode("utf-8", "replace")) <= MOST_BYTES
    )


def split_name(file: str) -> tuple[str, int, int]:
    """Returns the name without suffix and part, the number of the part, and the number of parts.

    ``a-00002-of-00003.gguf`` gives ("a", 2, 3), and ``a.gguf`` gives ("a", 1, 1).
    """
    stem = file[: -len(SUFFIX)] if file.lower().endswith(SUFFIX) else file
    found = SPLIT.fullmatch(stem)
    return (found[1], int(found[2]), int(found[3])) if found else (stem, 1, 1)


def quant_of(file: str) -> str:
    """Returns the quantisation in a file's name, such as ``Q4_K_M``, or an empty string."""
    stem = split_name(file)[0]
    found = TAG.search(stem)
    return found[1].upper() if found else ""


def is_model(file: str) -> bool:
    """Returns whether the name of a GGUF file is that of a language model."""
    name = file.rpartition("/")[2]
    return name.endswith(SUFFIX) and not any(word in name for word in NOT_MODELS)


def parts_of(file: str, files: Iterable[str]) -> list[str]:
    """Returns all files among ``files`` that belong to the model of ``file``, in order."""
    prefix, _, count = split_name(file)
    if count < 2:
        return [file]
    names = ((split_name(each), each) for each in files)
    return [each for (own, _, n), each in sorted(names) if (own, n) == (prefix, count)]


def whole_models(files: Iterable[str]) -> dict[str, list[str]]:
    """Returns first file -> all files, for each model in ``files`` that is complete."""
    names = sorted(filter(is_model, files))
    found = {name: parts_of(name, names) for name in names if split_name(name)[1] == 1}
    return {name: parts for name, parts in found.items() if len(parts) == split_name(name)[2]}


def choose(files: Iterable[str], quant: str | None) -> list[str]:
    """Returns the files of a repository's model with the quantisation ``quant``; [] for none.

    quant None: Q4_K_M, or else Q8_0, or else the first model.
    """
    models = whole_models(files)
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}[-./]", re.IGNORECASE)
        for name in models:
            if pattern.search(name):
                return models[name]
    return next(iter(models.values()), []) if not quant else []
