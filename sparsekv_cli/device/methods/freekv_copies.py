"""Recall by the copy engine through two buffers, as the FreeKV paper has it (4.2 streamed recall).

A page is copied from pinned memory into one buffer while the page before it is converted from the
other. The host issues every copy, so it must know which pages are missing: it waits for the choice,
and the step cannot be captured in a graph.
"""

from __future__ import annotations

import torch

from sparsekv_cli.kernels.freekv.pages import Layout, PageTensors

N_BUFFER = 2


class CopyRecall:
    """The buffers and the stream of the copies of one layer."""

    def __init__(self, unit: int, device: torch.device) -> None:
        """unit: elements of a page's K and V in one kv head."""
        self._buffers = torch.empty(N_BUFFER, unit, dtype=torch.float16, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, pages: PageTensors, layout: Layout) -> None:
        """What kernels/freekv/recall.py fetch_pages does, on the present stream and that of the
        copies.
        """
        converted: list[torch.cuda.Event | None] = [None] * N_BUFFER
        if self._stream is not None:  # the pool is written, and the buffers are free
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        slots, chosen = pages.slots[0].tolist(), pages.chosen[0].tolist()
        for i, (g, place) in enumerate(pages.missing[0].nonzero().tolist()):
            buffer, at = self._buffers[i % N_BUFFER], i % N_BUFFER
            self._copy(pages.pool[0, chosen[g][place] - layout.n_sink, g], buffer, converted[at])
            resident = layout.n_sink + layout.n_ring + slots[g][place]
            p, d, d_v = pages.k.shape[2], pages.k.shape[4], pages.v.shape[4]
            pages.k[0, resident, :, g].copy_(buffer[: p * d].view(p, d))
            pages.v[0, resident, :, g].copy_(buffer[p * d :].view(p, d_v))
            if self._stream is not None:
                converted[at] = torch.cuda.current_stream(self._stream.device).record_event()
        pages.missing.zero_()

    def _copy(
        self, source: torch.Tensor, buffer: torch.Tensor, free: torch.cuda.Event | None
    ) -> None:
        """Copies when the buffer is free; the present stream waits for it."""
        if self._stream is None:
            buffer.copy_(source)
            return
        present = torch.cuda.current_stream(self._stream.device)
        if free is not None:
            self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            buffer.copy_(source, non_blocking=True)
            present.wait_event(self._stream.record_event())

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes
