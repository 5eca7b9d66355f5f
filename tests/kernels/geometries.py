"""Sizes of the models that launches are compiled for."""

from __future__ import annotations

from typing import NamedTuple


class Geometry(NamedTuple):
    name: str
    n_head: int
    n_kv_head: int
    d: int


GEOMETRIES = (
    Geometry("Llama-3.1-8B", 32, 8, 128),
    Geometry("LLaMA-2-7B", 32, 32, 128),
    Geometry("SmolLM2-135M", 9, 3, 64),
)
ODD = Geometry("head size 80, group 3", 6, 2, 80)  # masks in every direction
