"""The conversation of ``chat``: its messages, and a sequence with their rows."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsekv_cli.commands.chat.screen import word_wrap
from sparsekv_cli.commands.options.model import load_model
from sparsekv_cli.commands.shared.answer import Interrupt, stream_answer
from sparsekv_cli.commands.shared.terminal import ShownAnswer, say, write_text
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer import Answer
from sparsekv_cli.generation.conversation import (
    CHATML_END,
    chat_template,
    encode_messages,
    model_thinking,
)
from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.models.chat.thinking import without_thinking

if TYPE_CHECKING:
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model
    from sparsekv_cli.prefix.prompt_rows import PromptRows
    from sparsekv_cli.sequence import Sample
    from sparsekv_cli.settings.config import SessionConfig

Messages = list[dict[str, str]]
CHOICES = (
    "/clear forgets the conversation, /undo takes the last message back, '/set context_shift on' "
    "drops the oldest ones, '/set ctx N' makes a larger context (at the start: -c N)"
)


@dataclass
class ChatSettings:
    """The settings that ``/set`` changes."""

    sampling: SamplingOptions
    seed: int | None = None  # None: a random one
    n_predict: int = -1  # most tokens of an answer; -1: all that fit
    stop: tuple[str, ...] = ()  # texts that end an answer
    parse_special: bool = False
    think: bool | None = None  # None: the template decides
    drop_thinking: bool = False  # whether later prompts leave out the thinking of earlier answers
    context_shift: bool = False  # whether a full context drops the oldest turns
    keep: int = 0  # turns that begin within so many first tokens are never dropped


def gather_settings(values: dict[str, Any]) -> ChatSettings:
    """Returns the settings among a command's values, and removes them from ``values``."""
    names = {each.name for each in fields(ChatSettings)} - {"seed"}
    return ChatSettings(**{name: values.pop(name) for name in names}, seed=values["options"].seed)


