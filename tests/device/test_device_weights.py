"""Weights on the device: a format that the GPU has no kernel for is held as bf16."""

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from tiny_models import make_model

from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.kernels.weights.packed import PACKABLE
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

torch = pytest.importorskip("torch")

from sparsekv_cli.device.weights import DeviceWeights, resident_bytes  # noqa: E402

IDS = [1, 262, 280, 17, 310, 99, 266, 4, 401, 267]


def weights_of(path):
    config = SessionConfig(threads=1, prefill_dtype="f32", repack="off")
    return load_model(path, build_method("full", {}, budget=None), config).decoder.weights


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(PACKABLE)))
def test_a_format_without_a_kernel_is_held_as_bf16(name, tmp_path):
    path = make_model(tmp_path / "m.gguf", wtype=name, n_layer=1, n_ff=256)
    weights = weights_of(path)
    on_device = DeviceWeights(weights, torch.device("cpu"), "quantized")
    (part,) = on_device.layers[0].ffn.down.parts
    (tensor,) = (t for t in GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    exact = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).reshape(256, 256))
    assert part.name == "BF16"
    assert torch.equal(part.low, exact.to(torch.bfloat16))
    assert on_device.nbytes <= resident_bytes(weights, "quantized")


@pytest.mark.parametrize("name", ["IQ3_S", "NVFP4"])
def test_such_a_model_gives_the_logits_of_the_cpu(name, tmp_path):
    sizes = {"n_layer": 1, "n_ff": 256, "attention_gain": 1.0}
    path = make_model(tmp_path / "m.gguf", wtype=name, **sizes)
    logits = []
    for device in ("cpu", "cuda"):
        config = SessionConfig(threads=1, device=device, prefill_dtype="f32", chunk=32)
        sequence = load_model(path, build_method("full", {}, budget=None), config).sequence()
        logits.append(np.stack([sequence.prefill(IDS), sequence.decode(7)]))
    expected, found = logits
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()  # weights of 8 bits
