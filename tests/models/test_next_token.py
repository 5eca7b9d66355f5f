"""The next-token block against a naive form of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opened import open_sequence
from reference_decoder import ReferenceModel, attention
from reference_feed_forward import exact_gelu, feed_forward, rms_norm
from reference_records import LONG_CASES
from tiny_recurrent import DeltaNet
from tiny_sequences import decoded, tokens

from sparsekv_cli.methods.full import Full
from sparsekv_cli.settings.config import SessionConfig

CONFIG = SessionConfig(threads=1, prefill_dtype="f32", speculate="mtp", chunk=16, repack="on")
SHAPES = {
    name: {**LONG_CASES[name], "n_layer": 4, "recurrent": DeltaNet(next_layer=3)}
    for name in ("qwen35", "qwen35moe")
}
SHAPES["qwen35, untied"] = {**SHAPES["qwen35"], "tied": False}
SHAPES["qwen35moe, repacked"] = {**SHAPES["qwen35moe"], "wtype": "Q4_0"}
PROMPT = tokens(80)
F32 = 0  # ggml's number of the type


class NaiveBlock:
    """Equations (21) to (23) of arXiv:2412.19437 for one block, with all rows computed anew."""

    def __init__(self, path: Path) -> None:
        self.model = ReferenceModel.open(path).keep()
        self.n_layer = self.model.n_layer - 1
        self.at = f"blk.{self.n_layer}.nextn."

    def layer(self, i: int, x: np.ndarray) -> np.ndarray:
        x = x + attention(self.model, i, x, *self.model.rotation(len(x)), True)
        return x + feed_forward(self.model, i, x, exact_gelu)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.model.tensor(f"{name}.weight"), self.model.epsilon)

    def hidden(self, ids: list[int]) -> np.ndarray:
        """The model's hidden rows (T, E)."""
        x = self.model.embed(ids)
        for i in range(self.n_layer):
            x = self.layer(i, x)
        return self.norm("output_norm", x)

    def rows(self, ids: list[int], hidden: np.ndarray) -> np.ndarray:
        """The block's hidden rows (T, E) for the tokens after each row of ``hidden``."""
        both = (
            self.norm(f"{self.at}enorm", self.model.embed(ids)),
            self.norm(f"{self.at}hnorm", hidden),
        )
        x = np.concatenate(both, axis=1) @ self.model.tensor(f"{self.at}eh_proj.weight").T
        return self.norm(f"{self.at}shared_head_norm", self.layer(self.n_layer, x))

    def logits(self, ids: list[int], draft: list[int]) -> np.ndarray:
        """The logits (n, V) from which the n tokens of a draft after ``ids`` are chosen."""
        hidden, logits = self.hidden(ids[:-1]), []
        name = "output" if "output.weight" in self.model.tensors else "token_embd"
        for i in range(len(draft)):
            row = self.rows([*ids[1:], *draft[:i]], hidden)[-1:]
            logits.append(row[0] @ self.model.tensor(f"{name}.weight").T)
            hidden = np.concatenate([hidden, row])
        return np.stack(logits)


@pytest.fixture(params=SHAPES)
def path(request: Any, tiny_model: Any) -> Path:
    return tiny_model(**SHAPES[request.param])


def told_logits(sequence: Any, monkeypatch: Any) -> list[np.ndarray]:
    """A list that grows by the logits of each row that a draft takes."""
    told, step = [], sequence.next_rows._step

    def listen(x: Any, pos: int) -> Any:
        logits, hidden = step(x, pos)
        told.append(logits.copy())
        return logits, hidden

    monkeypatch.setattr(sequence.next_rows, "_step", listen)
    return told


def test_drafts_are_those_of_the_naive_form(path, monkeypatch):
    """After a prompt in two parts, decode steps, rows that are taken back, and a rewind."""
    naive, sequence = NaiveBlock(path), open_sequence(path, Full(), CONFIG)
    rows, main = sequence.next_rows, sequence.model.decoder
    assert rows._decoder._decode_weights.output is main._decode_weights.output  # no second copy
    # Inputs of quantised weights are rounded, and all layers ahead of the block add to that.
    bound = 2e-3 if main.weights.output.code == F32 else 4e-2
    told = told_logits(sequence, monkeypatch)

    def compare(last: int) -> list[int]:
        told.clear()
        draft = rows.draft(last, 3)
        assert draft == [int(np.argmax(logits)) for logits in told]
        expected = naive.logits([*sequence.tokens, last], draft)
        np.testing.assert_allclose(np.stack(told), expected, atol=bound * np.abs(expected).max())
        assert rows.cache.n == len(rows._positions) == len(sequence.tokens)
        return draft

    sequence.prefill(PROMPT[:60])
    assert rows.cache.n == 59 and sequence.ledger()["bytes_host_drafts"] == rows.cache.memory().host
    sequence.prefill(PROMPT[60:])
    draft = compare(7)
    sequence.engine.decode([sequence], [[7, *draft]])
    sequence.keep(len(PROMPT) + 2)  # the first token of the draft is right
    compare(9)
    decoded(sequence, [9, 11, 12])
    compare(13)
    sequence.rewind(len(PROMPT))  # the row that waited was computed, and is gone
    assert rows.draft(7, 3) == [] and rows.cache.n == len(PROMPT) - 1
    sequence.prefill(PROMPT[:20])
    assert len(rows.draft(7, 3)) == 3 and rows.cache.n == len(sequence.tokens) - 1
    sequence.reset()
    assert rows.cache.n == 0
    sequence.model.gguf.close()