class Conversation:
    """The messages so far, and a sequence that has the rows of as many of them as possible.

    An answer's text in ``messages`` includes its thinking.
    """

    def __init__(
        self,
        model: Model,
        settings: ChatSettings,
        system: str | None,
        open_rows: Callable[[Model, Method], PromptRows | None] = lambda model, method: None,
    ) -> None:
        """open_rows: returns the object that finds and stores the rows of a method's prompts."""
        self.model, self.open_rows = model, open_rows
        self.rows = open_rows(model, model.method)
        self.sequence = model.sequence()
        self.settings = settings
        self.template = chat_template(model.gguf)
        self.thinking = model_thinking(model)
        self.messages: Messages = []
        self._texts: dict[str, str] = {}  # whole text of an answer -> its text without thinking
        self.n_used = 0  # tokens of the context that the conversation uses
        self.renew_sampler()
        self.set_system(system)

    def reopen(self, config: SessionConfig) -> None:
        """Opens the model again with other settings. The attention stays as it is.

        Rows stay if they are valid with the new settings. Raises SparseKVError if this is
        impossible. The conversation then goes on as before.
        """
        old, sequence = self.model, self.sequence
        if sequence.n_ctx != old.n_ctx:  # /set ctx has changed it
            config = replace(config, ctx_size=sequence.n_ctx)
        sequence.settle()
        model = load_model(old.gguf.path, sequence.method, config)
        try:
            if model.n_ctx <= self.n_used:
                raise SparseKVError(
                    f"the conversation has {self.n_used} tokens, and that context only "
                    f"{model.n_ctx}: /clear it first"
                )
            model = model.using(model.attention_of(sequence.method, sequence.sparse_from))
            rows, renewed = self.open_rows(model, model.method), model.sequence()
        except BaseException:
            model.close()
            raise
        own = old.engine.identity(sequence.method)
        if own.serves(model.engine.identity(model.method)) and sequence.next_rows is None:
            renewed.tokens, renewed.caches = sequence.tokens, sequence.caches
            renewed.moved = sequence.moved
            # the logits would be the same
            if model.gguf.changed_values() == old.gguf.changed_values():
                renewed.checkpoint = sequence.checkpoint
        self.model, self.sequence, self.rows = model, renewed, rows
        old.close()
        self.renew_sampler()
        self.replace(self.messages)

    def renew_sampler(self) -> None:
        """Makes a new sampler from the settings."""
        model, settings = self.model, self.settings
        sampling = settings.sampling
        constraint = new_constraint(model.tokenizer, sampling, self.thinking, settings.think)
        self._constraint = constraint
        self._sample: Sample = new_sampler(model, sampling, settings.seed, constraint)

    @property
    def system(self) -> str | None:
        """The text of the system message; None without one."""
        is_there = bool(self.messages) and self.messages[0]["role"] == "system"
        return self.messages[0]["content"] if is_there else None

    def set_system(self, text: str | None) -> None:
        """Replaces the system message and keeps the other messages."""
        said = self.messages[self.system is not None :]
        opening = [] if text is None else [{"role": "system", "content": text}]
        self.replace([*opening, *said])

    def clear(self) -> None:
        """Removes all messages but the system message."""
        self.replace(self.messages[: self.system is not None])

    def undo(self) -> str:
        """Removes the user's last message and its answer. Returns the message's text.

        Raises SparseKVError if there is no message.
        """
        starts = _turns(self.messages)
        if not starts:
            raise SparseKVError("there is no message to take back")
        text = self.messages[starts[-1]]["content"]
        self.replace(self.messages[: starts[-1]])
        return text

    def replace(self, messages: Messages) -> None:
        """Goes on with ``messages``. Raises SparseKVError if the template refuses them."""
        self.n_used = len(self.encode(messages)) if _turns(messages) else 0
        self.messages = messages

    def encode(self, messages: Messages) -> list[int]:
        """Returns the ids of ``messages``, which the model then continues."""
        # Templates with channels refuse thinking in a message.
        if self.settings.drop_thinking or (self.thinking and self.thinking.is_channel):
            messages = [self._without_thinking(message) for message in messages]
        return encode_messages(
            self.model.tokenizer,
            self.template,
            messages,
            parse_special=self.settings.parse_special,
            think=self.settings.think,
        )

    def _without_thinking(self, message: dict[str, str]) -> dict[str, str]:
        if message["role"] != "assistant":
            return message
        written = message["content"]
        text = self._texts.get(written)
        if text is None:  # the answer comes from a file
            text = without_thinking(self.thinking, written)
        return {**message, "content": text}

    def send(self, text: str) -> Answer:
        """Returns the answer to a new message. If there is no answer, the message is removed."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Answer:
        """Returns a new answer to the last message. It replaces the old answer."""
        if not _turns(self.messages):
            raise SparseKVError("there is no answer to generate again")
        is_answered = self.messages[-1]["role"] == "assistant"
        return self._answer(self.messages[:-1] if is_answered else self.messages)

    def _answer(self, messages: Messages) -> Answer:
        sequence, settings = self.sequence, self.settings
        with Interrupt().watch() as interrupt:  # a long text takes a moment
            ids = self.encode(messages)
            if len(ids) >= sequence.n_ctx:
                messages, ids = self._shortened(messages, len(ids), 1)
            missing = sequence.keep_common(ids, goes_on=True, rows=self.rows)
        sequence.timings.reset()
        shown = ShownAnswer(
            sys.stdout if sys.stdout.isatty() else sys.stderr,
            self.thinking[:2] if self.thinking is not None else ("", ""),
            word_wrap(),
        )

        def make_room(tokens: Ids[int]) -> Ids[int] | None:
            nonlocal messages
            if not settings.context_shift:
                return None
            try:
                messages, ids = self._shortened(messages, sequence.n_ctx, len(tokens) + 1)
            except SparseKVError:  # the turn alone is too long: the answer ends
                return None
            return sequence.keep_common([*ids, *tokens], goes_on=True, rows=self.rows)

        stops = settings.stop if self.template else (*settings.stop, CHATML_END)
        begin = partial(
            Generation,
            self.model.tokenizer,
            sequence,
            self._sample,
            n_predict=settings.n_predict,
            stops=stops,
            constraint=self._constraint,
            thinking=self.thinking,
            write=shown.write,
            write_thinking=shown.think,
        )
        answer = stream_answer(
            sequence, missing, begin, rows=self.rows, make_room=make_room, interrupt=interrupt
        )
        shown.end_thinking()
        self.messages = [*messages, {"role": "assistant", "content": answer.written}]
        self._texts[answer.written] = answer.text
        self.n_used = len(sequence.tokens)
        return answer

    def full_context_line(self, answer: Answer) -> str | None:
        """Returns a line with the user's choices if a full context has cut the answer, or None."""
        if not answer.is_cut:
            return None
        n_ctx = self.sequence.n_ctx
        return f"the answer is cut, the context is full ({n_ctx} of {n_ctx} tokens): {CHOICES}"

    def _shortened(self, messages: Messages, n: int, n_more: int) -> tuple[Messages, list[int]]:
        """Returns a conversation without its oldest turns, and its ids.

        If possible, the rest needs at most half of the context. n: tokens of the whole
        conversation. n_more: further tokens that must fit. Raises SparseKVError, with the numbers,
        if not enough turns may be dropped.
        """
        n_ctx, settings = self.sequence.n_ctx, self.settings
        takes = f"the conversation takes {n} tokens, the context holds {n_ctx}"
        if not settings.context_shift:
            raise SparseKVError(f"{takes}: {CHOICES}")
        starts = _turns(messages)
        n_kept = sum(self._starts_within(messages, start, settings.keep) for start in starts)
        n_droppable = max(0, len(starts) - 1 - n_kept)

        def without(n_dropped: int) -> Messages:
            until = starts[n_kept] if n_dropped else 0
            return messages[:until] + messages[starts[n_kept + n_dropped] if n_dropped else 0 :]

        def fits(n_dropped: int) -> bool:
            return len(self.encode(without(n_dropped))) + n_more <= n_ctx // 2

        counts = range(1, n_droppable + 1)
        n_dropped = min(n_droppable, 1 + bisect.bisect_left(counts, True, key=fits))
        shorter = without(n_dropped)
        ids = self.encode(shorter)
        if not n_dropped or len(ids) + n_more > n_ctx:
            kept = f" and the first {n_kept} turns, which --keep keeps," if n_kept else ""
            raise SparseKVError(
                f"{takes}; the last message alone{kept} takes {len(ids)} with {n_more - 1} of the "
                "answer: shorten it, '/set ctx N' makes a larger context (at the start: -c N)"
            )
        turns = "turn is" if n_dropped == 1 else "turns are"
        if n_more > 1 and sys.stdout.isatty():
            write_text("\n")  # after half an answer
        say(
            f"context shift: the oldest {n_dropped} {turns} dropped, {len(ids)} tokens are left "
            f"of {n}; they are read again"
        )
        return shorter, ids

    def _starts_within(self, messages: Messages, start: int, n: int) -> bool:
        """Returns whether the turn at messages[start] begins within the first n tokens."""
        if n == 0 or not any(message["role"] == "user" for message in messages[:start]):
            return n > 0
        return len(self.encode(messages[:start])) < n


def _turns(messages: Messages) -> list[int]:
    """Returns the indexes of the user's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "user"]
