"""Prompts of a model whose hash is not known yet; and the last tokens that a method queries."""

import numpy as np
import pytest
from kept_prompts import KnownRoot, keep, keeping, prefixes_of, small_layers
from reference_records import LONG_CASES
from tiny_sequences import tokens

from sparsekv_cli.methods import build_method
from sparsekv_cli.models.identity import RowsIdentity

IDS = tokens(1100)
ROOT, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("begun", [None, ROOT])
@pytest.mark.parametrize("ended", [None, ROOT, OTHER])
def test_a_prompt_is_kept_if_its_model_is_known_in_the_end(begun, ended, is_kept, tmp_path):
    """is_kept: whether the caches keep their rows; else copies are written during the prefill."""
    said: list[str] = []
    caches = small_layers(len(IDS))
    for cache in caches:
        cache.can_prefill_in_parts = is_kept
    root = KnownRoot(begun)
    prefixes = prefixes_of(tmp_path, root, said.append, said.append)
    prefixes.begin(IDS, prefixes.find(IDS), 0, caches)
    for i, cache in enumerate(caches):
        prefixes.take(i, cache)
    root.name = ended
    prefixes.finish()
    if ended is None or begun not in (None, ended):
        assert not list(tmp_path.iterdir())
    else:
        assert len(list(tmp_path.iterdir())) == 3 and "1100 tokens are kept" in said[-1]
    if begun is None:
        assert "not looked for, the model is still being read" in said[0]
    again = small_layers()
    other = prefixes_of(tmp_path, KnownRoot(ROOT), said.append, said.append)
    n = other.load(other.find(IDS), again, len(IDS))
    assert n == (1088 if ended == ROOT else 0)
    for cache, expected in zip(again, caches, strict=True):
        np.testing.assert_array_equal(cache.store.k[:, :n], expected.store.k[:, :n])
    root.name = None  # the file of the model has changed
    assert prefixes.find(IDS).n == 0


def test_snapshots_of_a_model_that_is_known_late(sequence_of, tmp_path, monkeypatch):
    options = {"shape": LONG_CASES["lfm2"], "dense_layers": "none", "ctx_size": 4096}
    sequence = sequence_of("full", **options)
    said, known = keeping(sequence, tmp_path), RowsIdentity.known
    with monkeypatch.context() as patched:
        patched.setattr(RowsIdentity, "known", lambda root: None)
        sequence.prefill(IDS)
    sequence.rows.finish()
    assert len(list(tmp_path.glob("*.snapshot"))) == 2 and RowsIdentity.known is known
    alone = sequence_of("full", **options)
    sequence.reset()
    np.testing.assert_array_equal(keep(sequence, IDS + IDS[:9]), alone.prefill(IDS + IDS[:9]))
    assert sequence.timings.cached_tokens == 1024 and "not looked for" in said[0]


def test_the_tokens_that_a_method_queries_are_computed_again(tmp_path):
    caches = small_layers(len(IDS))
    first = prefixes_of(tmp_path, KnownRoot(ROOT), print, lambda text: None)
    first.begin(IDS, first.find(IDS), 0, caches)
    for i, cache in enumerate(caches):
        first.take(i, cache)
    first.finish()
    for name, n_queried, n_found in (("full", 1, 1088), ("lfps", 32, 1056), ("snapkv", 32, 1056)):
        method = build_method(name, {})
        assert max(1, method.n_queried) == n_queried
        prefixes = prefixes_of(tmp_path, KnownRoot(ROOT), print, print, method.n_queried)
        assert prefixes.find(IDS).n == n_found
        assert prefixes.find(IDS[: 1040 + n_queried]).n == 1040
