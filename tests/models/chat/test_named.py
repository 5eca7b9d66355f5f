"""Chat templates that the user names: the forms of the known ones, files, and faults."""

import pytest

from sparsekv_cli import load
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import chat_template
from sparsekv_cli.models.chat.fitting.fitted import fitted
from sparsekv_cli.models.chat.named import NAMED, named_template
from sparsekv_cli.models.chat.template import render
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.settings.option import options_of

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
GRANITE = "<|start_of_role|>{}<|end_of_role|>"
FORMS = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "granite": f"{GRANITE.format('system')}S<|end_of_text|>\n{GRANITE.format('user')}"
    f"U<|end_of_text|>\n{GRANITE.format('assistant')}A<|end_of_text|>\n"
    f"{GRANITE.format('user')}V<|end_of_text|>\n{GRANITE.format('assistant')}",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
    "llama3": f"<s>{LLAMA3.format('system')}S<|eot_id|>{LLAMA3.format('user')}U<|eot_id|>"
    f"{LLAMA3.format('assistant')}A<|eot_id|>{LLAMA3.format('user')}V<|eot_id|>"
    f"{LLAMA3.format('assistant')}",
    "mistral-v1": "<s> [INST] S\n\nU [/INST] A</s> [INST] V [/INST]",
    "mistral-v3": "<s>[INST] S\n\nU[/INST] A</s>[INST] V[/INST]",
    "mistral-v7": "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST] A</s>[INST] V[/INST]",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n"
    "<|user|>\nV<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U<|im_end|>"
    "<|im_start|>assistant<|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>V<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "vicuna": "<s>S\n\nUSER: U\nASSISTANT: A</s>\nUSER: V\nASSISTANT:",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n"
    "<|assistant|>\n",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_the_form(name):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    assert render(named_template(name), MESSAGES, **special) == FORMS[name]
    without = render(NAMED[name], MESSAGES[1:], **special)
    assert "S\n" not in without and without.endswith(FORMS[name][-8:])
    grown = render(NAMED[name], MESSAGES, add_generation_prompt=False, **special)
    assert FORMS[name].startswith(grown)
    assert list(fitted(NAMED[name], MESSAGES).messages) == MESSAGES
    assert name in options_of(SessionConfig)["chat_template"].metadata["help"]


def test_a_file_and_a_text(tmp_path):
    path = tmp_path / "a.jinja"
    path.write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    assert named_template(str(path)) == "{{ messages[0].content }}"
    assert named_template("{{ messages[0].content }}") == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{% for", "syntax error at line 1: "),
        (b"a\n{{ b c }}", "syntax error at line 2: "),
        (b"{% nothing %}", "syntax error at line 1: "),
        (b"\xff{{ a }}", "is not UTF-8"),
        (b"  ", "is empty"),
        (b"{{ a }}" * 100_000, "700000 characters, at most"),
        (None, "no such file, nor one of chatml, gemma"),
    ],
)
def test_a_fault_is_one_line(content, words, tmp_path):
    path = tmp_path / "a.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SparseKVError) as caught:
        named_template(str(path))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_that_is_like_another():
    with pytest.raises(SparseKVError, match=r"did you mean llama3\?"):
        named_template("lama3")


def test_the_library_and_the_model_have_it(tiny_model):
    with load(tiny_model(), chat_template="zephyr", speculate="off") as model:
        assert chat_template(model._model.gguf) == NAMED["zephyr"]
        assert model._model.config.chat_template == NAMED["zephyr"]  # what other nodes get
    with pytest.raises(SparseKVError, match="no such file, nor one of"):
        load(tiny_model(), chat_template="no such")
