"""Writes a GGUF model that has the first layers of another one, with its tensors as they are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "models"))

from gguf import GGUFReader, GGUFWriter
from tiny_models import copy_metadata, write_all


def write_first_layers(source: Path, target: Path, n_layer: int) -> None:
    """target: a file with n_layer layers of ``source``; it speaks nonsense, but at real scales."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    copy_metadata(reader, writer, {f"{architecture}.block_count": n_layer})
    for tensor in reader.tensors:
        block = tensor.name.split(".")
        if block[0] == "blk" and int(block[1]) >= n_layer:
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write_all(writer)
