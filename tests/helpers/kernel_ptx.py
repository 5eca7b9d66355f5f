"""What a kernel's PTX tells of its speed: how wide it reads, what it multiplies with, its loop."""

import re
from collections import Counter
from typing import Any

ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-zA-Z_]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[bufs](\d+)\b")
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?[a-z]\w*(?:\.[\w:]+)*\s[^;]*;", re.MULTILINE)
LABEL = re.compile(r"^(\$L__BB\w+):", re.MULTILINE)
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);")


def read_ptx(ptx: str) -> dict[str, Any]:
    """loads, stores: how many of each number of bytes; cp_async, mma, wgmma: how many; loop:
    instructions of the longest loop that holds no other (0: there is none); barriers: those behind
    the first load from memory and ahead of the last store to it."""
    widths: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for kind, n_vector, bits in ACCESS.findall(ptx):
        widths[kind][int(n_vector or 1) * int(bits) // 8] += 1
    return {
        "loads": dict(widths["ld"]),
        "stores": dict(widths["st"]),
        "cp_async": ptx.count("cp.async.c"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "wgmma": len(re.findall(r"\bwgmma\.mma_async", ptx)),
        "barriers": _between(ptx).count("bar.sync"),
        "loop": max((len(INSTRUCTION.findall(body)) for body in _innermost_loops(ptx)), default=0),
    }


def _between(ptx: str) -> str:
    """The text from the first load to the last store."""
    return ptx[ptx.find("ld.global") : ptx.rfind("st.global")]


def _innermost_loops(ptx: str) -> list[str]:
    """The text from each label to the branch back to it, where no other such text lies within."""
    starts = {match[1]: match.end() for match in LABEL.finditer(ptx)}
    loops = [
        (starts[branch[1]], branch.end())
        for branch in BRANCH.finditer(ptx)
        if starts.get(branch[1], len(ptx)) < branch.start()
    ]
    return [
        ptx[begin:end]
        for begin, end in loops
        if not any(
            (begin, end) != other and begin <= other[0] and other[1] <= end for other in loops
        )
    ]
