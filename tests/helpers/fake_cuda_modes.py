"""What fake_cuda.py sees of a program: torch's operators, Triton's launches, places of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from memory_ranges import EMPTY, Ranges
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

# Operators whose result's shape, or Python's, depends on what a tensor holds.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "unique_dim"}
EMPTIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@contextmanager
def plain() -> Iterator[None]:
    """Torch as it is."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def borrowed(cuda: Any, arguments: Any) -> Callable[[], Any]:
    """Gives ``arguments`` again later, without keeping their tensors' memory, as a graph does."""

    def lend(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or (block := cuda.block(x)) is None:
            return lambda: x
        shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        offset = x.storage_offset()

        def tensor() -> torch.Tensor:
            if block.is_free and block.pool is None:
                raise AssertionError("a graph replays on memory that was given back")
            return cuda.tensor_on(block, shape, offset=offset)

        return tensor

    lent = tree_map(lend, arguments)
    return lambda: tree_map(lambda give: give(), lent)


class Operators(TorchDispatchMode):
    """Every operator of torch is executed on the host and recorded where CUDA would execute it."""

    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with plain():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        cuda = self.cuda
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {cuda.place(x) for x in inputs if x.numel() or x.dim()} | {cuda.placing}
        name = func._schema.name.removeprefix("aten::")
        if not places & {"device", "pinned"}:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if name == "copy_" and len({cuda.place(x) for x in inputs}) > 1:
            return self._copy(*args, **kwargs)
        on_device = "device" in places
        if on_device and (name in WAITING or _looks_at_flags(name, args)):
            cuda.wait_for(cuda.stream, f"{name}, for which the host waits,")
        result = None
        if not (cuda.capturing and on_device and written):
            result = func(*args, **kwargs)
        if not written:
            storages = {x.untyped_storage()._cdata for x in inputs}
            outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            if outputs and all(x.untyped_storage()._cdata in storages for x in outputs):
                return result  # views
            place = cuda.placing or ("device" if on_device else "pageable")
            fresh = not (name in EMPTIES or (cuda.capturing and on_device))
            if place != "pageable":
                result = tree_map(
                    lambda x: cuda.new(x, place, filled=fresh) if _is_tensor(x) else x, result
                )
            if name in EMPTIES:
                return result
            written = [x for x in tree_leaves(result) if _is_tensor(x)]
            into = written
        else:
            into = []
        reads = _ranges(x for x in inputs if not any(x is y for y in written))
        if not on_device:
            cuda.host_work(name, reads, _ranges(written))
            return result
        if cuda.capturing:
            given = borrowed(cuda, (args, kwargs, into))

            def run() -> None:
                with plain():
                    args, kwargs, into = given()
                    results = [x for x in tree_leaves(func(*args, **kwargs)) if _is_tensor(x)]
                    for to, x in zip(into, results, strict=False):
                        to.copy_(x)
        else:

            def run() -> None:
                """It is done."""

        cuda.launch(name, run, reads, _ranges(written))
        return written[0] if result is None else result

    def _copy(self, to: Any, x: Any, non_blocking: bool = False) -> Any:
        """A copy between the host and the device."""
        cuda = self.cuda
        host = x if cuda.place(to) == "device" else to
        if "device" not in {cuda.place(to), cuda.place(x)}:
            to.copy_(x)
            cuda.host_work("copy_", Ranges.of_tensor(x), Ranges.of_tensor(to))
            return to
        waits = not non_blocking or cuda.place(host) == "pageable"
        if waits and cuda.capturing:
            cuda.refuse("a copy for which the host waits, of or to pageable memory or blocking,")
        given = borrowed(cuda, (to, x))

        def run() -> None:
            with plain():
                a, b = given()
                a.copy_(b)

        cuda.launch("copy_", run, Ranges.of_tensor(x), Ranges.of_tensor(to))
        block = cuda.block(host)
        if block is not None and block.torch_knows:
            block.used_by(cuda.stream)
        if waits:
            cuda.wait_for(cuda.stream, "copy_")
        return to


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _ranges(tensors: Any) -> Ranges:
    return Ranges.union(Ranges.of_tensor(x) for x in tensors)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if _is_tensor(x)]
    return found


def _looks_at_flags(name: str, args: Any) -> bool:
    if name not in {"index", "index_put_", "index_put"}:
        return False
    return any(_is_tensor(x) and x.dtype == torch.bool for x in args[1])


