"""Long prompts whose reading is interrupted: what is kept, and how the next run goes on."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from kept_prompts import keep, keeping
from reference_records import LONG_CASES
from tiny_gemma4 import Gemma4Layers
from tiny_sequences import decoded, tokens

from sparsekv_cli.models import forward
from sparsekv_cli.prefix import prefixes
from sparsekv_cli.prefix.blocks import BlockWriter

PART = 512  # rows of a part in these tests
PROMPT, ANSWER = tokens(2100), tokens(8, 3)
GEMMA4 = {**LONG_CASES["gemma4"], "n_layer": 4, "layers": Gemma4Layers(wide=64, narrow=32)}
CASES = {
    "full": {},
    "lfps": {"budget": "64"},
    "quest": {"budget": "64"},
    "q8_0": {"types": ("q8_0", "q4_0")},
    "gemma4": {"shape": GEMMA4, "dense_layers": "none"},
    "latent": {"shape": LONG_CASES["deepseek2"], "types": ("q8_0", "q8_0")},
    **{
        name: {"shape": LONG_CASES[name], "dense_layers": "none"}
        for name in ("qwen35", "nemotron_h", "falcon-h1")
    },
}


@pytest.fixture
def opened(sequence_of, monkeypatch):
    """Opens a sequence that keeps its prompts in a folder, and what it says."""
    monkeypatch.setattr(forward, "ROWS_AT_ONCE", PART)

    def open_one(case: str, folder: Path):
        name = case if case in ("lfps", "quest") else "full"
        options = {"dense_layers": "0", "ctx_size": 4096, "chunk": 64, **CASES.get(case, {})}
        sequence = sequence_of(name, **options)
        return sequence, keeping(sequence, folder)

    return open_one


def stop_at(n: int):
    """Interrupts a prefill when n of its rows are done."""

    def progress(done: int, total: int) -> None:
        if done >= n:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("case", CASES)
def test_the_next_run_goes_on(case, opened, tmp_path):
    """Interrupted twice, and each time one more part is read; then the rest, to the bit."""
    alone, _ = opened(case, tmp_path / "alone")
    expected, answers = alone.prefill(PROMPT), decoded(alone, ANSWER)
    for n_done, n_kept in ((700, 512), (900, 1024)):
        sequence, said = opened(case, tmp_path / "kept")
        with pytest.raises(KeyboardInterrupt):
            sequence.prefill(PROMPT, stop_at(n_done))
        assert sequence.tokens == []
        line = f"{n_kept} tokens of the prompt are kept in {tmp_path / 'kept'}: "
        assert sum(each.startswith(line) for each in said) == 1
        assert not list((tmp_path / "kept").glob(".*"))
    sequence, said = opened(case, tmp_path / "kept")
    np.testing.assert_array_equal(keep(sequence, PROMPT), expected)
    assert sequence.timings.cached_tokens == 1024
    np.testing.assert_array_equal(decoded(sequence, ANSWER), answers)
    again, _ = opened(case, tmp_path / "kept")
    again.prefill([*PROMPT, *tokens(40, 5)])
    is_cut = "shape" in CASES[case] and case != "latent"
    assert again.timings.cached_tokens == (2048 if is_cut else 2096)


@pytest.mark.parametrize("case", ["full", "gemma4", "qwen35"])
def test_a_kill_in_the_middle_of_a_file_leaves_no_half_block(case, opened, tmp_path, monkeypatch):
    """The folder is copied while a part's second block is written, as a kill would leave it."""
    kept, killed = tmp_path / "kept", tmp_path / "killed"
    alone, _ = opened(case, tmp_path / "alone")
    expected = alone.prefill(PROMPT)
    monkeypatch.setattr(forward, "ROWS_AT_ONCE", 2 * PART)
    sequence, _ = opened(case, kept)
    write = BlockWriter.write

    def write_and_copy(self, layer, piece):
        write(self, layer, piece)
        if self.header.first == PART * 3 and not killed.exists():
            shutil.copytree(kept, killed)

    monkeypatch.setattr(BlockWriter, "write", write_and_copy)
    keep(sequence, PROMPT)
    assert len(list(killed.glob(".*"))) >= 2  # files without a name
    monkeypatch.setattr(forward, "ROWS_AT_ONCE", PART)
    sequence, said = opened(case, killed)
    np.testing.assert_array_equal(sequence.prefill(PROMPT), expected)
    assert sequence.timings.cached_tokens == (1536 if case == "full" else 1024)
    assert all(line.startswith("-v") for line in said)


