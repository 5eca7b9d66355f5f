"""Rotary position embedding: angles per position, with linear, YaRN, Llama 3 and LongRoPE scaling.

Sources of the formulas: RoFormer (arXiv:2104.09864), and YaRN (arXiv:2309.00071) in the form of
ggml_rope_yarn. Names and defaults of the keys: llama.cpp's load_hparams and constructor of
llama_context. All code after loading uses half-split pairs (i, i + n_rot/2). The file may use
other pairs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsekv_cli.cache.spec import WINDOW
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.gguf.keys import MAX_TOKENS, ModelKeys
from sparsekv_cli.settings.changes import ModelChanges, as_float32

ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True)
class RopeParams:
    """The file's parameters of the rotary embedding."""

    freq_base: float = 10000.0  # unscaled angle of pair i: freq_base ** (-2 i / n_rot)
    # One of ROPE_SCALINGS. Files of Llama 3 and LongRoPE may have tensors that divide the angles
    # instead.
    scaling: str = "linear"
    # ratio of the stretched context to the original one; see ``freq_scale``
    factor: float = 1.0
    n_ctx_original: int = 0  # tokens of the original context
    n_ctx_ramp: int = 0  # the user's, which YaRN's ramp depends on; 0: ``n_ctx_original``
    # weight of YaRN's blend of stretched and original angles; by default 1 for yarn, else 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0  # ``rope.scaling.attn_factor``
    yarn_attn_factor: float = 1.0  # ``rope.scaling.yarn_attn_factor``
    beta_fast: float = 32.0  # rotations within n_ctx_original at the end of YaRN's ramp
    beta_slow: float = 1.0  # rotations within n_ctx_original at the start of YaRN's ramp
    # ``rope.scaling.yarn_log_multiplier``, which reduces YaRN's magnitude
    log_multiplier: float = 0.0

    @property
    def n_ctx_native(self) -> int:
        """The tokens of the context that is stretched."""
        return self.n_ctx_ramp or self.n_ctx_original

    @property
    def freq_scale(self) -> float:
        """The factor of each interpolated angle: 1 / factor, or 1 without scaling."""
        return 1.0 if self.scaling == "none" else 1.0 / self.factor

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin.

        With ext_factor = 0 it is yarn_attn_factor * attn_factor. Otherwise llama.cpp replaces
        yarn_attn_factor by m(1) / m(log_multiplier) / (1 + 0.1 ln f). Here m(x) = 1 + 0.1 x ln f
        for f > 1, and else 1. Its rope kernel multiplies by (1 + 0.1 ln f) again.
        """
        if self.ext_factor == 0.0:
            return self.yarn_attn_factor * self.attn_factor
        stretched = 0.1 * math.log(max(1.0, 1.0 / self.freq_scale))
        return (1.0 + stretched) / (1.0 + self.log_multiplier * stretched) * self.attn_factor


def latent_scale(rope: RopeParams, stated: float, key_dim: int) -> float:
    """Returns the softmax's factor. Source: llama.cpp's deepseek2.cpp.

    It is m^2 / sqrt(key_dim) with m = a (1 + s) (1 + u s) and s = 0.1 ln f. Here f is the factor of
    the context. a (1 + s) is the magnitude of the rotated dims; without YaRN, a is. stated:
    ``rope.scaling.yarn_log_multiplier``, which is u / 10 in files of this architecture.
    """
    stretched = -0.1 * math.log(rope.freq_scale)
    m = rope.magnitude * (1.0 + 10.0 * stated * stretched)
    if rope.ext_factor == 0.0:
        m *= 1.0 + stretched
    return m * m / math.sqrt(key_dim)


def read_rope(
    keys: ModelKeys, n_ctx_train: int, log_multiplier: float, changes: ModelChanges
) -> RopeParams:
    """Returns a file's parameters, with the user's changes.

    They are put together as llama.cpp's constructor of llama_context does it.
    """
    name = "rope.scaling.type"
    scaling = keys.get(name) if name in keys else "linear"
    if not isinstance(scaling, str):
        raise keys.mistyped(name, "string")
    if scaling not in ROPE_SCALINGS:
        supported = ", ".join(ROPE_SCALINGS)
        raise keys.unsupported(name, f"is {scaling[:40]!r}; supported are {supported}")
    old_key = "rope.scale_linear"
    name = "rope.scaling.factor" if "rope.scaling.factor" in keys else old_key
    factor = keys.number(name, low=0.0, default=0.0)
    tiny = float(np.finfo(np.float32).tiny)
    if 0.0 < factor < tiny:
        raise keys.fail(name, f"is {factor:g}; it must be at least {tiny:g}")
    scaling = scaling if changes.rope_scaling == "auto" else changes.rope_scaling

    def stated(value: float, name: str, low: float, default: float) -> float:
        """Returns the user's number, else the file's; negative ones are not set."""
        own = keys.number(f"rope.scaling.yarn_{name}", low=low, default=default)
        return as_float32(value) if value >= 0 else own

    ext_factor = stated(changes.yarn_ext_factor, "ext_factor", -math.inf, -1.0)
    freq_base = keys.number("rope.freq_base", low=1.0, default=10000.0)
    rope = RopeParams(
        freq_base=as_float32(changes.rope_freq_base) or freq_base,
        scaling=scaling,
        factor=as_float32(changes.scale) or factor or 1.0,  # llama.cpp: 0 means not set
        n_ctx_original=keys.integer(
            "rope.scaling.original_context_length", 1, MAX_TOKENS, default=n_ctx_train
        ),
        n_ctx_ramp=changes.yarn_orig_ctx,
        ext_factor=ext_factor if ext_factor >= 0 else float(scaling == "yarn"),
        attn_factor=keys.number("rope.scaling.attn_factor", low=0.0, default=1.0),
        yarn_attn_factor=stated(changes.yarn_attn_factor, "attn_factor", 0.0, 1.0),
        beta_fast=stated(changes.yarn_beta_fast, "beta_fast", 0.0, 32.0),
        beta_slow=stated(changes.yarn_beta_slow, "beta_slow", 0.0, 1.0),
        log_multiplier=log_multiplier,
    )
    if rope.ext_factor and not (rope.freq_base > 1 and rope.beta_fast > 0 and rope.beta_slow > 0):
        raise keys.fail(
            "rope.freq_base",
            f"is {rope.freq_base:g} with yarn betas {rope.beta_fast:g} and {rope.beta_slow:g}; "
            "YaRN needs a base above 1 and betas above 0",
        )
    unused = {"yarn_attn_factor": "YaRN sets it, unless --yarn-ext-factor is 0"}
    if not rope.ext_factor:
        why = "YaRN is off: use --rope-scaling yarn"
        unused = dict.fromkeys(("yarn_beta_slow", "yarn_beta_fast"), why)
    if rope.freq_scale == 1.0:
        names = ["rope_scaling", "yarn_orig_ctx", "yarn_beta_slow", "yarn_beta_fast"]
        names += ["yarn_ext_factor"] * (rope.yarn_attn_factor == 1.0)
        unused |= dict.fromkeys(names, "nothing is stretched: use --rope-scale")
    for name, why in unused.items():
        if getattr(changes, name) not in (getattr(ModelChanges, name), "none"):
            raise SparseKVError(f"{keys.file.path}: {name} has no effect, because {why}")
    return rope


def read_window_rope(
    keys: ModelKeys, architecture: Architecture, rope: RopeParams, of_file: RopeParams
) -> RopeParams | None:
    """Returns the RoPE of the window layers, or None if it is ``rope``.

    They keep the base and the factor of the file, ``of_file``. Source: llama.cpp.
    """
    windows, name = architecture.windows, "rope.freq_base_swa"
    if windows is None or not windows.rotates_full:
        return None
    if not windows.scaled:
        return RopeParams(freq_base=of_file.freq_base, n_ctx_original=of_file.n_ctx_original)
    scaling = "none" if windows.freq_base else of_file.scaling
    own = replace(rope, scaling=scaling, factor=of_file.factor)
    base = keys.number(name, low=1.0, default=windows.freq_base or of_file.freq_base)
    own = replace(own, freq_base=base)
    return None if own == rope and not windows.freq_base else own


def check_sections(keys: ModelKeys, architecture: Architecture) -> None:
    """Raises UnsupportedModelError for M-RoPE in an architecture that pairs 2i and 2i + 1.

    With M-RoPE llama.cpp pairs i and i + n_rot/2 in such a file. Other files have that pairing
    anyway, and then M-RoPE is RoPE for text.
    """
    name = "rope.dimension_sections"
    sections = keys.get(name) if name in keys else ()
    if architecture.rope_interleaved and isinstance(sections, np.ndarray) and any(sections[1:2]):
        raise keys.unsupported(name, "is not 0: M-RoPE cannot be run with this architecture")


def inverse_frequencies(
    n_rot: int, rope: RopeParams, freq_factors: np.ndarray | None = None
) -> np.ndarray:
    """Returns the scaled angle per position of each pair in radians, f64 (n_rot/2,).

    freq_factors: f32 (n_rot/2,), divisors of the unscaled angles (Llama 3).
    """
    pair = np.arange(n_rot // 2, dtype=np.float64)
    theta = rope.freq_base ** (-2.0 * pair / n_rot)
    if freq_factors is not None:
        theta = theta / freq_factors.astype(np.float64)
    interpolated = theta * rope.freq_scale
    if rope.ext_factor == 0.0:
        return interpolated
    low, high = (
        n_rot * math.log(rope.n_ctx_native / (turns * 2 * math.pi)) / (2 * math.log(rope.freq_base))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    low, high = max(0.0, math.floor(low)), min(n_rot - 1.0, math.ceil(high))
    ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    ramp *= rope.ext_factor
    return interpolated * (1.0 - ramp) + theta * ramp


class RopeTables:
    """The tables of full layers and of window layers. Both may be one object."""

    def __init__(self, full: Any, window: Any) -> None:
        self.full, self.window = full, window

    def of(self, kind: str) -> Any:
        """Returns the table of a layer of this kind."""
        return self.window if kind == WINDOW else self.full

    @property
    def both(self) -> tuple[Any, Any]:
        return self.full, self.window

    def reserve(self, n_positions: int) -> None:
        """Fills both tables for at least ``n_positions`` positions."""
        self.full.reserve(n_positions)
        self.window.reserve(n_positions)


class RopeTable:
    """The cosines and sines of the positions, and the factors of the queries.

    cos, sin: f32 (positions, n_rot/2).
    q_scale: f32 (positions,), 1 + temperature ln(1 + floor(position / n_ctx_original)). Source:
    llama.cpp's llm_graph_input_attn_temp.
    """

    def __init__(
        self,
        n_rot: int,
        rope: RopeParams,
        freq_factors: np.ndarray | None = None,
        temperature: float = 0.0,
    ) -> None:
        self.theta = inverse_frequencies(n_rot, rope, freq_factors)
        self.magnitude = rope.magnitude
        self.cos = np.empty((0, n_rot // 2), np.float32)
        self.sin = self.cos
        self.q_scale = np.empty(0, np.float32)
        self._temperature, self._n_original = temperature, rope.n_ctx_original

    def reserve(self, n_positions: int) -> None:
        """Fills at least ``n_positions`` rows. The tables grow by at least a quarter."""
        have = len(self.cos)
        if n_positions <= have:
            return
        stop = max(n_positions, have + have // 4, 512)
        positions = np.arange(have, stop, dtype=np.float64)
        angles = np.outer(positions, self.theta)
        cos = (np.cos(angles) * self.magnitude).astype(np.float32)
        sin = (np.sin(angles) * self.magnitude).astype(np.float32)
        self.cos = np.concatenate([self.cos, cos])
        self.sin = np.concatenate([self.sin, sin])
        turns = np.log1p(positions // self._n_original) if self._temperature else 0 * positions
        q_scale = (1.0 + self._temperature * turns).astype(np.float32)
        self.q_scale = np.concatenate([self.q_scale, q_scale])


def rotate_heads(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Applies RoPE to half-split heads (heads, T, d). Returns rows of the same shape and type.

    cos, sin: f32 (T, n_rot/2) of the rows' positions. Dims from n_rot on stay unchanged.
    """
    half, rows = cos.shape[1], as_f32(heads)
    a, b, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    turned = np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)
    return as_type_of(heads, turned)
