"""Prompts that begin as earlier ones: their answers, what is computed, what is kept."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from kept_prompts import keep, keeping, n_cached
from reference_records import LONG_CASES
from tiny_gemma4 import Gemma4Layers
from tiny_sequences import decoded, greedy, open_tiny, tokens
from tiny_tokenizer import SPECIAL_TOKENS

from sparsekv_cli.commands.shared.answer import stream_answer
from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.methods import METHODS
from sparsekv_cli.prefix import prefixes
from sparsekv_cli.prefix.blocks import BLOCK, BlockWriter, read_header
from sparsekv_cli.prefix.snapshots import snapshot_lengths

DOCUMENT = tokens(1100)
FIRST, SECOND = DOCUMENT + tokens(40, 1), DOCUMENT + tokens(50, 2)
ANSWER = tokens(8, 3)
END = SPECIAL_TOKENS.index("<|im_end|>")
SHARING = [name for name in METHODS if name != "h2o"]
LAYERS = {"dense_layers": "0", "ctx_size": 4096}


def open_pair(sequence_of, folder, name="full", **options):
    """A sequence that keeps prompts, and one that does not."""
    budget = None if name == "full" else "64"
    alone, sequence = (sequence_of(name, budget=budget, **{**LAYERS, **options}) for _ in range(2))
    return sequence, alone, keeping(sequence, folder)


@pytest.fixture(scope="module")
def kept_by_full(tiny_model, tmp_path_factory):
    """A folder in which a sequence of ``full`` has kept FIRST."""
    folder = tmp_path_factory.mktemp("full")
    writer = open_tiny(tiny_model, "full", **LAYERS, chunk=64)
    keeping(writer, folder)
    keep(writer, FIRST)
    writer.model.gguf.close()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_an_answer_has_the_bits_of_one_without_the_cache(name, sequence_of, kept_by_full, tmp_path):
    """The rows are kept by another process' sequence, of the method itself and of ``full``."""
    own, by_full = tmp_path / "own", shutil.copytree(kept_by_full, tmp_path / "full")
    writer, alone, _ = open_pair(sequence_of, own, name, chunk=64)
    keep(writer, FIRST)
    expected, answers = alone.prefill(SECOND), decoded(alone, ANSWER)
    for folder in (own, by_full):
        sequence, _, said = open_pair(sequence_of, folder, name, chunk=64)
        np.testing.assert_array_equal(sequence.prefill(SECOND), expected)
        assert sequence.timings.cached_tokens == 1088  # whole chunks of 64
        assert sequence.timings.prefill_tokens == len(SECOND) - 1088
        np.testing.assert_array_equal(decoded(sequence, ANSWER), answers)
        assert sequence.tokens == alone.tokens
        assert said == [
            "-v prefix cache: 1088 of 1150 tokens are reused; the prompt differs from the kept "
            "one at token 1100"
        ]


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q5_1"), ("f16", "q8_0")])
def test_rows_of_all_types_are_kept_as_they_are(types, sequence_of, tmp_path):
    sequence, alone, _ = open_pair(sequence_of, tmp_path, types=types)
    keep(sequence, FIRST)
    sequence.reset()
    np.testing.assert_array_equal(sequence.prefill(SECOND), alone.prefill(SECOND))
    assert sequence.timings.cached_tokens == 1088
    other, _, _ = open_pair(sequence_of, tmp_path)  # rows of f16 are other rows
    other.prefill(SECOND)
    assert other.timings.cached_tokens == 0


def test_large_rows_are_kept_in_eight_bits(sequence_of, tmp_path, monkeypatch):
    """The answer differs a little; the bound is that of a cache in q8_0."""
    monkeypatch.setattr(prefixes, "Q8_FROM", 0)
    prepared: list[int] = []
    monkeypatch.setattr("sparsekv_cli.cache.store.prepare", prepared.append)
    for name in ("full", "snapkv"):  # written after the answer, and by a thread
        sequence, alone, _ = open_pair(sequence_of, tmp_path / name, name)
        keep(sequence, FIRST)
        size = sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        f16 = len(FIRST) * sum(cache.spec.n_head_kv for cache in sequence.caches) * 64 * 2 * 2
        assert 0.53 * f16 < size < 0.57 * f16
        sequence.reset()
        found, expected = sequence.prefill(SECOND), alone.prefill(SECOND)
        assert sequence.timings.cached_tokens == 1088
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (expected, found))
        assert 0 < np.sum(p * np.log(p / q)) < 1e-3
    assert not any(prepared)  # steps read rows of f16 (0) alone


