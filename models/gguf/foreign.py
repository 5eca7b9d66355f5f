"""Finds the kind of a file that is not GGUF from its first bytes."""

import struct

# (bytes at the start, kind of file); llama.cpp's older formats stored the magic as a u32.
_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a git-LFS pointer (run `git lfs pull` to fetch the file)"),
    (b"PK\x03\x04", "a zip archive, as PyTorch checkpoints are (convert the model to GGUF)"),
    (b"\x80\x02", "a Python pickle, as old PyTorch checkpoints are (convert the model to GGUF)"),
    (b"lmgg", "the old GGML format (convert the model again with a current llama.cpp)"),
    (b"fmgg", "the old GGMF format (convert the model again with a current llama.cpp)"),
    (b"tjgg", "the old GGJT format (convert the model again with a current llama.cpp)"),
    (b"algg", "an old GGLA adapter"),
    (b"FUGG", "a GGUF file with its bytes swapped"),
    (b"\x1f\x8b", "gzip data (unpack it first)"),
    (b"\x28\xb5\x2f\xfd", "zstd data (unpack it first)"),
    (b"\xfd7zXZ\x00", "xz data (unpack it first)"),
    (b"BZh", "bzip2 data (unpack it first)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive (unpack it first)"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x7fELF", "a program (ELF)"),
    (b"MZ", "a program (Windows)"),
    (b"%PDF", "a PDF document"),
)


def describe_foreign(start: bytes) -> str:
    """Returns one phrase about a file that starts with the bytes ``start``, at best 512."""
    for magic, description in _STARTS:
        if start.startswith(magic):
            return f"it looks like {description}"
    if len(start) >= 9 and start[8:9] == b"{":
        (header,) = struct.unpack_from("<Q", start)
        if 2 <= header <= 100 << 20:  # the largest header that safetensors allows
            return "it looks like safetensors (convert the model to GGUF)"
    if start[257:262] == b"ustar":
        return "it looks like a tar archive (unpack it first)"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "it looks like an HTML page (the download gave a web page instead of the model)"
    if text.startswith((b"<?xml", b"<error")):
        return "it looks like XML (the download gave an error message instead of the model)"
    if text.startswith(b"{"):
        return "it looks like JSON"
    if not start.strip(b"\0"):
        return "it begins with zeros (an unfinished download?)"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in start):
        return f"it looks like text, beginning {start[:16].decode('utf-8', 'replace')!r}"
    return f"it begins with {start[:4]!r}, not b'GGUF'"
