"""Models with experts on a device against the CPU: prefill, steps, rewinds, several sequences."""

import numpy as np
import pytest
from opened import decode_together, open_sequence
from tiny_architectures import Experts
from tiny_gemma4 import Gemma4Layers
from tiny_models import make_model

from sparsekv_cli.device.layers.experts import DeviceExperts
from sparsekv_cli.device.weights import resident_bytes
from sparsekv_cli.methods import build_method
from sparsekv_cli.settings.config import SessionConfig

PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 400, 400)]
SIZES = {"n_embd": 64, "n_ff": 64, "n_vocab": 400, "n_head": 2, "n_head_kv": 1, "head_dim": 32,
         "n_layer": 2, "n_ctx": 512, "wtype": "F32"}  # fmt: skip
MIXTRAL = Experts(n=4, n_used=2, n_ff=64, own_length=False)
MODELS = {
    "llama": {"experts": MIXTRAL},
    "qwen2moe": {},
    "qwen3moe": {},
    "granitemoe": {},
    "gpt-oss": {},
    "deepseek": {},
    "ernie4_5-moe": {},
    "glm4moe": {},
    "minimax-m2": {"n_head": 4, "n_head_kv": 2, "head_dim": 16},
    "bailingmoe2": {},
    "gemma4": {
        "layers": Gemma4Layers(wide=64, narrow=32, n_shared=0, n_input=0),
        "experts": Experts(n=8, n_used=2, n_ff=64, beside=True),
        "head_dim": None,
    },
}
LIMIT = 4e-3  # of logits: f32 sums in another order, keys that round to the next f16


def open_both(folder, arch, kv="device", **options):
    """A tiny model on the CPU and on the device."""
    sizes = {**SIZES, **MODELS[arch], **options}
    path = make_model(folder / f"{arch}.gguf", arch=arch, **sizes)
    given = {"threads": 1, "prefill_dtype": "f32", "chunk": 64, "activations": "16"}
    prepared = build_method("full", {})
    return [
        open_sequence(path, prepared, SessionConfig(device=device, **given, **where))
        for device, where in (("cpu", {}), ("cuda", {"kv": kv}))
    ]


def agree(pair, call, limit=LIMIT):
    a, b = (call(sequence) for sequence in pair)
    np.testing.assert_allclose(b, a, atol=limit)
    return int(a.argmax())


@pytest.mark.parametrize("kv", ["device", "host"])
@pytest.mark.parametrize("arch", MODELS)
def test_logits(tmp_path, arch, kv):
    pair = open_both(tmp_path, arch, kv=kv)
    token = agree(pair, lambda sequence: sequence.prefill(PROMPT[:91]))
    for _ in range(2):
        token = agree(pair, lambda sequence, token=token: sequence.decode(token))
    for sequence in pair:
        sequence.rewind(91)
    agree(pair, lambda sequence: sequence.decode(7))
    agree(pair, lambda sequence: sequence.prefill(PROMPT[91:120]))
    layers = pair[1].model.decoder._on_device.layers
    assert isinstance(layers[-1].ffn, DeviceExperts)


def expert_types(gate, up, down, n_layer=1):
    names = zip(("gate", "up", "down"), (gate, up, down), strict=True)
    return {f"blk.{i}.ffn_{x}_exps.weight": t for x, t in names for i in range(n_layer)}


@pytest.mark.parametrize(
    ("arch", "wtype"),
    [("qwen3moe", "Q4_K"), ("qwen3moe", "Q6_K"), ("qwen3moe", "IQ4_XS"), ("gpt-oss", "MXFP4")],
)
def test_formats(tmp_path, arch, wtype):
    """Quantised experts; formats without a kernel are bf16."""
    experts = Experts(n=6, n_used=2, n_ff=256, biases=arch == "gpt-oss")
    types = expert_types(wtype, wtype, wtype)
    sizes = {"n_embd": 256, "wtypes": types, "experts": experts, "n_layer": 1}
    pair = open_both(tmp_path, arch, **sizes)
    limit = 2e-2 if wtype in ("IQ4_XS", "MXFP4") else 4e-3
    agree(pair, lambda sequence: sequence.prefill(PROMPT[:20]), limit)
    agree(pair, lambda sequence: sequence.decode(7), limit)
    on_device, weights = pair[1].model.decoder._on_device, pair[1].model.decoder.weights
    routers = sum(layer.ffn.router.nbytes for layer in on_device.layers)
    assert on_device.nbytes - routers <= resident_bytes(weights, "quantized")


def test_gate_and_up_of_two_formats(tmp_path):
    experts = Experts(n=6, n_used=2, n_ff=256)
    types = expert_types("Q4_K", "Q8_0", "Q6_K")
    sizes = {"n_embd": 256, "wtypes": types, "experts": experts, "n_layer": 1}
    pair = open_both(tmp_path, "qwen3moe", **sizes)
    assert len(pair[1].model.decoder._on_device.layers[0].ffn.gate_up.parts) == 2
    agree(pair, lambda sequence: sequence.prefill(PROMPT[:20]))
    agree(pair, lambda sequence: sequence.decode(7))


@pytest.mark.parametrize("arch", ["qwen2moe", "gpt-oss"])
@pytest.mark.parametrize("n_sequences", [2, 3])
def test_several_sequences(tmp_path, arch, n_sequences):
    """Each row chooses its own experts, and rows that are padding choose some, too."""
    _, sequence = open_both(tmp_path, arch)
    lengths, expected = (60, 33, 9)[:n_sequences], []
    for n in lengths:
        sequence.reset()
        sequence.prefill(PROMPT[n : 2 * n])
        expected.append([sequence.decode(token) for token in (5, 6)])
    all_of = [sequence.another() for _ in lengths]
    for each, n in zip(all_of, lengths, strict=True):
        each.prefill(PROMPT[n : 2 * n])
    found = [decode_together(all_of, [token] * n_sequences) for token in (5, 6)]
    np.testing.assert_allclose(found, np.swapaxes(expected, 0, 1), atol=4e-3)


def test_a_prompt_in_bf16(tmp_path):
    """Most rows choose the same experts as in f32."""
    path, logits = make_model(tmp_path / "m.gguf", arch="granitemoe", **SIZES), []
    for dtype in ("f32", "bf16"):
        config = SessionConfig(threads=1, device="cuda", prefill_dtype=dtype)
        sequence = open_sequence(path, build_method("full", {}), config)
        logits.append(sequence.prefill(PROMPT[:40], all_logits=True))
    assert np.median(np.abs(logits[1] - logits[0])) < 0.02 * np.abs(logits[0]).max()
