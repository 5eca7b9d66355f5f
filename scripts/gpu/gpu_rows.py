"""Rows that caches are filled with: random ones, one block of them again and again, recorded ones.

python scripts/gpu/gpu_rows.py MODEL FILE    records a layer of the model, of 2048 tokens
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.device.decoder import DeviceDecoder

FILL = torch.randn  # what makes rows; kernels that are only compiled need no random ones
AT_ONCE = 8192  # rows that a cache is given at a time
RECORDED = 2048  # tokens of the recorded layer
TEXT = Path(__file__).resolve().parents[1] / "accuracy" / "texts" / "mixed.txt"


class RandomRows:
    """Normal numbers, other ones for each piece."""

    at_once = AT_ONCE

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(0)

    def piece(self, spec: LayerSpec, first: int, count: int) -> list[torch.Tensor]:
        """Returns q, k and v of the rows first .. first + count - 1, f16 (heads, count, width)."""
        sizes = (spec.n_head, spec.head_dim), (spec.n_head_kv, spec.head_dim)
        return [
            FILL(n, count, d, generator=self._generator, device=self.device).half()
            for n, d in (*sizes, (spec.n_head_kv, spec.value_dim))
        ]


class RepeatedRows(RandomRows):
    """One block of normal numbers for all pieces, so that large caches are there sooner."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._blocks: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def piece(self, spec: LayerSpec, first: int, count: int) -> list[torch.Tensor]:
        key = spec.n_head, spec.n_head_kv, spec.head_dim, spec.value_dim, count
        if key not in self._blocks:
            self._blocks[key] = super().piece(spec, first, count)
        return self._blocks[key]


class RecordedRows:
    """One layer of a model and a text, laid end to end. Its keys are rotated to their places.

    Heads of another model's shape take the recorded heads in turn, group by group.
    """

    def __init__(self, device: torch.device, rows: Mapping[str, np.ndarray]) -> None:
        """rows: q and k before rotation, and v, f16 (heads, T, d), in half-split order."""
        self.device = device
        self._q, self._k, self._v = (torch.from_numpy(rows[x]).to(device) for x in ("q", "k", "v"))
        self.at_once = self._k.shape[1]

    @classmethod
    def load(cls, device: torch.device, path: Path) -> "RecordedRows":
        with np.load(path) as file:
            return cls(device, dict(file))

    def _heads(self, x: torch.Tensor, count: int, group: int) -> torch.Tensor:
        """Returns ``count`` heads: ``group`` of each recorded kv head, the kv heads in turn."""
        n_kv = self._k.shape[0]
        grouped = x.unflatten(0, (n_kv, -1))[:, :group]
        if grouped.shape[1] < group:
            grouped = grouped[:, torch.arange(group) % grouped.shape[1]]
        return grouped[torch.arange(count // group) % n_kv].flatten(0, 1)

    def queries(self, spec: LayerSpec, first: int, count: int) -> torch.Tensor:
        """Returns the rotated queries of the rows from ``first`` on, f32 (count, H, d)."""
        at = torch.arange(first, first + count, device=self.device)
        q = self._heads(self._q, spec.n_head, spec.group)[:, at % self.at_once]
        return _rotated(q.float(), at, spec.theta).transpose(0, 1).contiguous()

    def piece(self, spec: LayerSpec, first: int, count: int) -> list[torch.Tensor]:
        """Returns q, k and v as RandomRows does. ``first`` is a multiple of ``at_once``."""
        at = torch.arange(first, first + count, device=self.device)
        k, v = (self._heads(x, spec.n_head_kv, 1)[:, :count] for x in (self._k, self._v))
        q = self.queries(spec, first, count).transpose(0, 1)
        return [q.half(), _rotated(k.float(), at, spec.theta).half(), v]


def _rotated(x: torch.Tensor, at: torch.Tensor, theta: np.ndarray) -> torch.Tensor:
    """Returns x f32 (heads, T, d), half-split, rotated to the positions ``at``."""
    half = len(theta)
    angles = at[:, None].double() * torch.from_numpy(theta).to(x.device)
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


@contextmanager
def queries_of(rows: Any, decoder: DeviceDecoder, first: int, n_step: int) -> Iterator[None]:
    """Within this block the steps from row ``first`` on have the recorded queries, in all layers.

    Rows of other kinds change nothing. A layer has three launches more.
    """
    if not isinstance(rows, RecordedRows):
        yield
        return
    table = rows.queries(decoder.layer_specs()[0], first, n_step)
    split = decoder._split

    def split_recorded(i: int, normed: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        split(i, normed, inputs)
        at = (decoder._buffers.pos.long() - first).clamp_(0, n_step - 1)  # padding has any position
        torch.index_select(table, 0, at, out=inputs[0])

    decoder._split = split_recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        del decoder._split


def record(model: Path, path: Path, n: int = RECORDED) -> None:
    """Writes q, k and v of a layer in the middle of the model, f16 (heads, n, d)."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    from laid_rows import record as record_layers

    from sparsekv_cli.methods import build_method
    from sparsekv_cli.model import load_model
    from sparsekv_cli.settings.config import SessionConfig

    config = SessionConfig(ctx_size=n)
    with closing(load_model(model, build_method("full", {}), config)) as opened:
        ids = list(opened.tokenizer.encode(TEXT.read_text(encoding="utf-8")))[:n]
        assert len(ids) == n, f"the text has {len(ids)} tokens: expected {n}"
        layers = record_layers(opened, ids)
    q, k, v = (part.astype(np.float16) for part in layers[len(layers) // 2])
    np.savez_compressed(path, q=q, k=k, v=v)


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
