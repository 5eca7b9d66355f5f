"""What is said of Triton's compiling, and what is tried so that it compiles."""

from types import SimpleNamespace

import triton
from tiny_models import make_model

from sparsekv_cli import methods
from sparsekv_cli.commands import warmup
from sparsekv_cli.commands.progress import CompileProgress
from sparsekv_cli.session import Session


def test_only_what_is_compiled_is_told_of(monkeypatch, capsys):
    from sparsekv_cli.device.cuda import report_compiling

    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    report_compiling(CompileProgress())
    src = SimpleNamespace(name="_attend_kernel")

    def compiled(*, cache_hit):
        triton.knobs.compilation.listener(
            src=src, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit
        )

    compiled(cache_hit=True)
    assert capsys.readouterr().err == ""
    compiled(cache_hit=False)
    compiled(cache_hit=False)
    assert capsys.readouterr().err == "compiling kernels for this GPU (first run only)\n"


def test_every_method_is_tried_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(
        methods, "METHODS", {name: methods.METHODS[name] for name in ("full", "topk")}
    )
    monkeypatch.setattr(warmup, "GPU_PROMPT", 20)
    monkeypatch.setattr(warmup, "GPU_STEPS", 1)
    tried = []
    decode = Session.decode

    def watched(self, token):
        tried.append(type(self.method).__name__)
        return decode(self, token)

    monkeypatch.setattr(Session, "decode", watched)
    path = make_model(tmp_path / "m.gguf", n_embd=64, n_ff=64, n_vocab=259, head_dim=32)
    warmup.try_on_gpu(path)
    assert tried == ["Full", "TopK"]