def test_after_a_whole_prompt_the_first_blocks_are_used_last(opened, tmp_path):
    """Blocks of a part are older than the others, but more prompts use them."""
    sequence, _ = opened("full", tmp_path)
    keep(sequence, PROMPT)
    used = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    names, parent = [], sequence.rows.identity.known()
    while found := sequence.rows.folder.children().get(parent):
        names += found
        parent = found[0].partition(".")[0].partition("-")[2]
    assert len(names) == len(used) == 5
    assert [used[name] for name in names] == sorted(used.values(), reverse=True)


def test_one_snapshot_of_a_part_is_left_at_most(opened, tmp_path, monkeypatch):
    """A whole prompt has its own: of the last block, and of the blocks 1 and 4 before it."""
    sequence, _ = opened("gemma4", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sequence.prefill(PROMPT, stop_at(1700))
    assert len(list(tmp_path.glob("*.snapshot"))) == 1
    sequence.rows.folder.clear()
    sequence.reset()
    monkeypatch.setattr(forward, "ROWS_AT_ONCE", 3 * PART)
    keep(sequence, tokens(3000))
    assert len(list(tmp_path.glob("*.snapshot"))) == 3


@pytest.mark.parametrize("case", ["full", "gemma4"])
def test_a_disk_that_becomes_full_is_one_line(case, opened, tmp_path, monkeypatch):
    alone, _ = opened(case, tmp_path / "alone")
    expected = alone.prefill(PROMPT)
    sequence, said = opened(case, tmp_path / "kept")
    write = BlockWriter.write

    def fail(self, layer, piece):
        if self.header.first == PART:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, layer, piece)

    monkeypatch.setattr(BlockWriter, "write", fail)
    np.testing.assert_array_equal(keep(sequence, PROMPT), expected)
    assert not list((tmp_path / "kept").glob(".*"))
    assert sum("warning" in line for line in said) == 1
    monkeypatch.undo()
    sequence.reset()
    np.testing.assert_array_equal(sequence.prefill(PROMPT), expected)
    assert sequence.timings.cached_tokens == 512


def test_an_interrupt_keeps_the_limit(opened, tmp_path):
    sequence, _ = opened("full", tmp_path)
    keep(sequence, tokens(2100, 1))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():  # the clock's steps may be longer than a test
        os.utime(path, (1e9, 1e9))
    sequence.rows.folder.limit = size
    sequence.reset()
    with pytest.raises(KeyboardInterrupt):
        sequence.prefill(PROMPT, stop_at(1700))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size
    sequence.reset()
    sequence.prefill(PROMPT)
    assert sequence.timings.cached_tokens == 1536


def test_without_the_models_hash_nothing_is_kept_early(opened, tmp_path, monkeypatch):
    """Blocks are named when the hash is known, in the middle of the prompt or at its end."""
    sequence, _ = opened("full", tmp_path)
    known = sequence.rows.identity.known()
    answers = iter([None, None, None])  # find, begin, and the first part
    monkeypatch.setattr(type(sequence.rows.identity), "known", lambda self: next(answers, known))
    with pytest.raises(KeyboardInterrupt):
        sequence.prefill(PROMPT, stop_at(900))
    assert not list(tmp_path.iterdir())
    answers = iter([None, None, None])
    with pytest.raises(KeyboardInterrupt):
        sequence.prefill(PROMPT, stop_at(1300))
    assert len(list(tmp_path.iterdir())) == 2
    sequence.prefill(PROMPT)
    assert sequence.timings.cached_tokens == 1024
    assert prefixes.UNKNOWN not in {path.name[:32] for path in tmp_path.iterdir()}
