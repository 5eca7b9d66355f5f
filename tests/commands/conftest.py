"""A session that answers from a script, so that the commands are tested without a model."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from sparsekv_cli.cache.spec import FULL
from sparsekv_cli.cli import main
from sparsekv_cli.commands.chat import chat as chat_module
from sparsekv_cli.commands.chat import commands as chat_commands
from sparsekv_cli.commands.chat import conversation as chat_conversation
from sparsekv_cli.commands.run import run as run_module
from sparsekv_cli.sequence import Checkpoint
from sparsekv_cli.session import Session

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
    """All layers of a fake session, as the ledger sees them."""

    counts: dict[str, int]
    spec: SimpleNamespace = SimpleNamespace(kind=FULL)

    def counters(self) -> dict[str, int]:
        return self.counts

    def memory(self) -> SimpleNamespace:
        return SimpleNamespace(host=10, device=0, index=1)


class FakeSession:
    """Keeps the books of a session; answers come from ``script``, one text a generation.

    In a text, ``<eos>`` ends the answer. ``on_token`` is called before a token is handed out.
    """

    def __init__(self, script: Sequence[str] = (), n_ctx: int = 4096) -> None:
        self.script = list(script)
        self.n_ctx = n_ctx
        self.n_threads = 2
        self.metadata: dict[str, Any] = {"general.architecture": "llama"}
        self.gguf = SimpleNamespace(metadata=self.metadata, path=Path("fake.gguf"), tensors={})
        self.hparams = SimpleNamespace(
            n_vocab=258, n_ctx_train=4096, rope=SimpleNamespace(n_ctx_original=4096)
        )
        self.engine = SimpleNamespace(first_steps=1, shares_prefill=True)
        self.decoder = SimpleNamespace(weights=SimpleNamespace(bytes_a_step=lambda n_rows: 3000))
        self.tokenizer = ByteTokenizer()
        self.tokens: list[int] = []
        self.checkpoint: Checkpoint | None = None
        self.sparse_from, self.attention = 0, None
        self.timings = SimpleNamespace(
            load_s=0.5,
            prefill_s=0.0,
            prefill_tokens=0,
            decode_s=0.0,
            decode_tokens=0,
            cached_tokens=0,
            ttft_s=0.0,
            reset=lambda: None,
        )
        self.counts = {"rows_total": 0, "rows_scored": 0, "rows_attended": 0, "bytes_moved": 0}
        self.ledger = SimpleNamespace(as_dict=self.ledger_dict)
        self.caches: list[Any] = [FakeCache(self.counts)]
        self.prompts: list[list[int]] = []  # what each generation began with
        self.prefilled: list[int] = []  # how many ids each prefill computed
        self.decoded: list[int] = []
        self.on_token: Callable[[int], None] = lambda n: None
        self.on_prefill: Callable[[], None] = lambda: None
        self.prefixes = None
        self.methods: list[Any] = []  # those that were changed to
        self.closed = 0
        self.can_rewind_within = True
        self.rewinds: list[int] = []

    state = Session.state

    def take_settings(self, _session: Any, sampling: Any, seed: int | None, _: Any) -> None:
        """In place of ``new_sampler``."""
        self.sampling, self.seed = dict(sampling.explicit), seed

    def change_method(self, method: Any, *_: Any) -> None:
        """Takes over what is there, unless the method is h2o."""
        self.methods.append(method)
        if method.name == "h2o":
            self.reset()

    def reset(self) -> None:
        self.tokens, self.checkpoint = [], None

    def ledger_dict(self) -> dict[str, int]:
        return {**self.counts, "bytes_host": 10, "bytes_device": 0, "index_bytes": 1}

    def method_options(self) -> dict[str, Any]:
        return {"budget": "5%"}

    def prefill(self, ids: Sequence[int], progress: Any = None) -> None:
        assert len(ids) and len(self.tokens) + len(ids) <= self.n_ctx
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

    def rewind(self, n: int) -> None:
        self.rewinds.append(n)
        if n < len(self.tokens):
            del self.tokens[n if self.can_rewind_within else 0 :]
        if self.checkpoint is not None and self.checkpoint.n > len(self.tokens):
            self.checkpoint = None

    def generate(
        self, ids: Sequence[int], sample: Any, n_predict: int, progress: Any = None
    ) -> Iterator[int]:
        self.prompts.append([*self.tokens, *ids])
        if ids or self.checkpoint is None or self.checkpoint.n != len(self.tokens):
            self.prefill(ids, progress)
        answer = self.tokenizer.encode(self.script.pop(0))
        try:
            for n, token in enumerate(answer[: None if n_predict < 0 else n_predict]):
                self.on_token(n)
                yield token
                if n + 1 == n_predict or len(self.tokens) == self.n_ctx:
                    return
                self.decode(token)
        finally:
            self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    """A fake session in place of what ``run`` and ``chat`` would open."""
    session = FakeSession()
    for module in (run_module, chat_module):
        monkeypatch.setattr(module, "open_session", lambda options: session)
    for module in (run_module, chat_module, chat_commands):
        monkeypatch.setattr(module, "use_prefixes", lambda *arguments: None)
    monkeypatch.setattr(run_module, "new_sampler", lambda *arguments: None)
    monkeypatch.setattr(chat_conversation, "new_sampler", session.take_settings)
    return session


class Result(NamedTuple):
    """What one command line printed, and its exit code."""

    out: str
    err: str
    code: int


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Invoke:
    """Runs ``main`` with arguments and bytes on stdin in this process."""

    def run(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_info:
            main(list(arguments))
        captured = capfd.readouterr()
        return Result(captured.out, captured.err, int(exit_info.value.code or 0))

    return run
