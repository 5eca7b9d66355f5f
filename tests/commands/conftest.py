"""A fake model that answers from a script, so that commands are tested without a real one."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from sparsekv_cli.cache.counters import Timings
from sparsekv_cli.cache.spec import FULL
from sparsekv_cli.cli import main
from sparsekv_cli.commands.chat import chat as chat_module
from sparsekv_cli.commands.chat import conversation as chat_conversation
from sparsekv_cli.commands.run import run as run_module
from sparsekv_cli.commands.run import task as task_module
from sparsekv_cli.evaluation import roofline
from sparsekv_cli.prefix.prompt_rows import NONE_MOVED
from sparsekv_cli.sequence import Checkpoint, Sequence
from sparsekv_cli.settings.config import SessionConfig

EOS_ID, BOS_ID = 256, 257


class ByteTokenizer:
    """A token a byte; <eos> and <bos> are special."""

    bos_id: int | None = None
    eos_id = EOS_ID
    eog_ids = frozenset({EOS_ID})
    n_vocab = 258
    specials: ClassVar = {"<eos>": EOS_ID, "<bos>": BOS_ID}
    control_texts = tuple(specials)

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        add_eos: bool = True,
        parse_special: bool = True,
        plain: Callable[[str], str] | None = None,
    ) -> list[int]:
        ids = [BOS_ID] if self.bos_id is not None and add_bos is not False else []
        while text:
            name = next((s for s in self.specials if parse_special and text.startswith(s)), None)
            if name is None:
                ids += (plain or str)(text[0]).encode()
                text = text[1:]
            else:
                ids.append(self.specials[name])
                text = text.removeprefix(name)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        names = {number: name for name, number in self.specials.items()}
        return names[token_id].encode() if token_id in names else bytes([token_id])

    def is_shown(self, token_id: int) -> bool:
        return token_id < 256


class FakeCache(NamedTuple):
    """All layers of a fake sequence, as the ledger sees them."""

    counts: dict[str, int]
    spec: SimpleNamespace = SimpleNamespace(kind=FULL)

    def counters(self) -> dict[str, int]:
        return self.counts

    def memory(self) -> SimpleNamespace:
        return SimpleNamespace(host=10, device=0, index=1)


class FakeModel:
    """A model and its one sequence; answers come from ``script``, one text a generation.

    In a text, ``<eos>`` ends the answer. ``on_token`` is called before a token is handed out.
    """

    def __init__(self, script: Ids[str] = (), n_ctx: int = 4096) -> None:
        self.script = list(script)
        self.n_ctx = n_ctx
        self.n_threads = 2
        self.metadata: dict[str, Any] = {"general.architecture": "llama"}
        self.gguf = SimpleNamespace(metadata=self.metadata, path=Path("fake.gguf"), tensors={})
        self.hparams = SimpleNamespace(
            n_vocab=258, n_ctx_train=4096, n_ctx_fit=4096, rope=SimpleNamespace(n_ctx_original=4096)
        )
        self.engine = SimpleNamespace(
            first_steps=1, shares_prefill=True, decode=self._decode_together, gpu=""
        )
        self.decoder = SimpleNamespace(weights=SimpleNamespace(bytes_a_step=lambda n_rows: 3000))
        self.tokenizer = ByteTokenizer()
        self.config = SessionConfig(speculate="off")
        self.method: Any = SimpleNamespace(
            options=lambda: {"budget": "5%"}, n_queried=0, holds_all_rows=True
        )
        self.tokens: list[int] = []
        self.checkpoint: Checkpoint | None = None
        self.sparse_from = 0
        self.difference, self.moved = None, NONE_MOVED
        self.drafts, self.draft_caches = None, ()
        self.timings = Timings(load_s=0.5)
        self.counts = {"rows_total": 0, "rows_scored": 0, "rows_attended": 0, "bytes_moved": 0}
        self.caches: list[Any] = [FakeCache(self.counts)]
        self.prompts: list[list[int]] = []  # what each generation began with
        self.prefilled: list[int] = []  # how many ids each prefill computed
        self.n_begun = 0  # prefills, those that were interrupted among them
        self.decoded: list[int] = []
        self.on_token: Callable[[int], None] = lambda n: None
        self.on_prefill: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.methods: list[Any] = []  # those that were changed to
        self.can_rewind_within = True
        self.rewinds: list[int] = []
        self._answer: list[int] = []  # the rest of the text that is generated
        self._n_handed_out, self._goes_on = 0, False

    keep_common, n_alike = Sequence.keep_common, Sequence.n_alike

    def sequence(self) -> FakeModel:
        return self

    def settle(self) -> None:
        """Nothing is interrupted here."""

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.n_ctx

    def take_settings(self, _model: Any, sampling: Any, seed: int | None, _: Any) -> Any:
        """In place of ``new_sampler``."""
        self.sampling, self.seed = dict(sampling.explicit), seed
        return self.sample

    def attention_of(self, method: Any, *_: Any) -> Any:
        return SimpleNamespace(method=method)

    def change_method(self, attention: Any) -> None:
        """Takes over what is there, unless the method is h2o."""
        self.attention, self.method = attention, attention.method
        self.methods.append(self.method)
        self.on_change()
        if attention.method.name == "h2o":
            self.reset()

    def reset(self) -> None:
        self.tokens, self.checkpoint = [], None

    def ledger(self) -> dict[str, int]:
        return {**self.counts, "bytes_host": 10, "bytes_device": 0, "index_bytes": 1}

    def prefill(self, ids: Ids[int], progress: Any = None, *, rows: Any = None) -> None:
        assert len(ids) and len(self.tokens) + len(ids) <= self.n_ctx
        self.n_begun += 1
        self.on_prefill()
        if progress is not None:
            progress(len(ids) // 2, len(ids))
            progress(len(ids), len(ids))
        self.tokens += ids
        self.checkpoint = Checkpoint(len(self.tokens), np.zeros(0))
        self.prefilled.append(len(ids))
        self.timings.prefill_tokens += len(ids)
        self.timings.prefill_s += 0.5

    def decode(self, token: int) -> None:
        assert len(self.tokens) < self.n_ctx and self.tokens, "decode comes after a prefill"
        self.tokens.append(token)
        self.decoded.append(token)
        self.timings.decode_tokens += 1
        self.timings.decode_s += 0.1
        self.counts["rows_total"] += len(self.tokens)
        self.counts["rows_attended"] += 1
        self._goes_on = True

    def _decode_together(self, sequences: Any, rows: Any, samples: Any = ()) -> Any:
        for sequence, (token,) in zip(sequences, rows, strict=True):
            sequence.decode(token)
        return [[np.zeros(0)] for _ in rows]

    def sample(self, _logits: Any, tokens: Ids[int]) -> int:
        """The next token of the text. A text begins where nothing was decoded just now."""
        if not self._goes_on:
            self.prompts.append(list(tokens))
            self._answer, self._n_handed_out = self.tokenizer.encode(self.script.pop(0)), 0
        self._goes_on = False
        self.on_token(self._n_handed_out)
        self._n_handed_out += 1
        return self._answer[self._n_handed_out - 1]

    def rewind(self, n: int) -> None:
        self.rewinds.append(n)
        if n < len(self.tokens):
            del self.tokens[n if self.can_rewind_within else 0 :]
        if self.checkpoint is not None and self.checkpoint.n > len(self.tokens):
            self.checkpoint = None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """A fake model in place of what ``run`` and ``chat`` would open."""
    model = FakeModel()
    for module in (run_module, chat_module):
        monkeypatch.setattr(module, "open_model", lambda options: model)
        monkeypatch.setattr(module, "open_prompt_rows", lambda *arguments: None)
    monkeypatch.setattr(task_module, "new_sampler", lambda *arguments: model.sample)
    monkeypatch.setattr(chat_conversation, "new_sampler", model.take_settings)
    return model


@pytest.fixture(scope="session", autouse=True)
def short_probe() -> Iterator[None]:
    """``bench`` reads a megabyte, not for half a second, to know how fast that is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline.measure_bandwidth, "__defaults__", (1 << 20,))
        patch.setattr(roofline, "PROBE_SECONDS", 0.01)
        yield


class Result(NamedTuple):
    """What one command line printed, and its exit code."""

    out: str
    err: str
    code: int


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Invoke:
    """Runs ``main`` with arguments and bytes on stdin in this process; its objects stay frozen."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)

    def run(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_info:
            main(list(arguments))
        captured = capfd.readouterr()
        return Result(captured.out, captured.err, int(exit_info.value.code or 0))

    return run
