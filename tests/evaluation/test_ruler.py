"""RULER's tasks: what samples hold, how long they are, what methods answer, and the records."""

import json
import re

import pytest
from opened import open_sequence
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.compare import parse_methods
from sparsekv_cli.evaluation.ruler.answers import answer_all
from sparsekv_cli.evaluation.ruler.functions import functions
from sparsekv_cli.evaluation.ruler.records import RulerRecords, key_of, mean_score
from sparsekv_cli.evaluation.ruler.samples import RulerPlan, make_prompt
from sparsekv_cli.evaluation.ruler.tasks import DOTS, TASKS, score
from sparsekv_cli.methods import build_method
from sparsekv_cli.settings.config import SessionConfig

LENGTH = 4000  # bytes, which are tokens here
CONFIGURATION = {"model": "m", "seed": 42}


def as_bytes(text, answer):
    return list(f"<user>{text}<assistant>{answer}".encode())


def prompt_of(task, number=0, seed=42, length=LENGTH):
    return make_prompt(task, length, number, seed, 100, as_bytes)


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_as_long_as_fits(task):
    prompt = prompt_of(task)
    assert LENGTH - 300 < len(prompt.ids) <= LENGTH - 100
    text = bytes(prompt.ids).decode()
    sample = prompt.sample
    assert text == f"<user>{sample.context}\n\n{sample.question}<assistant>{sample.answer}"
    assert bytes(prompt.ids[prompt.n_context :]).startswith(sample.question.encode())
    assert all(reference in sample.context for reference in sample.references)
    assert score(sample.answer, sample.references) == 0
    assert all(0 <= depth <= 1 for depth in sample.depths)
    assert prompt_of(task) == prompt
    assert prompt_of(task, number=1).sample.references != sample.references
    assert prompt_of(task, seed=1).sample.references != sample.references


@pytest.mark.parametrize(
    ("task", "n_keys", "n_values", "n_references"),
    [
        ("niah_single_1", 1, 1, 1), ("niah_single_2", 1, 1, 1), ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1), ("niah_multivalue", 1, 4, 4), ("niah_multiquery", 4, 1, 4),
    ],
)  # fmt: skip
def test_needles(task, n_keys, n_values, n_references):
    sample = prompt_of(task).sample
    facts = [line for line in sample.context.split(". ") if "One of the special magic" in line]
    keys = {fact.split(" for ")[1].split(" is: ")[0] for fact in facts}
    assert (len(facts), len(keys)) == (n_keys * n_values, n_keys)
    assert len(sample.references) == n_references == len(sample.depths)
    asked = [key for key in keys if key in sample.question]
    assert len(asked) == n_references // n_values and all(key in sample.answer for key in asked)
    told = {fact.split(" is: ")[1].rstrip(".") for fact in facts if any(k in fact for k in asked)}
    assert told == set(sample.references)
    kind = "uuids" if task.endswith("_3") else "numbers"
    assert all(f"magic {kind}" in fact for fact in facts)
    assert all(len(each) == (36 if kind == "uuids" else 7) for each in sample.references)


def test_haystacks_of_needles():
    for task, length in (("niah_multikey_2", 7), ("niah_multikey_3", 36)):
        sample = prompt_of(task).sample
        text = sample.context.partition("\n\n")[2]
        facts = text.split(". ")
        assert len(facts) > 20 and all("One of the special magic" in fact for fact in facts)
        assert len({fact.split(" for ")[1].split(" is: ")[0] for fact in facts}) == len(facts)
        (reference,) = sample.references
        place = next(i for i, fact in enumerate(facts) if reference in fact)
        assert sample.depths == [place / (len(facts) - 1)] and len(reference) == length


def test_variables():
    sample = prompt_of("vt").sample
    text = sample.context.rpartition("\n\n")[2]
    value = sample.question.split("value ")[1].split(",")[0]
    chain = [line.split("VAR ", 1)[1] for line in text.split(". ") if "VAR" in line]
    names = sample.references
    assert [line.rstrip(".") for line in chain] == [
        f"{name} = {what}"
        for name, what in zip(names, [value, *(f"VAR {n}" for n in names[:-1])], strict=True)
    ]
    assert len(names) == 5 and sample.depths == sorted(sample.depths)


