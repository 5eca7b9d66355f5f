"""A prompt for the text in a gap, of the marks that a model was trained with (fill in the middle).

The order is prefix, suffix, middle, as llama.cpp's server writes it. Other files come first.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer

REPOSITORY, FILE = "project", "file"  # names of what the client does not name


def infill_ids(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    begun: str = "",
) -> list[int]:
    """Returns the ids of a prompt that the text between prefix and suffix continues.

    files: names and texts of other files. begun: the beginning of the answer. No control token is
    parsed in any of them. Raises SparseKVError if the vocabulary has no such marks.
    """
    marks = tokenizer.infill
    if missing := [name for name in ("prefix", "suffix", "middle") if name not in marks]:
        raise SparseKVError(
            f"this model cannot fill a gap: its vocabulary has no token for {', '.join(missing)} "
            "(tokenizer.ggml.fim_*_token_id); choose a model for code, such as Qwen2.5-Coder"
        )
    ids = tokenizer.encode("", add_eos=False)
    encode = tokenizer.encode_within
    if files and "repository" in marks and "file" in marks:
        ids += [marks["repository"], *encode(f"{REPOSITORY}\n")]
        for name, text in files:
            ids += [marks["file"], *encode(f"{name or FILE}\n{text}\n")]
        ids += [marks["file"], *encode(f"{FILE}\n")]
    else:
        ids += encode("".join(f"{text}\n" for _, text in files))
    ids += [marks["prefix"], *encode(prefix), marks["suffix"], *encode(suffix)]
    return [*ids, marks["middle"], *encode(begun)]
