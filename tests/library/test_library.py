"""The library: what it answers is what the commands answer, and what it refuses."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from sparsekv_cli import Reply, load
from sparsekv_cli.errors import SparseKVError

FAST = {"threads": 1, "prefill_dtype": "f32"}
ASKED = [{"role": "user", "content": "What is it?"}]


def test_an_answer_is_that_of_run(path, model, invoke_run):
    reply = model.chat(ASKED, temperature=0, max_tokens=12)
    told = invoke_run(path, "-p", "What is it?", "-n", "12", "--temp", "0")
    assert str(reply) == reply.text == told["text"] and reply.tokens == told["tokens"]
    assert reply.stop_reason == told["stop_reason"]
    assert reply.usage["prompt_tokens"] == told["prompt_tokens"]
    assert reply.usage["total_tokens"] == told["prompt_tokens"] + len(told["tokens"])
    assert reply.timings.keys() == told["timings"].keys() and reply.timings["ttft_s"] > 0
    assert reply.ledger == told["ledger"]
    plain = model.generate("What is it?", temperature=0, max_tokens=12)
    told = invoke_run(path, "-p", "What is it?", "-n", "12", "--temp", "0", "--raw")
    assert plain.tokens == told["tokens"] != reply.tokens


def test_pieces_of_a_stream(model):
    whole = model.generate("some words", temperature=0.0, max_tokens=20)
    stream = model.generate("some words", temperature=0.0, max_tokens=20, stream=True)
    pieces = list(stream)
    assert len(pieces) > 1 and "".join(pieces) == whole.text and isinstance(stream.reply, Reply)
    assert stream.reply.tokens == whole.tokens and stream.reply.ledger == whole.ledger


def test_a_beginning_is_not_computed_again(model):
    ids = "a b c d e f g " * 12
    first = model.generate(ids, max_tokens=4, temperature=0)
    again = model.generate(ids, max_tokens=4, temperature=0)
    longer = model.generate(ids + "h i j", max_tokens=4, temperature=0)
    n = first.usage["prompt_tokens"]
    assert first.usage["cached_tokens"] == 0 and again.usage["cached_tokens"] == n
    assert again.tokens == first.tokens and 0 < longer.usage["cached_tokens"] <= n


def test_one_call_at_a_time(model):
    stream = model.generate("x", stream=True, max_tokens=30)
    next(stream)
    with pytest.raises(SparseKVError, match="busy with another answer"):
        model.generate("y", max_tokens=1)
    stream.close()
    assert model.generate("y", max_tokens=1).usage["completion_tokens"] <= 1


def test_methods_of_a_call(path, model):
    """A call's method is its own; the next call has the model's again. Threads take turns."""
    prompt = "a b c d e f g " * 20
    full = model.generate(prompt, temperature=0, max_tokens=10)
    sparse = model.generate(prompt, temperature=0, max_tokens=10, method="topk", budget=16)
    assert 0 < sparse.ledger["rows_attended"] < full.ledger["rows_attended"]
    assert model.generate(prompt, temperature=0, max_tokens=10).ledger == full.ledger
    with load(path, "topk", 16, n_ctx=400, sparse_from=0, **FAST) as other:
        alone = other.generate(prompt, temperature=0, max_tokens=10)
    assert alone.tokens == sparse.tokens
    found: list[Reply] = []

    def ask() -> None:
        found.append(model.generate(prompt, temperature=0, max_tokens=10))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found[0].tokens == full.tokens


def test_stops_schemas_and_seeds(model):
    text = model.generate("a", temperature=0, max_tokens=30).text
    stop = text[len(text) // 2 :][:3]
    ended = model.generate("a", temperature=0, max_tokens=30, stop=stop)
    assert ended.stop_reason == "stop" and ended.text == text.partition(stop)[0]
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    answer = model.chat(ASKED, json_schema=schema, max_tokens=60, seed=3)
    assert json.loads(answer.text)["a"] in (1, 2)
    one, two, other = (model.generate("a", seed=s, max_tokens=9).tokens for s in (1, 1, 2))
    assert one == two != other


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "temprature: no such field .did you mean temperature"),
        ({"temperature": -1}, "temperature = -1: expected 0.0 or more"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": -1}, "max_tokens = -1: expected 0 or more"),
        ({"stop": [5]}, "stop: expected a text or a list of texts"),
        ({"method": "none"}, "unknown method 'none'"),
        ({"budget": "16"}, "method full has no option 'budget'"),
        ({"json_schema": True, "regex": "a"}, "exclude each other"),
    ],
)
def test_what_is_refused(model, given, words):
    with pytest.raises((SparseKVError, ValueError), match=words):
        model.generate("a", **given)
    with pytest.raises((SparseKVError, ValueError), match=words):
        model.generate("a", stream=True, **given)
    assert model.generate("a", max_tokens=1).usage["prompt_tokens"] >= 1


def test_prompts_that_cannot_be(model):
    with pytest.raises(SparseKVError, match="do not fit the context of 400"):
        model.generate("word " * 500)
    with pytest.raises(SparseKVError, match="role"):
        model.chat([{"role": 5, "content": None}])
    assert model.generate("a", max_tokens=0).text == ""


def test_tokens_and_the_end(path):
    with load(path, **FAST) as model:
        ids = model.tokenize("some words", add_bos=True)
        assert model.detokenize(ids[1:]).strip() == "some words"
        assert len(model.tokenize("<|im_end|>")) > 1
        assert model.tokenize("<|im_end|>", parse_special=True) == [2]
        stream = model.generate("a", stream=True)
        next(stream)
    assert list(stream) == [] and stream.reply.stop_reason == "interrupt"
    with pytest.raises(SparseKVError, match="the model is closed"):
        model.generate("a")
    with pytest.raises(SparseKVError, match="no-such-model"):
        load("no-such-model")
    with pytest.raises(ValueError, match="unknown method"):
        load(path, "nothing")


@pytest.fixture
def invoke_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    from sparsekv_cli.cli import main

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))

    def run(path: Path, *arguments: str) -> Any:
        fast = ["-t", "1", "--prefill-dtype", "f32", "-c", "400", "--json"]
        with pytest.raises(SystemExit):
            main(["run", "-m", str(path), *fast, *arguments])
        told = capfd.readouterr()
        assert told.out, told.err
        return json.loads(told.out)

    return run


def test_the_notebook_runs(default_model, capsys):
    """Every cell of docs/python.ipynb, in order, on the default model."""
    path = Path(__file__).resolve().parents[2] / "docs" / "python.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["sparse"].ledger["rows_attended"] < names["full"].ledger["rows_attended"]
    assert capsys.readouterr().out
