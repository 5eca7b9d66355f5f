"""Frozen configuration: what the user asked for, validated once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv_cli.option import check_options, option


@dataclass(frozen=True)
class SessionConfig:
    """How a session runs, independent of the method; see each field's help.

    prefill_dtype: ``auto`` is bf16 on a GPU and on a CPU with tiles of it (AMX), otherwise int8
        (sums of integers over inputs rounded to 8 bits) on x86 with AVX2, otherwise f32.
    """

    ctx_size: int = option(0, "most tokens of the KV cache; 0 takes the model's", at_least=0)
    threads: int = option(0, "decode threads; 0 takes the physical cores", at_least=0)
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    prefill_dtype: str = option(
        "auto", "of the prefill's products", choices=("auto", "f32", "bf16", "int8")
    )
    chunk: int = option(512, "prompt tokens a prefill chunk", at_least=1)
    calibration: str = option("", "sidecar to read; empty: the one that belongs to the model")
    kv: str = option(
        "auto", "where a GPU's run keeps the KV cache", choices=("auto", "device", "host")
    )
    gpu_weights: str = option(
        "auto", "quantized as in the file (auto), or bf16", choices=("auto", "quantized", "bf16")
    )
    repack: str = option(
        "auto", "whether the CPU's decode reads a copy of the weights in a faster layout; auto: if "
        "they take at most a quarter of the machine's memory",
        choices=("auto", "on", "off"),
    )  # fmt: skip
    activations: str = option(
        "auto", "bits to which the CPU's decode rounds what it multiplies with quantised weights; "
        "auto: 8 where that is faster (AVX2 without AVX-512 VNNI), otherwise 16",
        choices=("auto", "8", "16"),
    )  # fmt: skip
    vram_limit: float = option(
        0.0, "GiB of the GPU's memory to use at most; 0: what is free", at_least=0
    )

    sparse_from: int = option(
        0, "tokens up to which a method that keeps all rows attends to all of them; -1: as many as "
        "follow from the model's shape (methods/depth.py)", at_least=-1
    )  # fmt: skip

    checkpoints: int = option(
        8, "states of recurrent layers that are kept at most, to which a sequence can "
        "go back; 0: none", at_least=0
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