def test_common_words():
    for length, often, seldom in ((LENGTH, 6, 1), (9000, 30, 3)):
        sample = prompt_of("cwe", length=length).sample
        words = sample.context.rpartition("\n\n")[2].split()
        assert words[::2] == [f"{i}." for i in range(1, len(words) // 2 + 1)]
        counts = {word: words.count(word) for word in words[1::2]}
        common = {word for word, n in counts.items() if n == often}
        assert common == set(sample.references) and len(common) == 10
        assert all(n == seldom for word, n in counts.items() if word not in common)


@pytest.mark.parametrize("length", [700, LENGTH])
def test_frequent_words(length):
    sample = prompt_of("fwe", length=length).sample
    words = sample.context.rpartition("\n\n")[2].split()
    counts = sorted({word: words.count(word) for word in words}.items(), key=lambda each: -each[1])
    assert [word for word, _ in counts[:4]] == [DOTS, *sample.references]
    n = [count for _, count in counts]
    assert n[0] > n[1] > n[2] > n[3] > n[4]
    if length == LENGTH:
        assert n[0] / n[1] == pytest.approx(4, rel=0.1) and n[1] / n[3] == pytest.approx(4, rel=0.2)


def test_code():
    """The file names each function once; the body that is asked for follows the wanted name."""
    sample = prompt_of("code", length=9000).sample
    file = sample.context.partition("```python\n")[2].removesuffix("\n```")
    names = re.findall(r"^def (\w+)", file, flags=re.MULTILINE)
    assert len(names) == len(set(names)) > 5
    (name,), body = sample.references, sample.question.removesuffix("\n```").split("```python\n")[1]
    assert all(each.head.lstrip().startswith("(") for each in functions())
    whole = next(part for part in file.split("\n\ndef ") if body in part)
    assert whole.removeprefix("def ").startswith(f"{name}(") and file.count(body) == 1
    assert name not in sample.question
    assert sample.depths == pytest.approx([file.index(body) / len(file)], abs=0.25)


def test_a_length_that_is_too_short():
    with pytest.raises(SparseKVError, match=r"niah_multivalue takes at least .* --lengths has 300"):
        prompt_of("niah_multivalue", length=300)


# --- scores ---------------------------------------------------------------------------------------


def test_scores():
    assert score("It is ABC, and def.", ["abc", "DEF", "ghi", "jkl"]) == 0.5
    for scores, expected in (
        ([1, 1, 1], (100, 43.85, 100)),  # Wilson's intervals, from tables
        ([0] * 10, (0, 0, 27.75)),
        ([0, 1] * 5, (50, 23.66, 76.34)),
    ):
        found = mean_score(scores)
        assert found[:3] == pytest.approx(expected, abs=0.01) and found.n == len(scores)


# --- records --------------------------------------------------------------------------------------


def record(sample=0, **changes):
    row = {"task": "vt", "length": 9, "sample": sample, "name": "full", "options": {}, "score": 0.5}
    return {**row, **changes}


def test_records_are_found_again(tmp_path):
    named = {**CONFIGURATION, "model": "\udcff"}  # a file's name may be no UTF-8
    path = tmp_path / "r.jsonl"
    with RulerRecords(path, named) as first:
        for number in range(2):
            first.add(record(number, options={"layers": (0, 1)}))
        with pytest.raises(SparseKVError, match="another process writes to it"):
            RulerRecords(path, named)
    with path.open("a") as file:
        file.write('{"task": "vt", "len')
    again = RulerRecords(path, named)
    assert list(again.by_key) == list(first.by_key)
    again.add(record(2))
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[3])["sample"] == 2
    assert RulerRecords(None, named).by_key == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "sparsekv-cli eval ruler", "model": "m", "seed": 7}\n', "of seed 7, not 42"),
        ('{"format": "sparsekv-cli eval ruler", "model": "m"}\n', "of seed None, not 42"),
        ('{"format": "sparsekv-cli eval ruler", "model": "m", "seed": 42, "x": 1}\n', "of x 1"),
        ("a letter\nto you\n", "is no file of eval ruler"),
        ("a letter", "is no file of eval ruler"),
        ("[" * 100_000 + "\n", "is no file of eval ruler"),
    ],
)
def test_a_file_of_something_else(tmp_path, text, said):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(SparseKVError, match=said):
        RulerRecords(path, CONFIGURATION)
    assert path.read_text() == text


