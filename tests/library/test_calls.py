"""Calls of the library: what a prompt may be, several prompts, threads, interrupts, the disk."""

import asyncio
import threading
import time

import numpy as np
import pytest
from interrupted import files_of, places_of, stopped_at
from waiting import PATIENCE

import sparsekv_cli
from sparsekv_cli import Reply, load
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import METHODS

FAST = {"threads": 1, "prefill_dtype": "f32"}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXT = "some words that make a prompt of a few tokens"


# --- what a prompt may be -------------------------------------------------------------------------


def test_a_text_is_a_message_and_ids_are_a_prompt(model):
    said = model.chat("What is it?", **GREEDY)
    assert said.tokens == model.chat([{"role": "user", "content": "What is it?"}], **GREEDY).tokens
    ids = model.tokenize(TEXT, add_bos=True)
    for prompt in (ids, np.array(ids), tuple(ids)):
        assert model.generate(prompt, **GREEDY).tokens == model.generate(TEXT, **GREEDY).tokens


def test_a_list_of_prompts_has_the_replies_that_each_has_alone(model):
    prompts = [TEXT, "a b c", model.tokenize("some ids", add_bos=True), *map(str, range(7))]
    together = model.generate(prompts, **GREEDY)
    assert [type(reply) for reply in together] == [Reply] * len(prompts)
    for prompt, reply in zip(prompts, together, strict=True):
        alone = model.generate(prompt, **GREEDY)
        assert (reply.text, reply.tokens) == (alone.text, alone.tokens)
    asked = ["one", [{"role": "user", "content": "two"}]]
    both = model.chat(asked, method="topk", budget=16, **GREEDY)
    assert [reply.tokens for reply in both] == [
        model.chat(each, method="topk", budget=16, **GREEDY).tokens for each in asked
    ]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (5, "the prompt is of type int: expected a text, a list of token ids"),
        (None, "of type NoneType"),
        (b"bytes", "of type bytes"),
        ({"role": "user"}, "of type dict"),
        ([], "an empty list"),
        ([1, "a"], "a list of int and str"),
        ([1, None], r"prompt\[1\] is of type NoneType"),
        ([1, True], r"prompt\[1\] is of type bool"),
        ([1, 2.5], r"prompt\[1\] is of type float"),
        ([1, 10**9], "token id 1000000000 is not in the vocabulary"),
        ([-1], "token id -1"),
        (["a", 5], "a list of int and str"),
        (["a", []], "the prompt is empty: give at least one token"),
    ],
)
def test_prompts_of_a_wrong_type(model, prompt, words):
    with pytest.raises(SparseKVError, match=words):
        model.generate(prompt, max_tokens=1)
    assert model.generate("a", max_tokens=1).usage["completion_tokens"] <= 1


@pytest.mark.parametrize("messages", [5, None, b"x", {"role": "user", "content": "a"}, [1], []])
def test_conversations_of_a_wrong_type(model, messages):
    with pytest.raises(SparseKVError, match="expected a text, a list of messages"):
        model.chat(messages)


def test_values_of_pythons_own_types(model):
    banned = model.generate("a", **GREEDY).tokens[0]
    for key in (banned, str(banned), np.int64(banned)):
        assert model.generate("a", logit_bias={key: -100}, **GREEDY).tokens[0] != banned
    given = {"temperature": np.float32(0), "max_tokens": np.int64(3), "ignore_eos": True}
    assert len(model.generate("a", stop=("never",), **given).tokens) == 3
    for given, words in (
        ({"temperature": object()}, "temperature = a value of type object: expected a number"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {5: "a"}}, "logit_bias"),
        ({"logprobs": -1}, "logprobs = -1: expected 0 or more"),
        ({"stop": b"x"}, "stop"),
    ):
        with pytest.raises(SparseKVError, match=words):
            model.generate("a", **given)
    with pytest.raises(SparseKVError, match="stream: does not work with a list of prompts"):
        model.generate(["a", "b"], stream=True)


def test_log_probabilities(model):
    reply = model.generate(TEXT, logprobs=2, **GREEDY)
    assert [entry["id"] for entry in reply.logprobs] == reply.tokens
    for entry in reply.logprobs:
        assert entry["top"][0]["id"] == entry["id"] and len(entry["top"]) == 2
    assert model.generate(TEXT, **GREEDY).logprobs == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_gpu_layers": -1}, 'load has no setting n_gpu_layers: device="cuda" takes a GPU'),
        ({"ctx_size": 100}, "ctx_size: it is n_ctx here"),
        ({"temperature": 0.5}, "temperature: give it to chat and generate"),
        ({"prefil_dtype": "f32"}, r"prefil_dtype \(did you mean prefill_dtype\?\)"),
        ({"threads": -1}, "threads"),
        ({"device": "tpu"}, "device"),
        ({"budjet": 1}, "did you mean budget"),
    ],
)
def test_settings_that_do_not_exist(path, settings, words):
    with pytest.raises(ValueError, match=words):
        load(path, **settings)


def test_names_of_the_package():
    assert {"load", "LanguageModel", "Reply", "Stream", "__version__"} <= set(dir(sparsekv_cli))
    assert all(hasattr(sparsekv_cli, name) for name in dir(sparsekv_cli))


# --- the end of an answer -------------------------------------------------------------------------


def test_a_closed_stream_has_the_text_so_far(model):
    stream = model.generate(TEXT, stream=True, temperature=0, max_tokens=40, ignore_eos=True)
    assert stream.reply is None
    pieces = [next(stream) for _ in range(3)]
    stream.close()
    reply = stream.reply
    assert reply is not None and reply.stop_reason == "interrupt"
    assert reply.text.startswith("".join(pieces)) and 3 <= len(reply.tokens) < 40
    assert reply.usage["completion_tokens"] == len(reply.tokens)
    assert list(stream) == [] and stream.reply is reply
    stream.close()
    unread = model.generate(TEXT, stream=True)
    unread.close()
    assert list(unread) == [] and unread.reply is None


