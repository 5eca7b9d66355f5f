"""The task of ``run``, from the command line or, with --jsonl, from a line."""

from dataclasses import dataclass
from typing import Any

from sparsekv_cli.generation.sampler import SamplingOptions


@dataclass(frozen=True)
class Task:
    """The request of one line. The command line's options are the defaults."""

    # a text, or a conversation for the assistant to continue
    prompt: str | list[dict[str, Any]] = ""
    id: Any = None
    system: str | None = None
    raw: bool = False
    parse_special: bool = False
    special: bool = False
    think: bool | None = None
    inline_thinking: bool = False
    continue_final_message: bool | None = None  # the last message is the beginning of the answer
    # whether the template adds the beginning of an answer
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
