"""Recurrent layers, whose state has a fixed size: convolutions, the delta net and Mamba-2."""

MAX_HEAD = 256  # elements of a key head or a value head
