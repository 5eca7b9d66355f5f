"""Reads the hyper-parameters of a layer's experts."""

from dataclasses import dataclass

from sparsekv_cli.models.architectures import Architecture, Mixture
from sparsekv_cli.models.gguf.keys import MAX_TOKENS, ModelKeys

MAX_EXPERTS = 512  # LLAMA_MAX_EXPERTS
MAX_WIDTH = 1 << 24  # limit of an expert's length
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
SOFTMAX_WEIGHT = 3  # softmax over the chosen experts: equals the normalised softmax over all


@dataclass(frozen=True)
class ExpertParams:
    """Sizes of one layer's experts.

    Mixture (architectures) describes the fields from ``shared_gate`` on.
    """

    n_expert: int
    n_expert_used: int  # experts per token
    n_ff_expert: int  # length of one expert
    n_ff_shared: int  # length of the shared expert, which all tokens use; 0: none
    shared_gate: bool
    normalised: bool
    gating: str = "softmax"
    normed: bool = False
    scale: float = 1.0  # factor of the weights
    choice_bias: str = ""
    n_group: int = 1  # groups of as many experts each
    n_group_used: int = 1  # groups from which a token's experts are chosen


def mixture_of(keys: ModelKeys, architecture: Architecture) -> Mixture | None:
    """Returns the architecture's mixture, or None if the file has no experts.

    Raises UnsupportedModelError for groups of experts, other gates and other factors. llama.cpp's
    graphs of these architectures have none.
    """
    mixture = architecture.mixture
    n_expert = keys.integer("expert_count", 0, MAX_EXPERTS, default=0)
    if not n_expert:
        if mixture is not None and mixture.required:
            raise keys.fail("expert_count", "is missing or 0; this architecture has experts")
        return None
    if mixture is None:
        raise keys.unsupported(
            "expert_count", f"is {n_expert}: no experts can be run with this architecture"
        )
    known_gating = (0, SOFTMAX, SOFTMAX_WEIGHT)[: 2 + mixture.normalised]
    if mixture.gating == "sigmoid":
        known_gating = (0, SIGMOID)
    if mixture.gating == "stated":
        known_gating = (0, SOFTMAX, SIGMOID)
    for name, known in (
        ("expert_group_count", range(n_expert) if mixture.grouped else (0, 1)),
        ("expert_gating_func", known_gating),
        ("leading_dense_block_count", (0,)),
        ("interleave_moe_layer_step", (0, 1)),
        ("moe_latent_size", (0,)),
    ):
        value = keys.integer(name, 0, MAX_TOKENS, default=0)
        is_known = name == "leading_dense_block_count" and mixture.dense_lead
        if value not in known and not is_known:
            raise keys.unsupported(name, f"is {value}: such a mixture of experts cannot be run")
    if mixture.weighted:
        return mixture
    factor = keys.number("expert_weights_scale", low=0.0, default=1.0)
    if factor not in (0.0, 1.0):
        raise keys.unsupported("expert_weights_scale", f"is {factor:g}: it must be 1 here")
    if keys.flag("expert_weights_norm", mixture.normalised) != mixture.normalised:
        raise keys.unsupported("expert_weights_norm", f"must be {str(mixture.normalised).lower()}")
    return mixture


def read_experts(
    keys: ModelKeys, mixture: Mixture, layer: int, n_layer: int, n_ff: int
) -> ExpertParams:
    """Returns the experts of one layer. n_ff: its feed_forward_length, or 0 if it is missing."""
    n_expert = keys.integer("expert_count", 1, MAX_EXPERTS)
    n_used = keys.per_layer("expert_used_count", n_layer, MAX_EXPERTS, 0)[layer]
    if not 1 <= n_used <= n_expert:
        raise keys.fail("expert_used_count", f"is {n_used}; it must be 1 to {n_expert}")
    own, length = "expert_feed_forward_length", n_ff
    if mixture.own_length:
        length = keys.per_layer(own, n_layer, MAX_WIDTH, 0)[layer] if own in keys else 0
        length = length or n_ff // n_used
    if not length:
        raise keys.fail(own, "is missing, and so is a feed_forward_length to share out")
    n_shared = 0
    if mixture.shared == "dense":
        n_shared = n_ff
    elif mixture.shared == "counted":
        n_shared = keys.integer("expert_shared_count", 0, MAX_EXPERTS) * length
    elif mixture.shared != "none":
        n_shared = keys.integer("expert_shared_feed_forward_length", 0, MAX_WIDTH, default=0)
    is_gated = mixture.shared == "gated"
    if is_gated and not n_shared:
        n_shared = n_ff
        if not n_shared:
            raise keys.fail("expert_shared_feed_forward_length", "is missing or 0")
    is_normed, factor = mixture.normalised, 1.0
    if mixture.weighted:
        is_normed = keys.flag("expert_weights_norm", is_normed)
        factor = keys.number("expert_weights_scale", low=0.0, default=1.0) or 1.0
    gating = mixture.gating
    if gating == "stated":
        stated = keys.integer("expert_gating_func", 0, MAX_TOKENS, default=0)
        is_sigmoid = stated == SIGMOID or (not stated and _is_early_glm(keys))
        gating = "sigmoid" if is_sigmoid else "softmax"
    n_group, n_group_used = _read_groups(keys, n_expert, n_used) if mixture.grouped else (1, 1)
    return ExpertParams(
        n_expert, n_used, length, n_shared, is_gated, is_normed, gating,
        mixture.shared == "dense", factor, mixture.choice_bias, n_group, n_group_used,
    )  # fmt: skip


def _is_early_glm(keys: ModelKeys) -> bool:
    """Returns whether a file has the sizes of GLM-4.7-Flash, whose early files state no gating.

    Source: llama.cpp's deepseek2.cpp.
    """
    n_vocab = keys.integer("vocab_size", 0, MAX_TOKENS, default=0)
    return keys.integer("block_count", 1, MAX_TOKENS) in (47, 48) and n_vocab == 154880


def _read_groups(keys: ModelKeys, n_expert: int, n_used: int) -> tuple[int, int]:
    """Returns the number of groups of experts, and how many of them a token uses."""
    n_group = keys.integer("expert_group_count", 0, n_expert, default=1)
    if n_group < 2:
        return 1, 1
    if n_expert % n_group or n_expert < 2 * n_group:
        raise keys.fail(
            "expert_group_count", f"is {n_group}; it must divide {n_expert} experts by 2 or more"
        )
    n_group_used = keys.integer("expert_group_used_count", 1, n_group)
    if n_group_used * (n_expert // n_group) < n_used:
        raise keys.fail(
            "expert_group_used_count",
            f"is {n_group_used}; its groups have fewer than expert_used_count = {n_used} experts",
        )
    return n_group, n_group_used
