"""A model made wider with zeros: the same logits, in rows that every weight format can hold.

Rows of 576, as those of SmolLM2-135M, are no multiple of the 256 that a block of the K formats has.
Embeddings, hidden states and heads get zeros behind them. RMSNorm takes the mean of the squares
over E' instead of E values, of which the added ones are 0: with r = E / E', mean' = r * mean. So

    x * w' / sqrt(mean' + eps') = x * w / sqrt(mean + eps)   for   w' = sqrt(r) * w, eps' = r * eps.

An added query head attends to an added kv head, whose values are zeros: it gives zeros.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "models"))

import numpy as np
from gguf import GGUFWriter, LlamaFileType
from reference_decoder import ReferenceModel, model_logits
from tiny_models import copy_metadata, write_all

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import open_gguf


class Sizes(NamedTuple):
    """n_embd: E; n_q, n_kv: columns of all query heads and of all kv heads."""

    n_embd: int
    n_q: int
    n_kv: int

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """What a tensor's ``shape`` becomes; ValueError for a tensor that has no rule."""
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part.endswith("_norm"):
            return (self.n_embd,)
        rules = {
            "token_embd": (shape[0], self.n_embd),
            "output": (shape[0], self.n_embd),
            "rope_freqs": tuple(shape),
            "attn_q": (self.n_q, self.n_embd),
            "attn_k": (self.n_kv, self.n_embd),
            "attn_v": (self.n_kv, self.n_embd),
            "attn_output": (self.n_embd, self.n_q),
            "ffn_gate": (shape[0], self.n_embd),
            "ffn_up": (shape[0], self.n_embd),
            "ffn_down": (self.n_embd, shape[-1]),
        }
        if part not in rules or not name.endswith(".weight"):
            raise ValueError(name)
        return rules[part]


def widen(source: Path, target: Path, width: int, dtype: type[np.floating] = np.float16) -> None:
    """Writes ``source`` with hidden states of ``width``; its matrices in ``dtype``.

    SparseKVError for a model that cannot be widened so.
    """
    open_gguf(source).close()  # a file that is missing or broken is refused in a line
    model = ReferenceModel.open(source)
    if model.arch != "llama":
        raise SparseKVError(f"{source}: architecture {model.arch} cannot be widened, only llama")
    n_embd = model.key("embedding_length", 0)
    heads = [model.n_head * width, model.n_head_kv * width]
    if width < n_embd or any(n % n_embd for n in heads):
        raise SparseKVError(
            f"width {width}: {model.n_head} and {model.n_head_kv} heads of {n_embd} columns do not "
            "become whole numbers of heads; give a multiple of them"
        )
    sizes = Sizes(width, *(n // n_embd * model.head_dim for n in heads))
    scale = n_embd / width
    changed = {
        "llama.embedding_length": width,
        "llama.attention.head_count": heads[0] // n_embd,
        "llama.attention.head_count_kv": heads[1] // n_embd,
        "llama.attention.layer_norm_rms_epsilon": model.epsilon * scale,
        "general.file_type": int(
            LlamaFileType.MOSTLY_F16 if dtype is np.float16 else LlamaFileType.ALL_F32
        ),
    }
    writer = GGUFWriter(target, model.arch)
    copy_metadata(model.reader, writer, changed)
    for name in model.tensors:
        values = model.tensor(name)
        try:
            shape = sizes.shape(name, values.shape)
        except ValueError:
            raise SparseKVError(f"{source}: no rule to widen the tensor {name}") from None
        behind = [(0, new - old) for old, new in zip(values.shape, shape, strict=True)]
        padded = np.pad(values, behind)
        if name.endswith("_norm.weight"):
            padded *= np.float32(math.sqrt(scale))
        writer.add_tensor(name, padded.astype(dtype if padded.ndim == 2 else np.float32))
    write_all(writer)


def largest_difference(source: Path, target: Path, ids: Sequence[int]) -> tuple[float, float]:
    """Between the logits of two files, by a plain f32 decoder; and the logits' deviation."""
    expected, actual = (model_logits(ReferenceModel.open(path), ids) for path in (source, target))
    return float(np.abs(expected - actual).max()), float(expected.std())
