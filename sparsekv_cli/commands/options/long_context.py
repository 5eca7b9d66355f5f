"""Warnings for contexts that are longer than those of the model's training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekv_cli.commands.shared.terminal import say

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.hparams import HParams
    from sparsekv_cli.settings.config import SessionConfig

Q4_KEYS_FIT = 32768  # tokens; for longer contexts keys in q4_0 are not recommended


def warn_beyond_training(hparams: HParams, config: SessionConfig, what: str, n: int) -> None:
    """Warns if n tokens are more than the model's trained context. what: what has n tokens.

    The line names the options that stretch the context. If the user has set another base of RoPE,
    it does not warn, because the possible length is unknown.
    """
    fit = hparams.n_ctx_fit
    if n > fit and not config.rope_freq_base:
        from sparsekv_cli.models.hparams import stretching

        say(
            f"warning: a {what} of {n} tokens is more than the {fit} that the model was trained "
            "for: text beyond them may make no sense"
            f"{stretching(hparams, n, '; this stretches the context: ')}"
        )


def warn_of_long_context(model: Model) -> None:
    """Warns if the context is too long for the model's training or for keys in q4_0."""
    n_ctx = model.n_ctx
    warn_beyond_training(model.hparams, model.config, "context", model.config.ctx_size)
    if model.method.cache_type_k == "q4_0" and n_ctx > Q4_KEYS_FIT:
        say(
            f"warning: keys in q4_0 lose more as the context grows: for more than {Q4_KEYS_FIT} "
            f"tokens ({n_ctx} fit) use --cache-type-k q8_0"
        )
