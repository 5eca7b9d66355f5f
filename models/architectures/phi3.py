"""Phi-3, Phi-3.5 and Phi-4 mini: fused projections, partial rotation, LongRoPE.

The sliding window that its files state is not used, as in llama.cpp.
"""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="phi3", rope_interleaved=False, fused_gate_up=True)
