"""``--speculate ngram`` on a GPU, interpreted: ``run`` writes what it writes without drafts."""

import json

import pytest
from tiny_models import make_model

CASES = {
    "full": [],
    "topk": ["--budget", "24"],
    "quest": ["--budget", "24", "-o", "page=8"],
    "streaming": ["--budget", "24"],
}


@pytest.mark.parametrize(
    "method",
    [name if name == "quest" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES],
)
def test_the_text_is_that_without_drafts(method, tmp_path, invoke, few_programs):
    """The answer follows a pattern, so that drafts are made and most are accepted."""
    path = make_model(
        tmp_path / "m.gguf", wtype="F32", n_ctx=512, n_embd=64, n_ff=64, head_dim=32, n_layer=1
    )
    given = ["run", "-m", str(path), "--device", "cuda", "--temp", "0", "--prefill-dtype", "f32",
             "-t", "1", "-p", "a fox jumps; " * 3, "-n", "28", "--regex", "(fox; ){40}", "--json",
             "--method", method, *CASES[method]]  # fmt: skip
    given += [] if method == "full" else ["--dense-layers", "none"]
    results = [invoke(*given, "--speculate", source) for source in ("off", "ngram")]
    assert [result.code for result in results] == [0, 0], results[1].err
    off, ngram = (json.loads(result.out) for result in results)
    assert off["text"] == ngram["text"]
    speculation = ngram["timings"]["speculation"]
    assert speculation["accepted"] > 4 and speculation["steps"] < 28 - speculation["accepted"]
