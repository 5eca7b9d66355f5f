"""What architectures add to a layer, on a device against the CPU: windows, norms, caps, tables."""

import numpy as np
import pytest
from opened import decode_together, open_sequence
from tiny_gemma4 import Gemma4Layers
from tiny_models import make_model

from sparsekv_cli.commands.options.prefix import (
    PrefixOptions,
    open_prompt_rows,
    prefixes_maker,
)
from sparsekv_cli.device import window as windows
from sparsekv_cli.device.host import HostCache
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.prefix.snapshots import can_keep
from sparsekv_cli.settings.config import SessionConfig

PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 400, 400)]
SIZES = {"n_embd": 64, "n_ff": 64, "n_vocab": 400, "n_head": 2, "n_head_kv": 1, "head_dim": 32,
         "n_layer": 3, "n_ctx": 1024, "wtype": "F32"}  # fmt: skip
WINDOW = 40  # tokens, of the tiny models
MODELS = {
    "gemma2": {},
    "gemma3": {"n_layer": 6},  # the last layer is full
    "gemma4": {"layers": Gemma4Layers(wide=64, narrow=32, n_shared=0, n_input=0), "head_dim": None},
    "glm4": {},
    "olmo2": {"n_head": 4, "n_head_kv": 2, "head_dim": 16},
    "exaone4": {},
    "arcee": {},
}
LIMIT = 4e-3  # of logits: f32 sums in another order, keys that round to the next f16


@pytest.fixture
def opened(tmp_path):
    """Opens a tiny model on the CPU and on the device; both prefill in f32."""

    def open_both(arch, method="full", kv="device", **options):
        sizes = {**SIZES, **MODELS[arch]}
        path = make_model(tmp_path / f"{arch}.gguf", arch=arch, **sizes)
        given = {"threads": 1, "prefill_dtype": "f32", "chunk": 64}
        prepared = build_method(method, options, budget=None)
        return [
            open_sequence(path, prepared, SessionConfig(device=device, **given, **where))
            for device, where in (("cpu", {}), ("cuda", {"kv": kv}))
        ]

    return open_both


def agree(pair, call, limit=LIMIT):
    a, b = (call(sequence) for sequence in pair)
    np.testing.assert_allclose(b, a, atol=limit)
    return int(a.argmax())


@pytest.mark.parametrize("kv", ["device", "host"])
@pytest.mark.parametrize("arch", MODELS)
def test_logits(opened, arch, kv):
    """Of a prompt, of steps, after a rewind into steps, of a second prompt, and after a rewind."""
    pair = opened(arch, kv=kv)
    n = 2 * WINDOW + 11
    token = agree(pair, lambda sequence: sequence.prefill(PROMPT[:n]))
    for _ in range(3):
        token = agree(pair, lambda sequence, token=token: sequence.decode(token))
    for kept in (n + 1, n):
        for sequence in pair:
            sequence.rewind(kept)
            assert len(sequence.tokens) == kept
        agree(pair, lambda sequence: sequence.decode(7))
    agree(pair, lambda sequence: sequence.prefill(PROMPT[n : n + 60]))
    for sequence in pair:
        sequence.rewind(n - 20)
    agree(pair, lambda sequence: sequence.decode(9))


@pytest.mark.parametrize("kv", ["device", "host"])
@pytest.mark.parametrize("arch", ["gemma2", "gemma4"])
def test_two_sequences(opened, arch, kv, monkeypatch):
    """In common launches; one has filled its window, the other has not."""
    monkeypatch.setattr(windows, "N_SPARE", 8)
    _, sequence = opened(arch, kv=kv)
    lengths, expected = (WINDOW + 13, 20), []
    for n in lengths:
        sequence.reset()
        sequence.prefill(PROMPT[:n])
        expected.append([sequence.decode(token) for token in (5, 6, 7)])
    both = [sequence.another() for _ in lengths]
    for each, n in zip(both, lengths, strict=True):
        each.prefill(PROMPT[:n])
    found = [decode_together(both, [token, token]) for token in (5, 6)]
    both[1].rewind(lengths[1] + 1)
    alone = both[1].decode(6)
    found.append(decode_together(both, [7, 7]))
    np.testing.assert_allclose(found, np.swapaxes(expected, 0, 1), atol=1e-4)
    np.testing.assert_allclose(alone, expected[1][1], atol=1e-4)


METHODS = {
    "topk": {"budget": "32"},
    "streaming": {"budget": "32"},
    "fasa": {"budget": "40"},
    "lfps": {"budget": "32", "epsilon": "0.5"},
    "snapkv": {"budget": "48"},
    "h2o": {"budget": "48"},
    "faedkv": {"budget": "48"},
}


@pytest.mark.parametrize("kv", ["auto", "host"])
@pytest.mark.parametrize("method", METHODS)
def test_methods(opened, method, kv, tmp_path, monkeypatch):
    """In the full layers of a model with windows and softcaps, as on the CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pair = opened("gemma2", method, kv, dense_layers="none", **METHODS[method])
    agree(pair, lambda sequence: sequence.prefill(PROMPT[:90]))
    for token in PROMPT[:4]:
        agree(pair, lambda sequence, token=token: sequence.decode(token), 2e-2)
    a, b = (sequence.ledger() for sequence in pair)
    assert a["sparse_rows_attended"] == b["sparse_rows_attended"] > 0 or method == "faedkv"
    assert isinstance(pair[1].caches[1], HostCache) == (kv == "host" or method not in
                                                        ("topk", "streaming", "fasa"))  # fmt: skip


@pytest.mark.parametrize("method", ["quest", "freekv", "sals"])
def test_methods_that_choose_without_softcaps_are_refused(opened, method, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(SparseKVError, match=f"{method}: on a GPU it does not choose by capped"):
        opened("gemma2", method, dense_layers="none")


def test_rows_of_windows_are_not_kept_on_disk(opened, tmp_path):
    on_cpu, on_device = opened("gemma2")
    assert can_keep(on_cpu.model.decoder) and not can_keep(on_device.model.decoder)
    session, device = tmp_path / "rows.session", on_device.model
    with pytest.raises(SparseKVError, match="--session: rows of window layers on a GPU cannot be"):
        open_prompt_rows(device, PrefixOptions(None, None, False, session), on_device.method)
    folder = PrefixOptions(tmp_path, None, False, None)
    assert prefixes_maker(device, folder)(on_device.method) is None
