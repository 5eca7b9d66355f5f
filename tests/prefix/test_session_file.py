"""``--session FILE``: a prompt's rows under a name of the user's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forged_headers import forge
from kept_prompts import KnownRoot, keep, n_cached
from tiny_sequences import decoded, tokens

from sparsekv_cli.prefix.session_file import SessionFile

DOCUMENT = tokens(700)
FIRST, SECOND = DOCUMENT + tokens(40, 1), DOCUMENT + tokens(50, 2)
ANSWER = tokens(8, 3)


def open_with(sequence_of, path: Path, name: str = "full", **options):
    sequence = sequence_of(name, budget=None if name == "full" else "64", ctx_size=4096, **options)
    said: list[str] = []
    sequence.rows = SessionFile(
        path,
        "tiny.gguf",
        sequence.model.decoder.identity_of(sequence.method.kv_types),
        (sequence.method.cache_type_k, sequence.method.cache_type_v),
        sequence.method.n_queried,
        said.append,
        lambda text: None,
    )
    return sequence, said


@pytest.mark.parametrize("name", ["full", "lfps", "snapkv", "freekv"])
def test_another_method_goes_on_from_it(name, sequence_of, tmp_path):
    for writer in dict.fromkeys((name, "full")):
        path = tmp_path / f"{writer}.session"
        keep(open_with(sequence_of, path, writer)[0], FIRST)
        assert [each.name for each in tmp_path.glob(f"{writer}*")] == [path.name]
        sequence, said = open_with(sequence_of, path, name)
        alone = sequence_of(name, budget=None if name == "full" else "64", ctx_size=4096)
        np.testing.assert_array_equal(keep(sequence, SECOND), alone.prefill(SECOND))
        assert sequence.timings.cached_tokens == 688 and not said
        np.testing.assert_array_equal(decoded(sequence, ANSWER), decoded(alone, ANSWER))


def test_steps_that_turn_the_sinks_leave_the_rows_as_they_are(sequence_of, tmp_path):
    """The file is written when the answer is out."""
    path = tmp_path / "a.session"
    writer, _ = open_with(sequence_of, path, "streaming", options={"reposition": "true"})
    writer.prefill(FIRST)
    decoded(writer, ANSWER)
    writer.rows.finish()
    sequence, _ = open_with(sequence_of, path)
    expected = sequence_of("full", ctx_size=4096).prefill(SECOND)
    np.testing.assert_array_equal(sequence.prefill(SECOND), expected)
    assert sequence.timings.cached_tokens == 688


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q5_1")])
def test_rows_become_those_of_the_session(types, sequence_of, tmp_path):
    """As near to the answer without the file as rows of these types are to f16."""
    path = tmp_path / "a.session"
    keep(open_with(sequence_of, path)[0], FIRST)
    sequence, _ = open_with(sequence_of, path, types=types)
    exact, alone = (sequence_of("full", ctx_size=4096, types=each) for each in (None, types))
    found, own, expected = (each.prefill(SECOND) for each in (sequence, alone, exact))
    assert sequence.timings.cached_tokens == 688
    assert 0 < np.abs(found - expected).max() < 2 * np.abs(own - expected).max()
    back, _ = open_with(sequence_of, tmp_path / "b.session", types=types)
    keep(back, FIRST)
    again, _ = open_with(sequence_of, tmp_path / "b.session")
    again.prefill(SECOND)
    assert again.timings.cached_tokens == 688


def test_when_it_is_written(sequence_of, tmp_path):
    path = tmp_path / "a.session"
    sequence, said = open_with(sequence_of, path)
    keep(sequence, ANSWER * 4)  # short, but asked for
    first = path.read_bytes()
    for ids, n, is_new in (
        (ANSWER * 4 + tokens(40, 4), 32, False),
        (FIRST, 0, True),
        (SECOND, 688, False),
        (SECOND + tokens(600, 5), 688, True),
    ):
        assert n_cached(sequence, ids, keep) == n
        assert (path.read_bytes() != first) == is_new
        first = path.read_bytes()
    assert not said and path.stat().st_mode & 0o777 == 0o600


BAD = [{"first": 5}, {"first": -1}, {"types": ["q8_0", "f16"]}, {"rows": [740] * 4}]


@pytest.mark.parametrize("change", ["flipped", "cut", "empty", *BAD, "[" * 100_000])
def test_a_damaged_file_is_one_line_and_written_anew(change, sequence_of, tmp_path):
    """No row is attended to that no file has filled."""
    path = tmp_path / "a.session"
    sequence, said = open_with(sequence_of, path)
    keep(sequence, FIRST)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[-1000] ^= 1
    damaged = {"flipped": data, "cut": data[:-1], "empty": b""}.get(str(change))
    if damaged is None:
        forge(path, change)
    else:
        path.write_bytes(damaged)
    sequence.reset()
    expected = sequence_of("full", ctx_size=4096).prefill(FIRST)
    np.testing.assert_array_equal(keep(sequence, FIRST), expected)
    assert sequence.timings.cached_tokens == 0
    assert len(said) == 1 and str(path) in said[0] and path.read_bytes() == whole


def test_another_model_s_file_is_one_line_and_left_as_it_is(sequence_of, tmp_path):
    path = tmp_path / "a.session"
    sequence, said = open_with(sequence_of, path)
    sequence.rows.identity = KnownRoot("f" * 32)
    keep(sequence, FIRST)
    before = path.read_bytes()
    sequence, said = open_with(sequence_of, path)
    keep(sequence, SECOND)
    assert sequence.timings.cached_tokens == 0
    assert len(said) == 1 and "another model" in said[0] and path.read_bytes() == before


def test_a_file_of_dense_rows_is_not_lost_to_sparse_ones(sequence_of, tmp_path):
    path = tmp_path / "a.session"
    keep(open_with(sequence_of, path)[0], FIRST)
    dense, longer = path.read_bytes(), FIRST + tokens(600, 3)
    sparse, said = open_with(sequence_of, path)
    sparse.rows.identity = replace(sparse.rows.identity, reading=(2048, 512, 2))
    keep(sparse, longer)
    assert sparse.timings.cached_tokens == 512 and path.read_bytes() == dense
    assert len(said) == 1 and "read densely" in said[0] and "828 tokens" in said[0]
    keep(again := open_with(sequence_of, path)[0], longer)  # densely, it goes on
    assert again.timings.cached_tokens == 736 and path.read_bytes() != dense
