"""A server with a small model and one that knows tools."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soaking.server import Server, serving

from sparsekv_cli.models.sources.locate import resolve_model

TOOLS = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M"  # the model that knows tools


def serving_both(small: str, tools: str) -> AbstractContextManager[Server]:
    """A server whose models are called small and tools, while the block runs."""
    models = [word for name in (small, tools) for word in ("-m", str(resolve_model(name)))]
    return serving(*models, "-a", "small", "-a", "tools", "--temp", "0")
