"""The buffers through which a decode step on the device exchanges data with the host."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from sparsekv_cli.cache.store import padded
from sparsekv_cli.device.choosing import Drawing, Settings, choose
from sparsekv_cli.kernels.attention.arrivals import none_arrived
from sparsekv_cli.kernels.attention.decode import Attended
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.sampling.plain import Outcome


class StepBuffers:
    """Tensors of a step of B rows. They keep their addresses, because captured graphs need that.

    Tensors on the host are pinned if there is a GPU, so that copies are asynchronous. x: f32 (B,
    n_embd), the residual stream. y: f32 (B, n_embd), the part that is still to be added to it. pos,
    n, budget, arrived: see StepNumbers in device/cache.py.
    """

    def __init__(self, hparams: HParams, n_rows: int, device: torch.device) -> None:
        h = hparams
        self.n_rows = n_rows
        self._h = h
        self._device = device
        self.host_x, self.x = self._both((n_rows, h.n_embd), torch.float32)
        self.y = torch.zeros_like(self.x)
        # Each begins at a multiple of 16 bytes, because Triton compiles for such multiples.
        self._host_numbers, self._numbers = self._both((3, -(-n_rows // 4) * 4), torch.int32)
        self.pos, self.n, self.budget = self._numbers[:, :n_rows]
        self.arrived = none_arrived(n_rows, max(each.n_head for each in h.layers), device)
        sizes = {
            2 * each.n_head * each.head_dim + each.n_head_kv * (2 * each.head_dim + each.value_dim)
            for each in h.layers
        }
        self._host_packed, self._packed = self._both((n_rows * max(sizes),), torch.float32)
        wide = n_rows * max(each.n_head * each.value_dim for each in h.layers)
        wider = n_rows * max(each.n_head * (each.value_dim + 1) for each in h.layers)
        self._attended = torch.zeros(wide, dtype=torch.float32, device=device)
        self._from_host, self._received = self._both((wider,), torch.float32)
        self._host_logits = self._on_host((n_rows, h.n_vocab), torch.float32)
        self._host_settings, self._settings = self._both((n_rows, 6), torch.float64)
        self._host_chosen = self._on_host((n_rows, 2), torch.float64)

    def _on_host(self, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, pin_memory=self._device.type == "cuda")

    def _both(self, shape: tuple[int, ...], kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zeros on the host and on the device."""
        return self._on_host(shape, kind), torch.zeros(shape, dtype=kind, device=self._device)

    def set_numbers(self, b: int, pos: int, budget: int) -> None:
        """Sets the numbers of sequence b, which ``upload`` copies."""
        self._host_numbers[:, b] = torch.tensor([pos, pos + 1, budget], dtype=torch.int32)

    def set_chain(self, b: int, settings: Settings) -> None:
        """Sets the settings by which ``choose`` chooses for sequence b."""
        self._host_settings[b] = torch.tensor(settings, dtype=torch.float64)

    def upload(self) -> None:
        """Copies the embeddings and numbers of a step to the device."""
        self.x.copy_(self.host_x, non_blocking=True)
        self._numbers.copy_(self._host_numbers, non_blocking=True)

    def _layer_inputs(self, packed: torch.Tensor, i: int) -> list[torch.Tensor]:
        """Returns q, k, v, q_nope, k_nope of layer i, f32 (B, heads, d), in order of memory."""
        sizes, n_rows = self._h.layers[i], self.n_rows
        q, k, v = (
            (sizes.n_head, sizes.head_dim),
            (sizes.n_head_kv, sizes.head_dim),
            (sizes.n_head_kv, sizes.value_dim),
        )
        parts, at = [], 0
        for heads, width in (q, k, v, q, k):
            size = n_rows * heads * width
            parts.append(packed[at : at + size].view(n_rows, heads, width))
            at += size
        return parts

    def inputs(self, i: int) -> list[torch.Tensor]:
        return self._layer_inputs(self._packed, i)

    def download_inputs(self) -> None:
        self._host_packed.copy_(self._packed, non_blocking=True)

    def host_inputs(self, i: int, b: int) -> list[np.ndarray]:
        """Returns row b's inputs of layer i in the layout of an AttnInput on the host."""
        rows = [part[b].numpy()[:, None] for part in self._layer_inputs(self._host_packed, i)]
        return [_widened(row) for row in rows]

    def attended(self, i: int) -> torch.Tensor:
        """Returns layer i's attention output, f32 (B, H, d_v)."""
        shape = (self.n_rows, self._h.layers[i].n_head, self._h.layers[i].value_dim)
        return self._attended[: math.prod(shape)].view(shape)

    def _part(self, flat: torch.Tensor, i: int) -> Attended:
        """Returns layer i's attention output and log-sum-exp in ``flat``, one after the other."""
        n_head, d_v = self._h.layers[i].n_head, self._h.layers[i].value_dim
        n = self.n_rows * n_head
        out, lse = flat[: n * (d_v + 1)].split((n * d_v, n))
        return Attended(out.view(self.n_rows, n_head, d_v), lse.view(self.n_rows, n_head))

    def from_host(self, i: int) -> Attended:
        """Returns the place for the host's results of layer i."""
        return self._part(self._from_host, i)

    def upload_attended(self, i: int, b: int) -> None:
        """Copies the host's results for sequence b to the device. They are layer i's attention."""
        self.attended(i)[b].copy_(self.from_host(i).out[b], non_blocking=True)

    def upload_part(self, i: int) -> Attended:
        """Copies the host's results and their log-sum-exp to the device, as a part of attention."""
        size = self.n_rows * self._h.layers[i].n_head * (self._h.layers[i].value_dim + 1)
        self._received[:size].copy_(self._from_host[:size], non_blocking=True)
        return self._part(self._received, i)

    def download_logits(self, logits: torch.Tensor) -> None:
        self._host_logits.copy_(logits, non_blocking=True)

    def logits(self, order: Sequence[int]) -> np.ndarray:
        """Returns f32 (B, n_vocab) of the step, which the caller may keep. Waits for the step.

        order: for each sequence of the step, its number among the caller's.
        """
        self._wait()
        logits = np.empty((len(order), self._host_logits.shape[1]), np.float32)
        logits[order] = self._host_logits[: len(order)].numpy()
        return logits

    def choose(self, logits: torch.Tensor, drawing: Drawing) -> None:
        """Chooses the next tokens of a step by the settings of ``set_chain``."""
        self._settings.copy_(self._host_settings, non_blocking=True)
        self._host_chosen.copy_(choose(logits, self._settings, drawing), non_blocking=True)

    def outcomes(self, order: Sequence[int], are_chosen: Sequence[bool]) -> list[Outcome]:
        """Returns for each sequence the token that the device chose, or its logits.

        If the highest logit is not finite, all logits have its value. A sampler refuses it.
        """
        self._wait()
        found: list[Outcome] = [0] * len(order)
        for row, b in enumerate(order):
            token, highest = self._host_chosen[row].tolist()
            if not are_chosen[b]:
                found[b] = self._host_logits[row].numpy().copy()
            elif math.isfinite(highest):
                found[b] = int(token)
            else:
                found[b] = np.full(self._host_logits.shape[1], highest, np.float32)
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _widened(rows: np.ndarray) -> np.ndarray:
    """Returns (heads, 1, d) with zeros up to whole vectors, as kernels of the host read them."""
    width = rows.shape[-1]
    if padded(width) == width:
        return rows
    return np.pad(rows, ((0, 0), (0, 0), (0, padded(width) - width)))
