"""A server with a small model and one that knows tools."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparsekv_cli.errors import SparseKVError

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M"  # the model that knows tools


@contextlib.contextmanager
def serving(models: Sequence[Path], *options: str) -> Iterator[str]:
    """The address of a server with models named small and tools, while the block runs."""
    named = [word for path in models for word in ("-m", str(path))]
    command = [sys.executable, "-m", "sparsekv_cli", "serve", *named, "-a", "small", "-a", "tools"]
    server = subprocess.Popen(
        [*command, "--port", "0", "--temp", "0", *options], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    lines = []
    try:
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+[^/\s]", line):
                break
        else:
            raise SparseKVError(f"serve: {''.join(lines[-3:])}")
        with tempfile.TemporaryFile("w") as log:
            copying = subprocess.Popen(["cat"], stdin=server.stderr, stdout=log)  # nothing blocks
            yield found[0]
            server.terminate()
            copying.wait()
    finally:
        server.terminate()
        server.wait()