def test_a_line_that_is_no_record(tmp_path):
    path = tmp_path / "r.jsonl"
    RulerRecords(path, CONFIGURATION).add(record(score="good"))
    with pytest.raises(SparseKVError, match="line 2 is no record"):
        RulerRecords(path, CONFIGURATION)


# --- answers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequence(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("tiny") / "m.gguf", n_embd=128, n_ff=128)
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=64, ctx_size=500)
    return open_sequence(path, build_method("full", {}), config)


def test_answers(sequence, monkeypatch):
    """Those of a sequence of its own; one prefill a sample; what is done is not done again."""

    def encode(text, answer):
        return sequence.model.tokenizer.encode(f"{text}\n{answer}", parse_special=False)

    forwards, real = [], sequence.model.decoder.forward
    monkeypatch.setattr(
        sequence.model.decoder,
        "forward",
        lambda ids, *a, **k: forwards.append(len(ids)) or real(ids, *a, **k),
    )
    settings = parse_methods("full,streaming:budget=8;dense_layers=none")
    plan = RulerPlan(["niah_single_1"], [500], 2, seed=42, n_answer=12)
    by_prefill = list(answer_all(sequence.model, settings, plan, encode, ()))
    prompts = [make_prompt("niah_single_1", 500, i, 42, 12, encode) for i in range(2)]
    assert forwards == [len(prompt.ids) for prompt in prompts]
    keys = {key_of(by_prefill[0][0]), *map(key_of, by_prefill[1])}
    again = list(answer_all(sequence.model, settings, plan, encode, keys))
    assert [len(new) for new in again] == [1, 0] and again[0] == by_prefill[0][1:]
    decoding = RulerPlan(["niah_single_1"], [500], 2, 42, question_by_decode=True, n_answer=12)
    by_decode = list(answer_all(sequence.model, settings, decoding, encode, ()))
    assert forwards[-2:] == [prompt.n_context for prompt in prompts]
    for number, prompt in enumerate(prompts):
        for i, (name, method) in enumerate(settings.items()):
            for told, n_read in ((by_prefill, len(prompt.ids)), (by_decode, prompt.n_context)):
                sequence.attention = sequence.model.attention_of(method, 0)
                sequence.reset()
                logits = sequence.prefill(prompt.ids[:n_read])
                for token in prompt.ids[n_read:]:
                    logits = sequence.decode(token)
                tokens = []
                while (
                    len(tokens) < 12
                    and int(logits.argmax()) not in sequence.model.tokenizer.eog_ids
                ):
                    tokens.append(int(logits.argmax()))
                    logits = sequence.decode(tokens[-1])
                assert told[number][i]["answer"] == sequence.model.tokenizer.decode(tokens), name
    attended = [new[1]["rows_attended_mean"] for new in by_prefill]
    assert max(attended) < 20 and min(new[0]["rows_attended_mean"] for new in by_prefill) > 400


def test_an_answer_ends_when_it_holds_everything(sequence, monkeypatch):
    def encode(text, answer):
        return sequence.model.tokenizer.encode(f"{text}\n{answer}", parse_special=False)

    settings, plan = parse_methods("full"), RulerPlan(["niah_single_1"], [500], 1, 42, n_answer=12)
    ((whole,),) = answer_all(sequence.model, settings, plan, encode, ())
    prompt = make_prompt("niah_single_1", 500, 0, 42, 12, encode)
    start = whole["answer"][: len(whole["answer"]) // 2]
    easy = prompt._replace(sample=prompt.sample._replace(references=[start]))
    monkeypatch.setattr(
        "sparsekv_cli.evaluation.ruler.answers.make_prompt", lambda *arguments: easy
    )
    ((told,),) = answer_all(sequence.model, settings, plan, encode, ())
    assert told["score"] == 1 > whole["score"] and start in told["answer"]
    assert len(told["answer"]) < len(whole["answer"])
