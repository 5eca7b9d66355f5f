"""The sizes of one layer."""

from dataclasses import dataclass

from sparsekv_cli.cache.spec import FULL, window_rows
from sparsekv_cli.models.layers.expert_params import ExpertParams
from sparsekv_cli.models.layers.latent_params import LatentParams
from sparsekv_cli.models.layers.state_params import StateParams


@dataclass(frozen=True)
class LayerParams:
    """Sizes of one layer. A recurrent layer has a ``state`` and no heads (sizes 0)."""

    n_head: int
    n_head_kv: int
    head_dim: int  # elements of a key head
    value_dim: int  # elements of a value head
    n_rot: int  # leading elements of a head that are rotated, even; 0: none
    n_ff: int  # length of the feed-forward; 0 with ``experts``, or without a feed-forward
    attention_scale: float = 0.0  # the softmax's factor; 0: 1/sqrt(head_dim)
    experts: ExpertParams | None = None
    kind: str = FULL  # the kind of its cache (sparsekv_cli/cache/kinds.py)
    window: int = 0  # tokens that a window layer attends to, the current one included; 0: all
    softcap: float = 0.0  # c of scores c tanh(score / c); 0: none
    has_sinks: bool = False  # each head has a score without a value in its softmax
    state: StateParams | None = None
    output_gate: bool = False  # see Architecture
    source: int = -1  # the earlier layer whose K and V it reads; -1: it has its own
    block: int = 0  # the file's block with its attention or its recurrent part
    ffn_block: int = 0  # the file's block with its feed-forward
    shares_input: bool = False  # whether its input is that of the layer before it

    # Sizes of latent attention; None: it is not latent. Then the layer has one kv head, whose rows
    # are key and value at once.
    latent: LatentParams | None = None

    @property
    def has_ffn(self) -> bool:
        return self.n_ff > 0 or self.experts is not None

    @property
    def n_attended(self) -> int:
        """The length of the output projection's input."""
        if self.latent is not None:
            return self.n_head * self.latent.n_value
        return self.state.n_out if self.state else self.n_head * self.value_dim

    @property
    def v_is_k(self) -> bool:
        """Whether a token has one row, which is its key and its value."""
        return self.latent is not None

    def kv_bytes(self, n: int) -> int:
        """Returns the bytes of K and V of n tokens in f16, or of the state.

        A full layer that reads the rows of another layer has 0.
        """
        if self.state is not None:
            return self.state.n_bytes
        if self.source >= 0 and not self.window:
            return 0
        rows = min(n, window_rows(self.window)) if self.window else n
        width = self.head_dim if self.v_is_k else self.head_dim + self.value_dim
        return 2 * rows * self.n_head_kv * width