def test_a_prompt_over_half_of_the_limit_is_kept_in_eight_bits(sequence_of, tmp_path):
    """So are the rows that follow its rows. Nothing of a session file is."""
    sequence, _, said = open_pair(sequence_of, tmp_path)
    row_bytes = sum(cache.spec.n_head_kv for cache in sequence.caches) * 64 * 2 * 2
    sequence.rows.folder.limit = 2 * len(FIRST) * row_bytes

    def kept_types():
        return sorted(read_header(path.open("rb")).types[0] for path in tmp_path.iterdir())

    keep(sequence, FIRST)
    assert kept_types() == ["f16"] * 3 and not any("q8_0" in line for line in said)
    sequence.rows.folder.clear()
    sequence.rows.folder.limit -= 2
    sequence.reset()
    keep(sequence, FIRST)
    assert kept_types() == ["q8_0"] * 3
    assert sum("more than half of the" in line and "q8_0" in line for line in said) == 1
    sequence.rows.folder.limit *= 8
    longer = FIRST + tokens(1000, 4)
    assert n_cached(sequence, longer, keep) == 1136
    assert kept_types() == ["q8_0"] * 5
    assert any("1136 of 2140 tokens are reused from rows of another type" in x for x in said)
    assert sum("more than half" in line for line in said) == 1


def test_the_same_prompt_again_and_a_longer_one(sequence_of, tmp_path):
    sequence, alone, _ = open_pair(sequence_of, tmp_path)
    keep(sequence, FIRST)
    sequence.reset()
    expected = alone.prefill(FIRST)
    np.testing.assert_allclose(sequence.prefill(FIRST), expected, atol=1e-4)
    assert sequence.timings.cached_tokens == 1136
    longer = FIRST + tokens(700, 4)
    assert n_cached(sequence, longer, keep) == 1136
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert len(names) == len(list(tmp_path.iterdir())) == 4  # the block of 116 tokens has gone
    sequence.reset()
    sequence.timings.reset()
    alone.reset()
    longest = longer + ANSWER * 3
    np.testing.assert_array_equal(sequence.prefill(longest), alone.prefill(longest))
    assert sequence.timings.cached_tokens == 1840


def test_documents_share_no_more_than_they_have_in_common(sequence_of, tmp_path):
    sequence, alone, said = open_pair(sequence_of, tmp_path)
    other = DOCUMENT[:700] + tokens(600, 5)
    cases = (FIRST, 0), (other, 688), (SECOND, 1088), (other[:1290], 1280), (tokens(600, 6), 0)
    for ids, n in cases:
        assert n_cached(sequence, ids, keep) == n
    alone.prefill(other[:1290])
    sequence.reset()
    sequence.prefill(other[:1290])
    np.testing.assert_allclose(decoded(sequence, ANSWER), decoded(alone, ANSWER), atol=1e-4)
    assert not [line for line in said[1:] if not line.startswith("-v")]


def test_a_prompt_is_kept_before_its_rows_change_within_the_answer(sequence_of, tmp_path):
    """The context is full, and a context shift keeps 30 tokens of the prompt."""
    sequence, alone, _ = open_pair(sequence_of, tmp_path, ctx_size=1200)
    other = DOCUMENT[:30] + tokens(600, 7)
    rooms = iter([other])

    def make_room(answered):
        ids = next(rooms, None)
        return ids and sequence.keep_common([*ids, *answered])

    tokenizer = sequence.model.tokenizer
    begin = partial(Generation, tokenizer, sequence, greedy)
    stream_answer(sequence, FIRST, begin, rows=sequence.rows, make_room=make_room)
    assert sequence.tokens[: len(other)] == other
    sequence.reset()
    np.testing.assert_array_equal(sequence.prefill(SECOND), alone.prefill(SECOND))
    assert sequence.timings.cached_tokens == 1088


def test_short_prompts_and_short_ends_are_not_kept(sequence_of, tmp_path):
    sequence, _, said = open_pair(sequence_of, tmp_path / "folder")
    keep(sequence, DOCUMENT[:511])
    assert not (tmp_path / "folder").exists() and not said
    sequence.reset()
    keep(sequence, FIRST)
    before = {path.name for path in (tmp_path / "folder").iterdir()}
    sequence.reset()
    keep(sequence, SECOND)
    assert {path.name for path in (tmp_path / "folder").iterdir()} == before
    keep(sequence, tokens(600, 7))  # behind other rows: no beginning of a prompt
    assert {path.name for path in (tmp_path / "folder").iterdir()} == before


