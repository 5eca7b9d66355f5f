"""Dense attention, naively: o = softmax(q K' / sqrt d) V (Vaswani et al., arXiv:1706.03762).

| paper | here |
|---|---|
| section 3.2.1, eq 1, of the newest token | Naive.attend over all rows |
"""

from sparsekv_cli.methods.naive.base import Naive


class NaiveFull(Naive):
    """Every step attends to every row."""

    def is_dense_at(self, n: int) -> bool:
        return True
