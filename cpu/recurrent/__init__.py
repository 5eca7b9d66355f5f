"""Recurrent layers: short convolutions and the gated delta net, whose state has a fixed size."""

MAX_HEAD = 256  # elements of a head of the delta net
