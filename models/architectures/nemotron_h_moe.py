"""Nemotron 3: Nemotron-H, whose feed-forwards are experts that a sigmoid routes."""

from dataclasses import replace

from sparsekv_cli.models.architectures import Mixture
from sparsekv_cli.models.architectures.nemotron_h import ARCHITECTURE as NEMOTRON_H

ARCHITECTURE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    mixture=Mixture(gating="sigmoid", choice_bias="needed", shared="optional", weighted=True),
    next_blocks="skipped",
)
