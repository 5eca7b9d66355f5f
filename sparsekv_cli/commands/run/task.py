"""The task of ``run``: what to answer and how, from the command line or from a line of --jsonl."""

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
    """One request: a prompt, and how to answer it.

    Its defaults are those of the command line's options.
    """

    # a text, or the messages of a conversation that the assistant continues
    prompt: str | list[dict[str, Any]] = ""
    id: Any = None
    system: str | None = None
    raw: bool = False
    parse_special: bool = False
    special: bool = False
    think: bool | None = None
    inline_thinking: bool = False
    # whether the last message is the beginning of the answer
    continue_final_message: bool | None = None
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
        """Returns a function that makes the Generation in a sequence after the prompt's prefill."""
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
    """Returns the task among a command's values, and removes its options from them."""
    own = {name: values.pop(name) for name in NAMES}
    return Task(**own, seed=values["options"].seed, sampling=values.pop("sampling"))
