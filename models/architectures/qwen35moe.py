"""Qwen3.5 and 3.6 with experts, of which one is shared and gated."""

from dataclasses import replace

from sparsekv_cli.models.architectures import Mixture
from sparsekv_cli.models.architectures.qwen35 import ARCHITECTURE as QWEN35

ARCHITECTURE = replace(QWEN35, name="qwen35moe", mixture=Mixture(shared="gated"))
