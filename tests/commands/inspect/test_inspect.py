"""The command ``inspect``, through the program's entry point."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from split_models import split_model
from tiny_architectures import Experts
from tiny_models import make_model

from sparsekv_cli.cli import main


def write_model(
    path: Path,
    *,
    nan: bool = False,
    tensors: bool = True,
    head_count: int = 2,
    architecture: str = "llama",
    extra_type: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """A tiny file with a tokenizer; its name tries to be markup and a terminal escape."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("[bold]tiny[/bold]\x1b[31m\nmodel")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(head_count)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_float32("llama.odd", float("nan"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 99)
    writer.add_chat_template("{{ messages }}")
    if tensors:
        values = np.ones((4, 64), np.float32)
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        if nan:
            quantised[2, 34:36] = 0xFF
        writer.add_tensor("token_embd.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("output_norm.weight", values[0])
    if extra_type is not None:
        row = np.zeros((1, gguf.GGML_QUANT_SIZES[extra_type][1]), np.uint8)
        writer.add_tensor("extra", row, raw_dtype=extra_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def inspect(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *map(str, arguments)])
    code = caught.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def read_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    captured = capsys.readouterr()
    assert captured.err == ""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(captured.out, parse_constant=refuse)


def test_json(model, capsys):
    assert inspect(model, "--json", "--tensors", "--check-tensors") == 0
    summary = read_json(capsys)
    assert summary["architecture"] == "llama"
    assert summary["file_bytes"] == model.stat().st_size
    assert summary["parameters"] == 4 * 64 + 64
    assert summary["tensor_bytes"] == 4 * 68 + 256
    assert summary["bits_per_weight"] == round(8 * (272 + 256) / 320, 3)
    assert summary["types"] == [
        {"type": "Q8_0", "tensors": 1, "parameters": 256, "bytes": 272},
        {"type": "F32", "tensors": 1, "parameters": 64, "bytes": 256},
    ]
    assert summary["hyperparameters"]["n_head"] == 2
    assert summary["hyperparameters"]["head_dim"] == 32
    assert summary["hyperparameters"]["n_vocab"] == 4
    kv_cache = summary["kv_cache"]  # 2 layers, 2 heads, K and V of 32
    assert {kind: of["bytes_a_token"] for kind, of in kv_cache["types"].items()} == {
        "f16": 512, "q8_0": 272, "q5_1": 192, "q4_0": 144
    }  # fmt: skip
    if kv_cache["memory_available"] is not None:
        expected = (kv_cache["memory_available"] - 528) // 272 // 256 * 256
        assert kv_cache["types"]["q8_0"]["fitting_context"] == expected
    assert summary["rope"]["freq_base"] == 10000.0
    assert summary["context_length"] == 128
    assert summary["problem"] is None
    assert summary["tokenizer"]["model"] == "gpt2"
    assert summary["tokenizer"]["pre"] == "smollm"
    assert summary["tokenizer"]["n_tokens"] == 4
    assert summary["tokenizer"]["n_merges"] == 1
    assert summary["tokenizer"]["has_chat_template"] is True
    assert summary["tokenizer"]["special"] == {
        "eos": {"id": 0, "text": "<|end|>"},
        "bos": {"id": 99, "text": None},
    }
    assert summary["metadata"]["llama.odd"] == "nan"
    assert [one["name"] for one in summary["tensors"]] == [
        "token_embd.weight",
        "output_norm.weight",
    ]
    assert summary["tensors"][0]["shape"] == [4, 64]
    assert summary["check"] == {"tensors": 2, "bad": 0, "unchecked_types": []}


def test_tables(model, capsys):
    assert inspect("-m", model, "--tensors", "--metadata") == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out
    assert r"[bold]tiny[/bold]\x1b[31m\nmodel" in captured.out
    for text in (
        "320 in 2 tensors",
        "Q8_0",
        "token_embd.weight",
        "4 x 64",
        "smollm",
        "llama.odd",
        "64.00 KiB",
    ):
        assert text in captured.out
    assert "0 '<|end|>'" in captured.out
    assert ["f16", "512", "B", "64.00", "KiB"] in [x.split()[:5] for x in captured.out.splitlines()]


def test_environment_names_the_model(model, capsys, monkeypatch):
    monkeypatch.setenv("SPARSEKV_MODEL", str(model))
    assert inspect("--json") == 0
    assert read_json(capsys)["path"] == str(model)


def test_vocabulary_only(tmp_path, capsys):
    path = write_model(tmp_path / "vocab.gguf", tensors=False)
    assert inspect(path, "--json") == 0
    summary = read_json(capsys)
    assert summary["vocabulary_only"] is True
    assert summary["bits_per_weight"] is None
    assert "vocabulary only" in summary["problem"]
    assert summary["types"] == []
    assert inspect(path) == 0
    assert "none (vocabulary only)" in capsys.readouterr().out


def test_a_broken_hyper_parameter_is_shown_and_fails(tmp_path, capsys):
    path = write_model(tmp_path / "odd.gguf", head_count=3)
    assert inspect(path, "--json") == 1
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["hyperparameters"] is None
    assert "not a multiple of head_count = 3" in summary["problem"]
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert inspect(path) == 1
    assert "cannot run" in capsys.readouterr().out


def test_an_unsupported_architecture_is_shown(tmp_path, capsys):
    path = write_model(tmp_path / "other.gguf", architecture="mamba")
    assert inspect(path, "--json") == 0
    summary = read_json(capsys)
    assert summary["architecture"] == "mamba"
    assert "'mamba' is not supported; supported are " in summary["problem"]
    assert ", deepseek, " in summary["problem"]
    assert summary["parameters"] == 320


@pytest.mark.parametrize(
    ("arch", "shown"),
    [("qwen2moe", "3 of 8 a token, and a shared one"), ("qwen3moe", "3 of 8 a token")],
)
def test_experts_are_shown(arch, shown, tmp_path, capsys):
    path = make_model(tmp_path / "experts.gguf", arch=arch, n_embd=64)
    assert inspect(path) == 0
    assert any(
        line.split(None, 1) == ["experts", shown]
        for line in map(str.strip, capsys.readouterr().out.splitlines())
    )
    assert inspect(path, "--json") == 0
    sizes = read_json(capsys)["hyperparameters"]
    assert (sizes["n_expert"], sizes["n_expert_used"], sizes["n_ff_expert"]) == (8, 3, 96)
    assert sizes["n_ff"] == 0 and sizes["normalised"] == (arch == "qwen3moe")


def test_experts_of_a_model_that_cannot_be_run_are_shown(tmp_path, capsys):
    path = make_model(tmp_path / "experts.gguf", arch="qwen3", n_embd=64, experts=Experts())
    assert inspect(path, "--json") == 0
    summary = read_json(capsys)
    assert summary["experts"] == {"total": 8, "used": 3, "shared": False}
    assert "no experts can be run with this architecture" in summary["problem"]


def test_layers_that_differ_are_listed(tmp_path, capsys):
    path = make_model(tmp_path / "model.gguf", arch="smollm3", n_layer=4, n_embd=64)
    assert inspect(path, "--json") == 0
    sizes = read_json(capsys)["hyperparameters"]
    assert sizes["n_rot"] == [16, 16, 16, 0] and sizes["n_head"] == 4


def test_kinds_of_layers_and_their_memory(tmp_path, capsys):
    """Recurrent layers have a state, whose bytes do not depend on the context."""
    path = make_model(tmp_path / "model.gguf", arch="qwen35", n_layer=4, n_embd=64)
    assert inspect(path, "--json") == 0
    state, full = read_json(capsys)["layers"]
    assert (state["kind"], state["layers"], full["kind"], full["layers"]) == ("state", 2, "full", 2)
    d, n_v, n_k = 32, 4, 2
    assert state["bytes"] == 2 * 4 * (3 * (n_v + 2 * n_k) * d + n_v * d * d)
    path = make_model(tmp_path / "model.gguf", arch="gemma4", n_layer=4, n_embd=64)
    assert inspect(path, "--json") == 0
    layers = read_json(capsys)["layers"]
    kinds = {each["kind"]: (each["layers"], each["bytes"]) for each in layers}
    assert kinds["shared"] == (1, 0) and kinds["full"] == (1, 32768 * 2 * 2 * 2 * 512)
    assert kinds["window"] == (2, 2 * 2 * (40 + 256) * 2 * 2 * 256)


def test_an_unsupported_type_is_shown(tmp_path, capsys):
    path = write_model(tmp_path / "other.gguf", extra_type=gguf.GGMLQuantizationType.Q8_K)
    assert inspect(path, "--json", "--check-tensors") == 0
    summary = read_json(capsys)
    assert "has type Q8_K, which is not supported" in summary["problem"]
    assert summary["hyperparameters"]["n_layer"] == 2


def test_damaged_scales(tmp_path, capsys):
    path = write_model(tmp_path / "nan.gguf", nan=True)
    assert inspect(path) == 0
    capsys.readouterr()
    assert inspect(path, "--check-tensors", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "'token_embd.weight' (Q8_0): 1 of 8 blocks, from row 2 on" in captured.err


def test_failures(model, capsys, monkeypatch):
    monkeypatch.delenv("SPARSEKV_MODEL", raising=False)
    assert inspect(model.parent / "missing.gguf") == 1
    assert "No such file" in capsys.readouterr().err
    assert inspect() == 2
    assert "no model" in capsys.readouterr().err
    assert inspect(model, "-m", model) == 2
    assert "given twice" in capsys.readouterr().err
    model.write_bytes(model.read_bytes()[:-300])
    assert inspect(model) == 1
    error = capsys.readouterr().err
    assert "bytes are missing" in error
    assert error.count("\n") == 1


def test_split_model(model, tmp_path, capsys):
    parts = split_model(model, tmp_path, 2)
    assert inspect(parts[1], "--json", "--tensors", "--check-tensors") == 0
    summary = read_json(capsys)
    assert summary["path"] == str(parts[0]) and summary["parameters"] == 320
    assert summary["files"] == [part.name for part in parts]
    assert summary["file_bytes"] == sum(part.stat().st_size for part in parts)
    assert [one["file"] for one in summary["tensors"]] == summary["files"]
    assert summary["check"]["tensors"] == 2 and summary["problem"] is None
    assert inspect(parts[0]) == 0
    assert " in 2 files, GGUF version 3" in capsys.readouterr().out
    parts[1].unlink()
    assert inspect(parts[0], "--json") == 0
    summary = read_json(capsys)
    assert summary["n_tensors"] == 1 and f"{parts[1].name} is missing" in summary["problem"]