def test_close_during_the_answer_of_another_thread(path):
    for ask in (
        lambda model: model.generate(TEXT, max_tokens=5000, ignore_eos=True).stop_reason,
        lambda model: list(model.generate(TEXT, stream=True, max_tokens=5000, ignore_eos=True)),
        lambda model: model.generate([TEXT] * 3, max_tokens=5000, ignore_eos=True),
    ):
        model, found, began = load(path, n_ctx=6000, **FAST), [], threading.Event()
        begin = model._begin

        def noting(pieces, begin=begin, began=began):
            begin(pieces)
            began.set()

        model._begin = noting

        def answer(ask=ask, model=model, found=found):
            try:
                found.append(ask(model))
            except SparseKVError as error:
                found.append(str(error))

        thread = threading.Thread(target=answer)
        thread.start()
        assert began.wait(PATIENCE)
        time.sleep(0.05)
        model.close()
        thread.join(PATIENCE)
        assert not thread.is_alive() and len(found) == 1
        assert isinstance(found[0], list) or found[0] in (
            "interrupt",
            "the model is closed: load it again",
        )
        with pytest.raises(SparseKVError, match="closed"):
            model.generate("a")
        model.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_ctrl_c_at_each_line_leaves_a_model_that_answers(model, is_stream, pytestconfig):
    """The next answer is right, too."""
    files = files_of("library", "engine.py", "sequence.py", "generation/generation.py")
    expected = model.generate(TEXT + " and more", **GREEDY).tokens

    def ask() -> None:
        answer = model.generate(TEXT, stream=is_stream, **GREEDY)
        if is_stream:
            try:
                list(answer)
            finally:
                answer.close()

    places = places_of(ask, files)
    for place in places if pytestconfig.getoption("--all") else places[is_stream::9]:
        stopped_at(place, ask, files)
        assert model.generate(TEXT + " and more", **GREEDY).tokens == expected, place


# --- threads and the disk -------------------------------------------------------------------------


def test_asyncio(model):
    async def talk():
        alone = await model.achat("What is it?", **GREEDY)
        pieces = []
        stream = await model.agenerate(TEXT, stream=True, **GREEDY)
        async for piece in stream:
            pieces.append(piece)
        beside = asyncio.create_task(model.agenerate(TEXT, **{**GREEDY, "max_tokens": 200}))
        ticks = 0
        while not beside.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return alone, "".join(pieces), stream.reply, ticks

    alone, text, reply, ticks = asyncio.run(talk())
    assert alone.tokens == model.chat("What is it?", **GREEDY).tokens
    assert text == reply.text == model.generate(TEXT, **GREEDY).text
    assert ticks > 1  # the loop goes on while the model computes


def test_rows_on_disk(path, tmp_path):
    given = {"n_ctx": 2000, "cache_dir": tmp_path / "rows", **FAST}
    text = "word " * 400
    with load(path, **given) as model:
        model._model.gguf.content.wait()  # which identifies the model
        first = model.generate(text, **GREEDY)
    with load(path, **given) as model:
        model._model.gguf.content.wait()
        again = model.generate(text, **GREEDY)
        others = model.generate([text, text + "more"], **GREEDY)
    assert first.usage["cached_tokens"] == 0 and again.usage["cached_tokens"] > 512
    assert again.tokens == first.tokens == others[0].tokens
    assert others[1].usage["cached_tokens"] > 512
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(SparseKVError, match="not the prefix cache's"):
        load(path, **{**given, "cache_dir": tmp_path / "mine"})


def test_passages_on_disk(path, tmp_path):
    """A text after another beginning, and twice in a conversation that goes on."""
    given = {"n_ctx": 2000, "cache_dir": tmp_path / "rows", "reuse": "passages", **FAST}
    text = "".join(f"{i} word " for i in range(100))
    with load(path, **given, reuse_repair=0.5) as model:
        model._model.gguf.content.wait()
        first = model.generate(text, **GREEDY)
        other = model.generate("Another beginning. " + text, **GREEDY)
        twice = model.generate(text + "and again " + text, **GREEDY)
    assert "reused_tokens" not in first.usage
    for usage in (other.usage, twice.usage):
        assert usage["reused_tokens"] > 400
        assert usage["repaired_tokens"] == -(-usage["reused_tokens"] // 2)
    assert twice.usage["cached_tokens"] > 400
    for wrong, words in (
        ({"reuse": "some"}, "must be exact or passages"),
        ({"reuse_repair": 2.0}, "from 0 to 1"),
        ({"reuse": "exact", "reuse_repair": 0.1}, "no effect"),
        ({"cache_dir": None}, "give cache_dir"),
    ):
        with pytest.raises(SparseKVError, match=words):
            load(path, **{**given, **wrong})


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("fasa", "sals", "faedkv")])
def test_the_same_call_has_the_same_answer(name, model):
    """Whatever was asked before, and with whatever method."""
    method = {"method": name} if name == "full" else {"method": name, "budget": 16}
    first = "a b c d e f g " * 12
    expected = {}
    for more in ("h i", "h i j k " * 20):
        model._sequence.reset()
        expected[more] = model.generate(first + more, **method, **GREEDY).tokens
    for more, tokens in expected.items():
        for before in (method, {"method": "topk", "budget": 16}):
            said = model.generate(first, **before, **GREEDY).text
            model.generate(first + said + "z", **before, **GREEDY)
            assert model.generate(first + more, **method, **GREEDY).tokens == tokens
