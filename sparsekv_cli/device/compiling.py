"""Reports kernels that Triton compiles for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def report_compiling(report: Callable[[str, int, int], None]) -> None:
    """From now on tells ``report`` the name of each kernel that Triton has to compile.

    It reports 0 of 0 done, because how many kernels follow depends on what is computed. Triton has
    one such listener; a session that is opened later takes it over.
    """

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            report(src.name, 0, 0)

    triton.knobs.compilation.listener = listen
