"""Reads the hyper-parameters of latent attention (MLA), as DeepSeek-V2 (arXiv:2405.04434) has it.

A token has one row for all heads: rotated dims, and a latent vector c. Head h has the key
(W_k,h c, rotated dims) and the value W_v,h c.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsekv_cli.models.gguf.keys import ModelKeys

MAX_WIDTH = 1 << 24  # limit of the elements of a head or of a latent vector
MOST_SCALE = 1e6  # of the softmax; published models have less than 1


@dataclass(frozen=True)
class LatentParams:
    """Sizes of latent attention. n_rot rotated dims are in addition to ``n_nope``."""

    n_rank: int  # elements of the latent vector c
    n_rank_q: int  # elements of the vector that queries are projected from; 0: the layer's input
    n_nope: int  # dims of a head's key that are not rotated
    n_value: int  # elements of a head's value


def with_latents(
    keys: ModelKeys, layers: Sequence[Any], scale_of: Callable[[int], float]
) -> tuple[Any, ...]:
    """Returns copies of the LayerParams ``layers`` with latent attention.

    scale_of: returns the softmax's factor for the elements of a head's key. Raises SparseKVError
    for missing sizes, and for sizes that contradict each other.
    """
    of, n_rot = _read_latent(keys, layers), layers[0].n_rot
    width, scale = of.n_rank + n_rot, scale_of(of.n_nope + n_rot)
    if not 0 < scale <= MOST_SCALE:
        told = f"gives scores the factor {scale:g}; it must be above 0 and at most {MOST_SCALE:g}"
        raise keys.fail("rope.scaling", told)
    return tuple(
        replace(layer, head_dim=width, value_dim=width, attention_scale=scale, latent=of)
        for layer in layers
    )


def _read_latent(keys: ModelKeys, layers: Sequence[Any]) -> LatentParams:
    """Returns the sizes, which are those of all layers."""
    name = "attention.temperature_scale"
    if keys.number(name, low=0.0, default=0.0):
        raise keys.unsupported(name, "is not 0: it cannot be run with latent attention")
    n_rot = layers[0].n_rot
    n_rank = keys.integer("attention.kv_lora_rank", 1, MAX_WIDTH)
    for name in ("attention.key_length_mla", "attention.value_length_mla"):
        if name not in keys:
            raise keys.fail(
                name,
                "is missing: an old form of such files, whose attn_kv_b is not split; convert or "
                "download the model again",
            )
    key_dim = keys.integer("attention.key_length_mla", 1, MAX_WIDTH)
    if n_rot >= key_dim:
        raise keys.fail(
            "rope.dimension_count", f"is {n_rot}; it must be below key_length_mla = {key_dim}"
        )
    for name, wanted in (("key_length", n_rank + n_rot), ("value_length", n_rank)):
        length = keys.integer(f"attention.{name}", 1, MAX_WIDTH)
        if length != wanted:
            raise keys.fail(
                f"attention.{name}",
                f"is {length}; with kv_lora_rank = {n_rank} and {n_rot} rotated dims it must be "
                f"{wanted}",
            )
    for i, layer in enumerate(layers):
        for name, found, needed in (
            ("head_count", layer.n_head, layers[0].n_head),
            ("head_count_kv", layer.n_head_kv, 1),
        ):
            if found != needed:
                raise keys.fail(
                    f"attention.{name}", f"is {found} in layer {i}; it must be {needed}"
                )
    return LatentParams(
        n_rank=n_rank,
        n_rank_q=keys.integer("attention.q_lora_rank", 0, MAX_WIDTH, default=0),
        n_nope=key_dim - n_rot,
        n_value=keys.integer("attention.value_length_mla", 1, MAX_WIDTH),
    )