class Placement(TorchFunctionMode):
    """Tensors on the device are made in the device's memory, and say that they are there."""

    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cuda, x = dict(kwargs or {}), self.cuda, args[0] if args else None
        if not cuda.sees_tensors:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            of = getattr(func.__self__, "__name__", "")
            if of == "device":
                return torch.device("cuda", 0) if cuda.place(x) == "device" else torch.device("cpu")
            if of == "is_cuda":
                return cuda.place(x) == "device"
            return func(*args, **kwargs)
        if isinstance(x, torch.Tensor):
            if name == "is_pinned":
                return cuda.place(x) == "pinned"
            if name in ("numpy", "__array__") and cuda.place(x) == "device":
                raise TypeError("a tensor on cuda:0 has no numpy array: copy it to the host first")
            if name == "tolist" and cuda.place(x) == "device":
                cuda.wait_for(cuda.stream, "tolist")
            if name in ("to", "cpu", "cuda", "pin_memory"):
                return self._move(name, func, args, kwargs)
        if kwargs.pop("pin_memory", False):
            return self._made("pinned", func, args, kwargs)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        kwargs["device"] = torch.device("cpu")
        place = "device" if torch.device(device).type == "cuda" else "pageable"
        if name in ("tensor", "as_tensor") and place == "device":
            return self._to(func(*args, **kwargs), place, non_blocking=False)
        return self._made(place, func, args, kwargs)

    def _made(self, place: str, func: Any, args: Any, kwargs: Any) -> Any:
        before, self.cuda.placing = self.cuda.placing, place
        try:
            return func(*args, **kwargs)
        finally:
            self.cuda.placing = before

    def _move(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """to, cpu, cuda, pin_memory."""
        x, *rest = args
        cuda, target, others = self.cuda, None, []
        if name in ("cpu", "cuda"):
            target = torch.device(name)
        for each in [*rest, kwargs.pop("device", None)]:
            if isinstance(each, torch.device | str):
                target = torch.device(each)
            elif isinstance(each, torch.Tensor):
                target = torch.device("cuda" if cuda.place(each) == "device" else "cpu")
            elif each is not None:
                others.append(each)
        non_blocking = kwargs.pop("non_blocking", False)
        if others or kwargs:
            x = torch.Tensor.to(x, *others, **kwargs)
        place = cuda.place(x)
        if name == "pin_memory":
            return self._to(x, "pinned", non_blocking=False)
        if target is None or (target.type == "cuda") == (place == "device"):
            return x
        return self._to(x, "device" if target.type == "cuda" else "pageable", non_blocking)

    def _to(self, x: torch.Tensor, place: str, non_blocking: bool) -> torch.Tensor:
        with plain():
            like = torch.empty_like(x)
            to = like if place == "pageable" else self.cuda.new(like, place, filled=False)
        return to.copy_(x, non_blocking=non_blocking)


class Kernels:
    """Every launch of a Triton kernel is recorded with the memory that its programs touch."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda
        self._touched: tuple[list[Any], list[Any]] = [], []

    def __enter__(self) -> None:
        kernels, executors, self._patch = self, interpreter.GridExecutor, pytest.MonkeyPatch()
        call, patched = executors.__call__, self._patch.setattr

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            kernels._launch(executor, call, args, kwargs)

        patched(executors, "__call__", launch)
        # The interpreter's own copies of arguments, in cycles, outlive the launch.
        patched(executors, "_init_args_hst", lambda _, args, kwargs: (args, kwargs))
        patched(executors, "_restore_args_dev", lambda *_: None)
        patched(interpreter, "_interpreter", Watched(interpreter._interpreter, self._touched))

    def __exit__(self, *error: object) -> None:
        self._patch.undo()

    def _launch(self, executor: Any, call: Any, args: Sequence[Any], kwargs: Any) -> None:
        cuda = self.cuda
        name = executor.fn.__name__.strip("_").removesuffix("_kernel")
        with plain():
            for x in (x for x in args if _is_tensor(x)):
                if x.numel() and cuda.place(x) == "pageable":
                    raise AssertionError(f"{name}: an argument lies in pageable memory of the host")
            cuda.launches.append(launch_key(executor, args, kwargs))
            every = list(args), kwargs
            given = borrowed(cuda, every) if cuda.capturing else lambda: every

        def run() -> tuple[Ranges, Ranges]:
            with plain():
                for touched in self._touched:
                    touched.clear()
                args, kwargs = given()
                call(executor, *args, **kwargs)
                return tuple(Ranges.union(_pieces(x)) for x in self._touched)  # type: ignore

        cuda.launch(name, run, EMPTY, EMPTY)


def _pieces(touched: list[tuple[np.ndarray, int]]) -> Iterator[Ranges]:
    sizes = {size for _, size in touched}
    for size in sizes:
        starts = np.unique(np.concatenate([at for at, each in touched if each == size]))
        yield Ranges.of(starts.astype(np.int64), np.full(len(starts), size))


class Watched:
    """The interpreter's accesses to memory, noted in lists of (addresses, bytes each)."""

    def __init__(self, memory: Any, touched: tuple[list[Any], list[Any]]) -> None:
        self._memory, (self._reads, self._writes) = memory, touched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._reads.append((at[mask].ravel(), np.dtype(dtype).itemsize))
        return self._memory.load(at, mask, other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        self._writes.append((at[mask].ravel(), value.dtype.itemsize))
        return self._memory.store(at, value, mask)

    def atomic_cas(self, at: Any, compared: Any, value: Any, sem: Any) -> Any:
        self._writes.append((at.ravel(), value.dtype.itemsize))
        return self._memory.atomic_cas(at, compared, value, sem)

    def atomic_rmw(self, op: Any, at: Any, value: Any, mask: Any, sem: Any) -> Any:
        self._writes.append((at[mask].ravel(), value.dtype.itemsize))
        return self._memory.atomic_rmw(op, at, value, mask, sem)


def launch_key(executor: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
    """A kernel, its grid, and what Triton specialises it for."""

    def kind(x: Any) -> Any:
        if _is_tensor(x):
            return str(x.dtype), x.data_ptr() % 16 == 0
        if isinstance(x, int) and not isinstance(x, bool):
            return "int", x == 1, x % 16 == 0
        return x

    fixed = sorted(kwargs.items(), key=str)  # constants and options
    return executor.fn.__name__, executor.grid, *map(kind, args), *fixed