def test_the_first_time_is_said_and_the_folder_is_private(sequence_of, tmp_path):
    sequence, _, said = open_pair(sequence_of, tmp_path / "a" / "b")
    keep(sequence, FIRST)
    assert len(said) == 2 and "are kept in" in said[0] and "--no-cache" in said[0]
    assert said[1] == f"-v prefix cache: 1140 tokens are kept in {tmp_path / 'a' / 'b'}"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    sequence.reset()
    keep(sequence, tokens(600, 8))
    assert [line[:3] for line in said[2:]] == ["-v ", "-v "]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) - 100] if how == "cut" else data)


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_damaged_blocks_are_one_line_and_computed_again(how, block, sequence_of, tmp_path):
    sequence, alone, said = open_pair(sequence_of, tmp_path)
    keep(sequence, FIRST)
    by_parent = {path.name[:32]: path for path in tmp_path.iterdir()}
    parent = sequence.rows.identity.known()
    for _ in range(block):
        parent = by_parent[parent].stem[33:]
    damage(by_parent[parent], how)
    sequence.reset()
    said.clear()
    np.testing.assert_array_equal(keep(sequence, SECOND), alone.prefill(SECOND))
    assert sequence.timings.cached_tokens == block * BLOCK
    warnings = [line for line in said if not line.startswith("-v")]
    assert len(warnings) == 1 and by_parent[parent].name in warnings[0]
    if len(SECOND) - block * BLOCK >= BLOCK:  # it is written again
        assert n_cached(sequence, FIRST) == 1136


def poison(path: Path) -> None:
    """Replaces all rows of a file by NaN, with right checksums."""
    with path.open("rb") as file:
        header = read_header(file)
    writer = BlockWriter(path.parent, header)
    for layer, (n, (heads, k, v)) in enumerate(zip(header.layer_rows, header.layers, strict=True)):
        rows = (np.full((heads, n, width), 0xFF, np.uint8) for width in (k, v))
        writer.write(layer, tuple(rows))
    writer.finish(path)


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0"), ("q5_1", "f16")])
@pytest.mark.parametrize("shape", ["", "gemma4", "qwen35", "falcon-h1"])
def test_rows_that_are_no_numbers_are_computed_again(shape, types, sequence_of, tmp_path):
    """They are told as what they are: the weights are not damaged."""
    options = {"types": types}
    if shape:
        layers = {"layers": Gemma4Layers(wide=64, narrow=32), "n_layer": 4}
        options |= {"shape": LONG_CASES[shape] | (layers if shape == "gemma4" else {})}
    sequence, alone, said = open_pair(sequence_of, tmp_path, dense_layers="none", **options)
    keep(sequence, FIRST)
    paths = sorted(tmp_path.glob("*.snapshot" if shape else "*.rows"))
    for path in paths:
        poison(path)
    sequence.reset()
    said.clear()
    np.testing.assert_array_equal(keep(sequence, SECOND), alone.prefill(SECOND))
    assert sequence.timings.cached_tokens == 0
    warnings = [line for line in said if not line.startswith("-v")]
    assert warnings and all("not" in line and "finite numbers; it is removed" in line
                            for line in warnings)  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *(("gemma4", "full"), ("gemma4", "snapkv"), ("qwen35", "full"), ("qwen3next", "quest")),
        *(("olmo2_with_windows", "full"), ("granitehybrid", "quest")),
        *(("nemotron_h_moe", "full"), ("falcon-h1", "lfps")),
    ],
)
def test_windows_and_states_go_on_where_a_block_ends(arch, name, sequence_of, tmp_path):
    """Some layers of gemma4 read others' rows. Messages end in the documents."""
    document = [*tokens(299), END, *tokens(800, 7)]
    shorter = [*document[:700], *tokens(30, 5), END, *tokens(560, 6)]
    shape = LONG_CASES[arch]
    if arch == "gemma4":
        shape = {**shape, "n_layer": 4, "layers": Gemma4Layers(wide=64, narrow=32)}
    options = {"shape": shape, "dense_layers": "none"}
    sequence, alone, said = open_pair(sequence_of, tmp_path, name, **options)
    keep(sequence, document + tokens(40, 1))
    said.clear()
    for ids, n in ((document + tokens(50, 2), 1024), (shorter, 512)):
        for each in (sequence, alone):
            each.reset()
        sequence.timings.reset()
        np.testing.assert_array_equal(keep(sequence, ids), alone.prefill(ids))
        assert sequence.timings.cached_tokens == n
        np.testing.assert_array_equal(decoded(sequence, ANSWER), decoded(alone, ANSWER))
    assert all(line.startswith("-v") for line in said)
    assert len(list(tmp_path.glob("*.snapshot"))) == 3  # behind 512, and behind 1024 of each


