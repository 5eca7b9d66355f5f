"""Supported architectures, one small file each; add a file and a line of ARCHITECTURES.

A file defines ``ARCHITECTURE``, an ``Architecture``. All share the pre-norm decoder with RMS norm,
grouped-query attention with rotary positions and a gated SiLU feed-forward (decoder.py); what
differs is data.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from sparsekv_cli.errors import UnsupportedModelError

# general.architecture -> module of this package
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True)
class Architecture:
    """What sets one architecture apart from the shared decoder.

    rope_interleaved: the file pairs neighbouring elements (2i, 2i+1) of a head (llama.cpp's NORM);
        otherwise i and i + n_rot/2 (NEOX).
    qk_norm: attn_q_norm and attn_k_norm (RMS norm of each head before the rotation) must be there.
    qkv_bias: attn_{q,k,v}.bias must be there; where it is False they are used if present.
    """

    name: str
    rope_interleaved: bool
    qk_norm: bool = False
    qkv_bias: bool = False


def architecture_of(name: str) -> Architecture:
    """The architecture ``general.architecture`` names; UnsupportedModelError if there is none."""
    if name not in ARCHITECTURES:
        shown = repr(name if len(name) <= 80 else name[:77] + "...")
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"architecture {shown} is not supported; supported are {supported}"
        )
    module = import_module(f"sparsekv_cli.models.architectures.{ARCHITECTURES[name]}")
    return module.ARCHITECTURE
