"""Lists the models that ``-m`` finds by name. Their properties are read from the headers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv_cli.errors import SparseKVError, UnsupportedModelError
from sparsekv_cli.models.architectures import architecture_of
from sparsekv_cli.models.gguf.file import GGUFFile, check_whole_model, open_gguf
from sparsekv_cli.models.gguf.keys import read_architecture
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.sources.locate import SOURCES


@dataclass(frozen=True)
class ListedModel:
    """A model that -m accepts by ``name``. An unreadable value is None."""

    name: str
    where: str  # ``folder``, ``hub cache`` or ``package``
    path: Path
    architecture: str | None = None
    n_parameters: int | None = None
    weight_type: str | None = None
    n_bytes: int | None = None  # bytes of all files
    n_files: int = 1
    context_length: int | None = None
    problem: str | None = None  # the reason why it cannot be run; None: it can


def list_models() -> Iterator[ListedModel]:
    """Yields the models of the folder, of the hub's cache and of packages."""
    for where, find in SOURCES.items():
        for name, path in find():
            yield read_model(name, where, path)


def read_model(name: str, where: str, path: Path) -> ListedModel:
    """Reads a model's header. A file that cannot be read is listed with the reason."""
    try:
        with open_gguf(path, vocab_only_ok=True) as file:
            problem = find_problem(file)
            architecture = file.metadata.get("general.architecture")
            n_ctx = file.metadata.get(f"{architecture}.context_length")
            return ListedModel(
                name=name,
                where=where,
                path=file.path,
                architecture=architecture if isinstance(architecture, str) else None,
                n_parameters=sum(info.n_elements for info in file.tensors.values()),
                weight_type=weight_type(file),
                n_bytes=file.size,
                n_files=len(file.parts),
                context_length=n_ctx if isinstance(n_ctx, int) else None,
                problem=without_path(problem, file.path) if problem else None,
            )
    except SparseKVError as error:
        n_bytes = path.stat().st_size if path.is_file() else None
        return ListedModel(name, where, path, n_bytes=n_bytes, problem=without_path(error, path))


def find_problem(file: GGUFFile) -> SparseKVError | None:
    """Returns why a model cannot be run, or None. UnsupportedModelError: the file is correct."""
    try:
        check_whole_model(file)
    except SparseKVError as error:
        return UnsupportedModelError(str(error))
    try:
        architecture_of(read_architecture(file))
        read_hparams(file)
    except SparseKVError as error:
        return error
    try:
        file.check_types()
    except SparseKVError as error:
        return UnsupportedModelError(str(error))
    return None


def without_path(error: SparseKVError, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def weight_type(file: GGUFFile) -> str | None:
    """Returns the file's stated type, such as ``Q4_K_M``, else the type with the most bytes."""
    from gguf import LlamaFileType

    number: Any = file.metadata.get("general.file_type")
    known = [kind.name for kind in LlamaFileType if isinstance(number, int) and kind == number]
    if known:
        return known[0].removeprefix("MOSTLY_").removeprefix("ALL_")
    n_bytes: dict[str, int] = {}
    for info in file.tensors.values():
        n_bytes[info.type.name] = n_bytes.get(info.type.name, 0) + info.n_bytes
    return max(n_bytes, key=lambda name: n_bytes[name], default=None)
