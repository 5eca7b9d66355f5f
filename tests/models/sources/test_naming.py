"""What names of GGUF files say."""

import pytest

from sparsekv_cli.models.sources.naming import choose, is_model, quant_of, split_name, whole_models

FILES = [
    "README.md", "imatrix.gguf", "mmproj-F16.gguf", "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf", "m-IQ4_XS.gguf", "m-Q2_K.gguf", "m-Q4_K_S.gguf",
    "m-UD-Q4_K_XL.gguf", "m.F16.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b-Q8_0-00002-of-00011.gguf", ("a/b-Q8_0", 2, 11)),
        ("b-00002-of-00011.GGUF", ("b", 2, 11)),
        ("b-2-of-3.gguf", ("b-2-of-3", 1, 1)),
        ("b", ("b", 1, 1)),
    ],
)
def test_split_name(name, expected):
    assert split_name(name) == expected


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4-00001-of-00002.gguf", "MXFP4"),
        ("BF16/m.BF16.gguf", "BF16"),
        ("m-iq4_xs.gguf", "IQ4_XS"),
        ("gemma-3-4b-it.gguf", ""),
        ("Qwen3-4B.gguf", ""),
    ],
)
def test_quant_of(name, quant):
    assert quant_of(name) == quant


def test_whole_models():
    assert not any(map(is_model, FILES[:3]))
    assert list(whole_models(FILES)) == [FILES[3], *FILES[5:]]
    assert list(whole_models(FILES[4:])) == FILES[5:], "a part is missing"


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        ("Q4_K_S", ["m-Q4_K_S.gguf"]), ("q4_k_xl", ["m-UD-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]), ("F16", ["m.F16.gguf"]), ("BF16", FILES[3:5]),
        ("Q4_K", []), ("Q4_K_M", []), (".*", []), (None, FILES[3:5]),
    ],
)  # fmt: skip
def test_choose(quant, chosen):
    assert choose(FILES, quant) == chosen


def test_choose_without_a_quant():
    assert choose([*FILES, "m-Q8_0.gguf"], None) == ["m-Q8_0.gguf"]
    assert choose([*FILES, "m-Q8_0.gguf", "m-Q4_K_M.gguf"], None) == ["m-Q4_K_M.gguf"]
    assert choose(FILES[:3], None) == []