def test_without_a_whole_snapshot_everything_is_computed(sequence_of, tmp_path):
    sequence, alone, said = open_pair(
        sequence_of, tmp_path, shape=LONG_CASES["lfm2"], dense_layers="none"
    )
    keep(sequence, FIRST)
    said.clear()
    for path in tmp_path.glob("*.snapshot"):
        damage(path, "flipped")
    sequence.reset()
    np.testing.assert_array_equal(keep(sequence, SECOND), alone.prefill(SECOND))
    assert sequence.timings.cached_tokens == 0
    lines = [line for line in said if not line.startswith("-v")]
    assert len(lines) == 2 and all(".snapshot: its " in line for line in lines)
    assert n_cached(sequence, SECOND) == 1024  # they are there again
    sequence.rows.finish()
    names = sorted(path.name for path in tmp_path.iterdir())
    # 588 are computed, but 100 are new
    assert n_cached(sequence, SECOND[:1000] + tokens(100, 4), keep) == 512
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert snapshot_lengths(40 * BLOCK + 7, 4) == [n * BLOCK for n in (40, 39, 36, 24)]
    assert snapshot_lengths(40 * BLOCK, 0) == snapshot_lengths(BLOCK - 1, 8) == []


def test_what_was_not_used_for_longest_goes(sequence_of, tmp_path):
    sequence, _, said = open_pair(sequence_of, tmp_path)
    keep(sequence, FIRST)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    sequence.rows.folder.limit = 2 * size + size // 2
    for seed in (10, 11):
        for path in tmp_path.iterdir():  # the clock's steps may be longer than a test
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))
        if seed == 11:
            sequence.reset()
            sequence.prefill(SECOND)  # uses what FIRST has left
        sequence.reset()
        keep(sequence, tokens(1140, seed))
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert total <= sequence.rows.folder.limit
    for ids, n in ((SECOND, 1088), (tokens(1140, 11) + ANSWER * 2, 1136)):
        assert n_cached(sequence, ids) == n
    assert n_cached(sequence, tokens(1140, 10)) < 1100
    sequence.rows.abandon()
    sequence.rows.folder.limit, n_files = size // 2, len(list(tmp_path.iterdir()))
    said.clear()
    sequence.reset()
    keep(sequence, tokens(1140, 12))
    assert "not kept" in said[-1] and len(list(tmp_path.iterdir())) == n_files


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_a_full_disk_is_one_line(name, sequence_of, tmp_path, monkeypatch):
    sequence, alone, said = open_pair(sequence_of, tmp_path / "folder", name)

    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BlockWriter, "write", write)
    np.testing.assert_array_equal(keep(sequence, FIRST), alone.prefill(FIRST))
    np.testing.assert_array_equal(decoded(sequence, ANSWER), decoded(alone, ANSWER))
    assert not list((tmp_path / "folder").iterdir())
    lines = [line for line in said if "warning" in line]
    assert len(lines) == 1 and lines[0].endswith("No space left on device")


def test_ctrl_c_while_files_are_written_leaves_none(sequence_of, tmp_path, monkeypatch):
    sequence, _, _ = open_pair(sequence_of, tmp_path)
    monkeypatch.setattr(BlockWriter, "finish", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        keep(sequence, FIRST)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_line(sequence_of, tmp_path):
    (tmp_path / "file").write_text("")
    sequence, alone, said = open_pair(sequence_of, tmp_path / "file" / "folder")
    np.testing.assert_array_equal(keep(sequence, FIRST), alone.prefill(FIRST))
    assert len(said) == 1 and said[0].startswith("warning: the prompt is not kept")


def test_a_folder_that_others_may_write_to_is_not_used(sequence_of, tmp_path):
    sequence, _, said = open_pair(sequence_of, tmp_path)
    keep(sequence, FIRST)
    tmp_path.chmod(0o777)
    said.clear()
    assert n_cached(sequence, SECOND) == 0
    assert said[0].startswith(f"prompts in {tmp_path} are not used")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("name", ["full", "fasa", "snapkv"])
def test_an_interrupted_prefill_keeps_nothing(name, sequence_of, tmp_path):
    sequence, alone, _ = open_pair(sequence_of, tmp_path, name)
    keep(sequence, FIRST)
    before = sorted(tmp_path.iterdir())

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    sequence.reset()
    with pytest.raises(KeyboardInterrupt):
        sequence.prefill(DOCUMENT[:600] + tokens(1500, 9), stop)
    assert sequence.tokens == [] and sorted(tmp_path.iterdir()) == before
    np.testing.assert_array_equal(sequence.prefill(SECOND), alone.prefill(SECOND))
    np.testing.assert_array_equal(decoded(sequence, ANSWER), decoded(alone, ANSWER))
