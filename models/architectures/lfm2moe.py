"""LFM2 with experts: the router takes sigmoids, and a bias is added for the choice."""

from dataclasses import replace

from sparsekv_cli.models.architectures import Mixture
from sparsekv_cli.models.architectures.lfm2 import ARCHITECTURE as LFM2

ARCHITECTURE = replace(
    LFM2, name="lfm2moe", mixture=Mixture(gating="sigmoid", choice_bias="needed", dense_lead=True)
)
