"""Frozen configuration: what the user asked for, validated once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "prefill_dtype": ("auto", "f32", "bf16", "int8"),
    "kv": ("auto", "device", "host"),
    "gpu_weights": ("auto", "quantized", "bf16"),
    "repack": ("auto", "on", "off"),
}


@dataclass(frozen=True)
class SessionConfig:
    """How a session runs, independent of the method.

    ctx_size: most tokens the KV cache may hold; 0 takes the model's context length.
    threads: decode threads; 0 takes the physical cores.
    device: ``auto``, ``cpu`` or ``cuda``.
    prefill_dtype: of the prefill's products: ``f32``, ``bf16``, or ``int8``: sums of integers over
        inputs rounded to 8 bits (CPU); ``auto``: bf16 on a GPU and where the CPU multiplies it in
        hardware, otherwise int8 on x86 with AVX2, otherwise f32.
    chunk: prompt tokens per prefill chunk.
    calibration: sidecar to read instead of the one that belongs to the model; empty: that one.
    kv: where a GPU's run keeps the KV cache: ``auto``, ``device`` or ``host``.
    gpu_weights: as ``quantized`` as in the file, or ``bf16``; ``auto``: quantized.
    repack: whether the CPU's decode reads a copy of the weights in a faster layout; ``auto``: if
        they take at most a quarter of the machine's memory.
    vram_limit: GiB of the GPU's memory to use at most; 0: what is free.
    """

    ctx_size: int = 0
    threads: int = 0
    device: str = "auto"
    prefill_dtype: str = "auto"
    chunk: int = 512
    calibration: str = ""
    kv: str = "auto"
    gpu_weights: str = "auto"
    repack: str = "auto"
    vram_limit: float = 0.0

    def __post_init__(self) -> None:
        for field in ("ctx_size", "threads"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)}: must be 0 or more")
        if self.chunk < 1:
            raise ValueError(f"chunk = {self.chunk}: must be 1 or more")
        if not self.vram_limit >= 0:
            raise ValueError(f"vram_limit = {self.vram_limit}: must be 0 or more")
        for field, allowed in CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                listed = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
                raise ValueError(f"{field} = {value!r}: must be {listed}")
