"""The task of ``run``: asked for by the command line, and with --jsonl by each line."""

from dataclasses import dataclass
from typing import Any

from sparsekv_cli.generation.sampler import SamplingOptions


@dataclass(frozen=True)
class Task:
    """The request of one line. The command line's options are the defaults.

    prompt: a text, or a conversation that the assistant is to continue. continue_final_message:
    its last message is the beginning of the answer. add_generation_prompt: False: the template does
    not begin one. thinks: whether anything may be thought ahead of the answer.
    """

    prompt: str | list[dict[str, Any]] = ""
    id: Any = None
    system: str | None = None
    raw: bool = False
    parse_special: bool = False
    special: bool = False
    think: bool | None = None
    inline_thinking: bool = False
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    sampling: SamplingOptions = SamplingOptions({})

    @property
    def thinks(self) -> bool:
        return not (self.raw or self.continue_final_message or self.add_generation_prompt is False)


NAMES = (
    *("system", "raw", "parse_special", "special", "think", "inline_thinking", "n_predict", "stop"),
    "logprobs",
)


def gather_task(values: dict[str, Any]) -> Task:
    """Takes the options of a task out of a command's values."""
    own = {name: values.pop(name) for name in NAMES}
    return Task(**own, seed=values["options"].seed, sampling=values.pop("sampling"))
