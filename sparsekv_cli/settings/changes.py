"""The user's changes of a model's metadata: chat template, RoPE scaling, single keys.

Names and meanings of the options are llama.cpp's (common/arg.cpp).
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparsekv_cli.settings.option import MAX_WHOLE, did_you_mean, option, options_of

# Keys that the user may change, with their types. None of them decides a tensor's shape. A key of
# KEYS comes after the architecture's name: ``llama.context_length``.
TOKENIZER = "tokenizer.ggml."
KEYS = {
    "context_length": "int",
    "rope.freq_base": "float",
    "rope.freq_base_swa": "float",
    "rope.scale_linear": "float",
    "rope.scaling.type": "str",
    "rope.scaling.factor": "float",
    "rope.scaling.original_context_length": "int",
    "rope.scaling.attn_factor": "float",
    "rope.scaling.finetuned": "bool",
    "rope.scaling.yarn_ext_factor": "float",
    "rope.scaling.yarn_attn_factor": "float",
    "rope.scaling.yarn_beta_fast": "float",
    "rope.scaling.yarn_beta_slow": "float",
    "rope.scaling.yarn_log_multiplier": "float",
    "attention.layer_norm_rms_epsilon": "float",
    "attention.scale": "float",
    "attention.sliding_window": "int",
    "attention.temperature_scale": "float",
    "attn_logit_softcapping": "float",
    "final_logit_softcapping": "float",
    "embedding_scale": "float",
    "logit_scale": "float",
    "residual_scale": "float",
    "expert_used_count": "int",
}
TOKENIZER_KEYS = dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), "bool")
GGUF_TYPES = {"int": "uint32", "float": "float32", "bool": "bool", "str": "string"}
# Keys that do not change rows, except through their tokens and RoPE's angles.
NOT_IN_ROWS = ("context_length", "final_logit_softcapping", "logit_scale")


@dataclass(frozen=True)
class ModelChanges:
    """The user's changes of a model's metadata. By default the file's metadata stay as they are."""

    chat_template: str = option(
        "", "A chat template instead of the model's: a Jinja file, or one of chatml, gemma, "
        "granite, llama2, llama3, mistral-v1, mistral-v3, mistral-v7, phi3, phi4, vicuna, zephyr.",
        flags=("--chat-template", "--chat-template-file"), metavar="FILE|NAME",
    )  # fmt: skip
    rope_scaling: str = option(
        "auto", "How RoPE's angles are scaled, for contexts beyond the trained length; auto: as "
        "the model's file says.", choices=("auto", "none", "linear", "yarn"),
    )  # fmt: skip
    rope_scale: float = option(
        0.0, "Factor by which RoPE stretches the context; 0: the file's.", at_least=0, metavar="N"
    )
    rope_freq_base: float = option(
        0.0, "Base of RoPE's angles; 0: the file's.", at_least=0, metavar="N"
    )
    rope_freq_scale: float = option(
        0.0, "Factor of RoPE's angles, 1 / --rope-scale; 0: the file's.", at_least=0, at_most=1,
        metavar="N",
    )  # fmt: skip
    yarn_orig_ctx: int = option(
        0, "YaRN: tokens of the original context; 0: the file's, or those of the training.",
        at_least=0, metavar="N"
    )  # fmt: skip
    yarn_ext_factor: float = option(
        -1.0, "YaRN: share of the unscaled angles where they turn fast; -1: the file's, or 1.",
        at_least=-1, at_most=1, metavar="N"
    )  # fmt: skip
    yarn_attn_factor: float = option(
        -1.0, "YaRN: factor of the rotated rows, used where the ext factor is 0; -1: the file's.",
        at_least=-1, metavar="N"
    )  # fmt: skip
    yarn_beta_slow: float = option(
        -1.0, "YaRN: turns below which angles are scaled; -1: the file's, or 1.",
        at_least=-1, metavar="N"
    )  # fmt: skip
    yarn_beta_fast: float = option(
        -1.0, "YaRN: turns above which angles are not scaled; -1: the file's, or 32.",
        at_least=-1, metavar="N"
    )  # fmt: skip
    override_kv: str = option(
        "", "Change a key of the metadata, as in llama.context_length=int:8192; repeatable. A "
        "wrong key gets the list of those that can be changed.", metavar="KEY=TYPE:VALUE"
    )  # fmt: skip

    def check_changes(self) -> None:
        """Raises ValueError for changes that contradict each other or are impossible."""
        if self.rope_scale and self.rope_freq_scale:
            raise ValueError("rope_scale and rope_freq_scale say the same: give one of them")
        if self.rope_scaling == "none" and (self.rope_scale or self.rope_freq_scale):
            raise ValueError(
                "rope_scaling = 'none' does not scale: leave rope_scale and rope_freq_scale out, "
                "or use linear or yarn"
            )
        for name in ("rope_freq_base", "rope_scale"):
            if 0 < (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {value:g}: must be 0, or 1 or more")
        self.overrides()

    @property
    def scale(self) -> float:
        """The factor by which RoPE stretches the context; 0: the file's."""
        return 1 / self.rope_freq_scale if self.rope_freq_scale else self.rope_scale

    def overrides(self) -> dict[str, Any]:
        """Returns key -> value of ``override_kv``. Raises ValueError for a wrong key or value."""
        found: dict[str, Any] = {}
        for text in filter(None, self.override_kv.split(",")):
            key, value = _parsed(text)
            if key in found:
                raise ValueError(f"override_kv = {key}: is given twice")
            found[key] = value
        return found

    def stated(self) -> dict[str, Any]:
        """Returns name -> value of the changes that are not defaults, without the chat template."""
        values = {name: getattr(self, name) for name in CHANGES}
        return {name: value for name, value in values.items() if value != getattr(DEFAULT, name)}

    def of_architecture(self, name: str) -> str:
        """Returns ``override_kv`` without keys of architectures other than ``name``."""
        own = (f"{name}.", TOKENIZER)
        return ",".join(each for each in self.override_kv.split(",") if each.startswith(own))


CHANGES = tuple(name for name in options_of(ModelChanges) if name != "chat_template")
DEFAULT = ModelChanges()


def type_of_key(key: str) -> str:
    """Returns the type of a key that may be changed, such as "int"; "" for other keys."""
    if key.startswith(TOKENIZER):
        return TOKENIZER_KEYS.get(key.removeprefix(TOKENIZER), "")
    return KEYS.get(key.partition(".")[2], "")


def _parsed(text: str) -> tuple[str, Any]:
    """Returns key and value of a text KEY=TYPE:VALUE. Raises ValueError for another text."""
    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if not (equals and colon and key):
        raise ValueError(f"override_kv = {text!r}: must be KEY=TYPE:VALUE, as in a=int:1")
    expected = type_of_key(key)
    if not expected:
        known = [*(f"ARCHITECTURE.{name}" for name in KEYS)]
        known += [TOKENIZER + name for name in TOKENIZER_KEYS]
        arch, _, name = key.partition(".")
        close = did_you_mean(name, KEYS).replace("mean ", f"mean {arch}.")
        raise ValueError(
            f"override_kv = {key}: cannot be changed{close}; keys that can: {', '.join(known)}"
        )
    if kind != expected:
        raise ValueError(f"override_kv = {key}: is of type {expected}, found {kind}:{value}")
    try:
        return key, _READERS[kind](value)
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"override_kv = {key}: {value!r} is no {_WORDS[kind]}") from None


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) > MAX_WHOLE:
        raise ValueError
    return value


def _number(text: str) -> float:
    value = as_float32(float(text))
    if not math.isfinite(value):
        raise ValueError
    return value


def as_float32(value: float) -> float:
    """Returns ``value`` rounded to f32, as a file stores it.

    Raises OverflowError if it is too large.
    """
    return struct.unpack("f", struct.pack("f", value))[0]


_READERS: dict[str, Callable[[str], Any]] = {
    "int": _whole, "float": _number, "bool": {"true": True, "false": False}.__getitem__,
    "str": str,
}  # fmt: skip
_WORDS = {
    "int": f"whole number up to {MAX_WHOLE}", "float": "finite number", "bool": "true or false",
    "str": "text",
}  # fmt: skip
