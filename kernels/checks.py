"""Checks of a launcher's arguments, before a kernel gets their pointers."""

import torch


def check(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device,
    *,
    strided: bool = False,
) -> None:
    """Raises ValueError unless ``x`` has the expected type, shape (None: any size) and device.

    strided: only the last dimension must be contiguous, otherwise the whole tensor.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}: expected {' or '.join(map(str, dtypes))}")
    if x.dim() != len(shape) or any(
        size is not None and size != found for size, found in zip(shape, x.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected ({wanted})")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}: expected {device}")
    contiguous = x.shape[-1] < 2 or x.stride(-1) == 1 if strided else x.is_contiguous()
    if not contiguous:
        what = "in its last dimension" if strided else "throughout"
        raise ValueError(f"{name} has strides {x.stride()}: expected contiguous {what}")


def check_on_host(
    name: str, x: torch.Tensor, shape: tuple[int | None, ...], device: torch.device
) -> None:
    """Raises ValueError unless ``x`` is f16 host memory that ``device`` can access."""
    check(name, x, torch.float16, shape, torch.device("cpu"), strided=True)
    if device.type == "cuda" and x.numel() and not x.is_pinned():  # an empty tensor is not pinned
        raise ValueError(f"{name} is pageable: expected pinned memory")
