"""Writes a GGUF model that has the first layers of another one, with its tensors as they are."""

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def write_first_layers(source: Path, target: Path, n_layer: int) -> None:
    """target: a file with n_layer layers of ``source``; it speaks nonsense, but at real scales."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = n_layer if name == f"{architecture}.block_count" else field.contents()
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(name, value, field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        block = tensor.name.split(".")
        if block[0] == "blk" and int(block[1]) >= n_layer:
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
