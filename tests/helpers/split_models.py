"""Split models: a GGUF file in parts, as llama-gguf-split writes them."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from gguf_bytes import UINT16, Builder, Tensor, pair

from sparsekv_cli.models.gguf.part import HEADER_BYTES, open_part

INT32 = 5


def uint16(key: str, value: int) -> bytes:
    return pair(key, UINT16, struct.pack("<H", value))


def split_pairs(number: int, count: int, n_tensors: int) -> list[bytes]:
    """The keys by which a part says which one it is."""
    return [
        uint16("split.no", number),
        uint16("split.count", count),
        pair("split.tensors.count", INT32, struct.pack("<i", n_tensors)),
    ]


def part_path(folder: Path, number: int, count: int, name: str = "m") -> Path:
    return folder / f"{name}-{number + 1:05}-of-{count:05}.gguf"


def split_model(
    path: Path,
    folder: Path,
    count: int = 3,
    *,
    name: str = "m",
    tensorless: bool = False,
    more: Mapping[int, Sequence[bytes]] | None = None,
) -> list[Path]:
    """Writes the parts of the model in ``path``; the metadata are in the first.

    tensorless: the first holds no tensors.  more: further keys of a part, by its number.
    """
    source = open_part(path)
    tensors = [
        Tensor(info.name, info.shape[::-1], int(info.type), source.data(info).tobytes())
        for info in source.tensors.values()
    ]
    source.close()
    pairs = _pairs_of(path, len(source.metadata))
    holders = count - tensorless
    step = -(-len(tensors) // holders)
    groups: list[list[Tensor]] = [[]] if tensorless else []
    groups += [tensors[step * i : step * (i + 1)] for i in range(holders)]
    written = []
    for number, group in enumerate(groups):
        own = split_pairs(number, count, len(tensors)) + list((more or {}).get(number, ()))
        builder = Builder([pairs] * (not number) + own, group)
        builder.n_keys = len(own) + (0 if number else len(source.metadata))
        written.append(builder.write(folder, part_path(folder, number, count, name).name))
    return written


def _pairs_of(path: Path, n_keys: int) -> bytes:
    """All keys and values of a file as they lie in it."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = [field for field in reader.fields.values() if not field.name.startswith("GGUF.")]
    assert len(keys) == n_keys
    end = keys[-1].offset + sum(part.nbytes for part in keys[-1].parts)
    return path.read_bytes()[HEADER_BYTES:end]
