"""The task of ``run``, from the command line or, with --jsonl, from a line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsekv_cli.generation.conversation import model_thinking, prompt_ids
from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.models.tokenizer.marks import CONTROLS_SHOWN, SPELLED

if TYPE_CHECKING:
    from sparsekv_cli.model import Model


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

    def ids(self, model: Model) -> list[int]:
        """Returns the ids of the prompt."""
        return prompt_ids(
            model, self.prompt, self.system, raw=self.raw, parse_special=self.parse_special,
            think=self.think, continues=bool(self.continue_final_message),
            add_generation_prompt=self.add_generation_prompt is not False,
        )  # fmt: skip

    def prepared(self, model: Model) -> partial[Generation]:
        """Returns a call that begins the answer in a sequence, after the prefill of the prompt."""
        thinking = model_thinking(model) if self.thinks else None
        constraint = new_constraint(model.tokenizer, self.sampling, thinking, self.think)
        return partial(
            Generation,
            model.tokenizer,
            sample=new_sampler(model, self.sampling, self.seed, constraint),
            n_predict=self.n_predict,
            stops=self.stop,
            constraint=constraint,
            marks=CONTROLS_SHOWN if self.special else SPELLED,
            thinking=None if self.special or self.inline_thinking else thinking,
            logprobs=self.logprobs,
        )


NAMES = (
    *("system", "raw", "parse_special", "special", "think", "inline_thinking", "n_predict", "stop"),
    "logprobs",
)


def gather_task(values: dict[str, Any]) -> Task:
    """Takes the options of a task out of a command's values."""
    own = {name: values.pop(name) for name in NAMES}
    return Task(**own, seed=values["options"].seed, sampling=values.pop("sampling"))
