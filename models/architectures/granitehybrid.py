"""Granite 4 with Mamba-2 layers: the scales of Granite, with experts or without."""

from dataclasses import replace

from sparsekv_cli.models.architectures.granite import ARCHITECTURE as GRANITE

ARCHITECTURE = replace(GRANITE, name="granitehybrid", recurrence="mamba2")
