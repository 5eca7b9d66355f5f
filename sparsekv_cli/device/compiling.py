"""A word about kernels that Triton compiles for the GPU, when it does and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def report_compiling(report: Callable[[str, int, int], None]) -> None:
    """Tells ``report`` of each kernel that Triton had not kept on disk, by name, from now on.

    0 of 0 are done then: how many there will be depends on what is computed. Triton has one such
    listener; a session that is opened later takes it over.
    """

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            report(src.name, 0, 0)

    triton.knobs.compilation.listener = listen
