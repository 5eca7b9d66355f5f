"""Dense attention: every query attends to every key (Vaswani et al., arXiv:1706.03762)."""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv_cli.cache.layer import DenseCache, LayerCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods.base import Method


@dataclass(frozen=True)
class Full(Method):
    """The baseline of every comparison."""

    paper: ClassVar[str] = "arXiv:1706.03762"
    description: ClassVar[str] = "dense attention over the whole cache"
    use: ClassVar[str] = "short contexts, and whenever an answer must be exact"
    device_cache: ClassVar[str] = "full:DeviceDense"

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return DenseCache(spec)
