"""Frozen configuration: what the user asked for, validated once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionConfig:
    """How a session runs, independent of the method.

    ctx_size: most tokens the KV cache may hold; 0 takes the model's context length.
    threads: decode threads; 0 takes the physical cores.
    device: ``auto``, ``cpu`` or ``cuda``.
    prefill_dtype: ``auto`` (bf16 where the CPU multiplies it in hardware), ``f32`` or ``bf16``.
    chunk: prompt tokens per prefill chunk.
    calibration: sidecar to read instead of the one that belongs to the model; empty: that one.
    """

    ctx_size: int = 0
    threads: int = 0
    device: str = "auto"
    prefill_dtype: str = "auto"
    chunk: int = 512
    calibration: str = ""

    def __post_init__(self) -> None:
        for field in ("ctx_size", "threads"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)}: must be 0 or more")
        if self.chunk < 1:
            raise ValueError(f"chunk = {self.chunk}: must be 1 or more")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device = {self.device!r}: must be auto, cpu or cuda")
        if self.prefill_dtype not in ("auto", "f32", "bf16"):
            raise ValueError(f"prefill_dtype = {self.prefill_dtype!r}: must be auto, f32 or bf16")
