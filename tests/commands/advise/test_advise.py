"""``advise`` on tiny models: what it reports, what it reads, and what it refuses."""

import json
import shlex
from typing import Any

import pytest
from tiny_models import make_model

from sparsekv_cli.commands.advise import measure
from sparsekv_cli.commands.advise.reader import Reader
from sparsekv_cli.commands.shared import progress
from sparsekv_cli.models.decoder import Decoder

DOCUMENT = "The fox number {} jumps over {} lazy dogs.\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    long = make_model(folder / "long.gguf", n_ctx=32768, n_layer=1, wtype="Q8_0")
    return {"long": str(long)} | {
        arch: str(make_model(folder / f"{arch}.gguf", arch=arch, wtype="Q8_0", n_layer=n_layer))
        for arch, n_layer in (("llama", 2), ("lfm2", 4), ("gemma3", 6), ("gemma2", 1))
    }


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document of foxes.txt"
    path.write_text("".join(DOCUMENT.format(i, i * 7919 % 1000) for i in range(36)))
    return path


@pytest.fixture
def few(monkeypatch):
    """Only some methods are tried, and one of them needs all queries."""
    monkeypatch.setattr(measure, "ORDER", ("fasa", "topk", "snapkv", "h2o"))


def advise(invoke, *arguments, code=0):
    result = invoke("advise", *map(str, arguments))
    assert result.code == code, result.err
    return result


def test_sparse_reading_is_read_so_and_named(models, document, few, invoke, monkeypatch):
    read = []
    attention_of = Decoder.attention_of

    def counted(decoder: Decoder, n: int) -> Any:
        read.append(decoder.prefill_budget)
        return attention_of(decoder, n)

    monkeypatch.setattr(Decoder, "attention_of", counted)
    given = ("-m", models["llama"], "-f", document, "-t", 1, "--prefill-attention", "sparse")
    result = advise(invoke, *given, "--prefill-budget", 2048)
    assert set(read) == {2048}
    assert "--prefill-attention sparse --prefill-budget 2048" in result.out.splitlines()[-1]


@pytest.mark.parametrize("arch", ["llama", "lfm2", "gemma3"])  # recurrent layers, windows
def test_a_report_as_json(models, document, few, tmp_path, invoke, monkeypatch, arch):
    monkeypatch.delenv("SPARSEKV_NO_CACHE")
    given = ("-m", models[arch], "-f", document, "-p", "How many?", "--json", "-t", 1)
    given += ("--cache-dir", tmp_path / "kept", "--budget", "20%")
    result = advise(invoke, *given)
    assert "again with 8 facts planted" in result.err
    found = json.loads(result.out)
    read = found["document"]
    assert read["share_read"] == 1 and read["tokens"] > 1024 and read["is_kept"]
    full, *others = found["methods"]
    assert (full["name"], full["words"], full["same_words"], full["facts"]) == ("full", 96, 96, 8)
    assert full["kld_mean"] == pytest.approx(0, abs=1e-9) and full["bytes"] > 0
    told = {each["name"] for each in others}
    assert told <= {"topk", "snapkv"}
    assert found["left_out"].keys() | told == {"fasa", "topk", "snapkv", "h2o"}
    assert "calibrate" in found["left_out"]["fasa"] and "anew" in found["left_out"]["h2o"]
    assert "full" in found["answers"]
    again = advise(invoke, *given)
    assert "are on disk" in again.err
    answers = json.loads(again.out)["answers"]
    assert answers["full"] == found["answers"]["full"]


def test_the_last_line_is_a_command_that_works(models, document, few, tmp_path, invoke):
    given = ("-c", 1800, "-t", 1, "--prefill-dtype", "f32", "--activations", 16)
    result = advise(invoke, "-m", models["llama"], "-f", document, *given)
    line = result.out.splitlines()[-1]
    program, command, *options = shlex.split(line)
    assert (program, command) == ("sparsekv-cli", "run")
    assert "--prefill-dtype f32 --activations 16" in line  # the rows on disk depend on them
    assert options[options.index("-f") + 1] == str(document)
    assert invoke(command, *options, "-n", "4").code == 0
    assert "temporary folder" in result.err and not list(tmp_path.glob("kept*"))


def test_a_busy_machine_is_not_ranked(models, document, few, invoke, monkeypatch):
    monkeypatch.setattr(progress, "load_beyond_cores", lambda: (9.0, 2))
    result = advise(invoke, "-m", models["llama"], "-f", document, "-t", 1)
    assert "no method is ranked" in result.err and "measured t/s: full " in result.err
    assert "t/s" not in result.out and "same word" in result.out and "in speed" not in result.out
    assert "--method full" in result.out.splitlines()[-1]


