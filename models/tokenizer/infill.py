"""Prompts for the text in a gap (fill in the middle), for models that were trained for this.

Control tokens stand before the parts of the prompt. The order is prefix, suffix, middle, as
llama.cpp's server writes it. Other files come first.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer

REPOSITORY, FILE = "project", "file"  # names for a repository and a file without a name


def infill_ids(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    begun: str = "",
) -> list[int]:
    """Returns the ids of a prompt whose answer is the text between ``prefix`` and ``suffix``.

    files: (name, text) of other files. begun: the beginning of the answer. Control tokens are not
    parsed in any of these texts. Raises SparseKVError if the vocabulary has no control tokens for
    gaps.
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
