"""Notes the launches of decode steps: kernels of Triton, and what torch launches.

A step's launches do not depend on what kernels compute. So they can be counted without a GPU, where
kernels are noted and left undone, and operations of torch run on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from sparsekv_cli.device.graphs import Steps
from sparsekv_cli.device.streams import SideStream

# Operations that launch nothing: views, and memory that is only taken.
QUIET = {
    "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "empty_strided",
    "expand", "lift_fresh", "new_empty", "new_empty_strided", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "_local_scalar_dense",
}  # fmt: skip


class Launch(NamedTuple):
    """kernel: its name, or torch's operation. beside: on a second stream. captured: by a graph."""

    kernel: str
    beside: bool
    captured: bool


class LaunchRecord(TorchDispatchMode):
    """``launches`` of all that runs while this is the mode, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.beside = self.captured = False

    def note(self, kernel: str) -> None:
        self.launches.append(Launch(kernel, self.beside, self.captured))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in QUIET:
            self.note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded(*, run: bool = False) -> Iterator[list[Launch]]:
    """The launches within this block, as they come. run: whether kernels of Triton are run, too.

    If not, Triton must not be interpreting (TRITON_INTERPRET).
    """
    record = LaunchRecord()
    kinds = (InterpretedFunction, triton.runtime.JITFunction)
    fork, take_step, launches = SideStream.fork, Steps.run, [kind.run for kind in kinds]

    @contextmanager
    def forked(side: SideStream) -> Iterator[None]:
        with fork(side):
            record.beside = True
            yield
            record.beside = False

    def stepped(steps: Steps, *args: Any, **kwargs: Any) -> None:
        record.captured = True
        take_step(steps, *args, **kwargs)
        record.captured = False

    def noted(launch: Any) -> Any:
        def note(kernel: Any, *args: Any, **kwargs: Any) -> None:
            record.note(kernel.fn.__name__.removeprefix("_").removesuffix("_kernel"))
            if run:
                with _disable_current_modes():  # what the interpreter computes with tensors
                    launch(kernel, *args, **kwargs)

        return note

    SideStream.fork, Steps.run = forked, stepped  # type: ignore[method-assign]
    for kind, launch in zip(kinds, launches, strict=True):
        kind.run = noted(launch)
    try:
        with record:
            yield record.launches
    finally:
        SideStream.fork, Steps.run = fork, take_step  # type: ignore[method-assign]
        for kind, launch in zip(kinds, launches, strict=True):
            kind.run = launch