def test_a_document_beyond_the_context_is_cut(models, document, few, tmp_path, invoke):
    result = advise(invoke, "-m", models["llama"], "-f", document, "-c", 1000, "-t", 1)
    assert "does not fit the context of 1000 tokens: only the first 6" in result.err
    pipe, _, command = result.out.splitlines()[-1].partition(" | ")
    head, c, n, name = shlex.split(pipe)
    assert (head, c, name) == ("head", "-c", str(document))
    part = document.read_bytes()[: int(n)].decode()
    assert 500 < len(part) < len(document.read_bytes()) and "-f" not in shlex.split(command)


def test_a_long_document_is_read_for_some_time(models, few, tmp_path, invoke, monkeypatch):
    monkeypatch.delenv("SPARSEKV_NO_CACHE")
    monkeypatch.setattr(Reader, "expected", lambda self, n, n_known=0: (n - n_known) / 1000)
    path = tmp_path / "long.txt"
    path.write_text("".join(DOCUMENT.format(i, i * 7919 % 1000) for i in range(600)))
    given = ("-m", models["long"], "-f", path, "--max-read", 9, "--cache-dir", tmp_path / "kept")
    first = advise(invoke, *given, "--json")
    assert "reading 8" in first.err and "--max-read SECONDS allows more" in first.err
    read = json.loads(first.out)["document"]
    assert 8600 < read["tokens"] <= 9000 and 0.3 < read["share_read"] < 0.9
    monkeypatch.setattr(Reader, "expected", lambda self, n, n_known=0: (n - n_known) / 1400)
    again = advise(invoke, *given)
    assert "tokens are on disk" in again.err and "reading 8" not in again.err


def test_a_short_document_gains_nothing(models, tmp_path, invoke):
    path = tmp_path / "short.txt"
    path.write_text("Hi")
    result = advise(invoke, "-m", models["llama"], "-f", path, "-p", "Who?", "-t", 1)
    assert "the document is short, so no method gains anything" in result.out
    assert "--method full" in result.out.splitlines()[-1]
    assert "answers:" in result.out


def test_without_a_document_a_built_in_text_is_measured(models, few, invoke):
    result = advise(invoke, "-m", models["llama"], "-c", 800, "-t", 1)
    assert "a built-in text is measured" in result.err
    assert result.out.splitlines()[-1].startswith("sparsekv-cli chat -m ")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the document is empty"),
        (b" \n\n", "the document is empty"),
        (b"a\0b", "not a text: zero byte at character 1"),
        (b"a\xff", "not UTF-8: byte 0xff at offset 1"),
        (b"\xef\xbb\xbf", "the document is empty"),
        ("\ufeffa\0".encode("utf-16-le"), "not a text: zero byte at character 1"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path, invoke, data, said):
    path = tmp_path / "bad"
    path.write_bytes(data)
    result = advise(invoke, "-m", "no such model", "-f", path, code=1)
    assert said in result.err and result.err.count("\n") == 1


def test_a_context_without_room_is_refused(models, document, invoke):
    result = advise(invoke, "-m", models["llama"], "-f", document, "-c", 100, code=1)
    assert "the context of 100 tokens has no room for a document" in result.err


def test_methods_with_types_of_the_cache(models, document, few, invoke):
    given = ("-m", models["llama"], "-f", document, "-ctk", "q8_0", "--json", "-t", 1)
    found = json.loads(advise(invoke, *given).out)
    assert found["methods"][0]["spec"] == "full:cache_type_k=q8_0"
    assert "f16 only" in found["left_out"]["fasa"]
    assert "-o cache_type_k=q8_0" in found["advice"]["command"]


def test_a_model_without_a_full_layer(models, document, few, invoke):
    found = json.loads(advise(invoke, "-m", models["gemma2"], "-f", document, "--json").out)
    assert "no layer of this model attends to all rows" in found["left_out"]["topk"]
    assert found["advice"]["method"] == "full"


def test_a_method_without_room_is_left_out(models, document, few, invoke, monkeypatch):
    read = Reader.read

    def read_all_but_topk(self, ids, method):
        if method.name == "topk":
            raise MemoryError
        return read(self, ids, method)

    monkeypatch.setattr(Reader, "read", read_all_but_topk)
    found = json.loads(advise(invoke, "-m", models["llama"], "-f", document, "--json").out)
    assert found["left_out"]["topk"] == "out of memory"


def test_time_that_is_over(models, document, few, invoke, monkeypatch):
    monkeypatch.setattr(measure, "MOST_S", -60.0)
    found = json.loads(advise(invoke, "-m", models["llama"], "-f", document, "--json").out)
    assert "not measured" in found["left_out"]["topk"]
    assert found["advice"]["method"] == "full"
