"""Frozen configuration: the user's settings, validated once, before anything is loaded."""

from dataclasses import dataclass

from sparsekv_cli.settings.changes import ModelChanges
from sparsekv_cli.settings.option import check_options, option

WITH_MODEL = ("auto", "draft-model")  # values of ``speculate`` that can use a draft model


@dataclass(frozen=True)
class SessionConfig(ModelChanges):
    """The settings of a session that do not depend on the method; see each field's help.

    prefill_dtype: the type of the prefill's products. ``auto`` is bf16 on a GPU and on a CPU with
    AMX tiles. With AVX2 or sdot (ARM) it is int8: inputs are rounded to 8 bits, and products are
    summed as integers. Elsewhere it is f32.
    """

    ctx_size: int = option(
        0, "Most tokens of the KV cache; 0: as many as the model's.", at_least=0,
        flags=("-c", "--ctx-size"), metavar="N"
    )  # fmt: skip
    threads: int = option(
        0, "Threads, at most one for each CPU; 0: one for each core, within a container's quota.",
        at_least=0,
        flags=("-t", "--threads"), metavar="N"
    )  # fmt: skip
    device: str = option("auto", "Where to compute.", choices=("auto", "cpu", "cuda"))
    prefill_dtype: str = option(
        "auto", "Type of the prefill's products; auto: bf16 on a GPU and a CPU with AMX, int8 on "
        "other CPUs with byte products (inputs are rounded to 8 bits), else f32.",
        choices=("auto", "f32", "bf16", "int8"),
    )  # fmt: skip
    prefill_attention: str = option(
        "dense", "How a long prompt attends. sparse: 512 tokens at a time attend to the best pages "
        "of all earlier ones (--prefill-budget), which loses a little; the prompt's end is dense. "
        "auto: sparse on the CPU from the length on from which that is faster.",
        choices=("dense", "sparse", "auto"),
    )  # fmt: skip
    prefill_budget: int = option(
        8192, "Earlier rows that sparse reading attends to.", at_least=2048, metavar="N"
    )
    chunk: int = option(512, "Prompt tokens a prefill chunk.", at_least=1)
    calibration: str = option("", "Calibration to read; empty: the model's own.")
    kv: str = option(
        "auto", "Where a run on a GPU keeps the KV cache; auto: on it, if the method can and it "
        "fits, otherwise on the host.", choices=("auto", "device", "host")
    )  # fmt: skip
    gpu_weights: str = option(
        "auto", "Weights in the GPU's memory; auto is quantized, as in the file.",
        choices=("auto", "quantized", "bf16")
    )  # fmt: skip
    repack: str = option(
        "auto", "Decode on the CPU from a copy of the weights in a faster layout, which rounds "
        "differently; auto: if the weights take at most a quarter of the memory.",
        choices=("auto", "on", "off"),
    )  # fmt: skip
    activations: str = option(
        "8", "Bits to which decode on the CPU rounds the inputs of quantised weights; 16 is closer "
        "to f32, and slower with several rows a step.", choices=("8", "16"),
    )  # fmt: skip
    vram_limit: float = option(
        0.0, "Most of the GPU's memory to use; 0: all that is free.", at_least=0, metavar="GIB"
    )
    sparse_from: int = option(
        0, "Tokens up to which a method that keeps all rows attends to all of them; -1: the number "
        "that fits the model's shape (methods/depth.py).", at_least=-1
    )  # fmt: skip
    speculate: str = option(
        "auto", "Drafts of the answer: one step checks all tokens of a draft. The text is the "
        "same. ngram: tokens that followed the same ones in the prompt and the answer. mtp: the "
        "model's own next-token block (qwen35 and qwen35moe). draft-model: the text of a smaller "
        "model. auto: ngram and draft-model where they pay, or none.",
        choices=("auto", "ngram", "mtp", "draft-model", "off"),
    )  # fmt: skip
    draft_model: str = option(
        "", "A smaller model with the same vocabulary, for drafts.", metavar="FILE|NAME"
    )
    draft_method: str = option(
        "",
        "KV-cache method of the draft model; empty: quest. See 'sparsekv-cli methods'.",
        metavar="NAME",
    )
    checkpoints: int = option(
        8, "Most states that a model with recurrent layers keeps. Another answer, or one to a "
        "changed message, continues from a state. Also most snapshots of a prompt on disk.",
        at_least=0, metavar="N"
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        self.check_changes()
        if self.draft_model and self.speculate not in WITH_MODEL:
            raise ValueError(
                f"speculate = {self.speculate!r} does not use draft_model (--draft-model): use "
                "auto or draft-model"
            )
        if self.speculate == "draft-model" and not self.draft_model:
            raise ValueError("speculate = 'draft-model' needs draft_model (--draft-model FILE)")
        is_dense = self.prefill_attention == "dense"
        if is_dense and self.prefill_budget != SessionConfig.prefill_budget:
            raise ValueError(
                f"prefill_budget = {self.prefill_budget} (--prefill-budget) needs "
                "prefill_attention = 'sparse' or 'auto' (--prefill-attention)"
            )
        if self.draft_method and not self.draft_model:
            raise ValueError("draft_method (--draft-method) needs draft_model (--draft-model FILE)")

    @property
    def sparse_budget(self) -> int | None:
        """The rows that sparse reading attends to; None: prompts are read densely."""
        return None if self.prefill_attention == "dense" else self.prefill_budget


def dense_below(n: int) -> str:
    """Returns the words for a method that is dense in contexts of up to n rows."""
    return f"dense below {n:,} tokens"
