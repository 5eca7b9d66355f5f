"""Recurrent layers: short convolutions and the gated delta net, whose state has a fixed size."""
