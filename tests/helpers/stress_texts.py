"""Texts that pre-tokenizers cut in different ways, and a small BPE vocabulary that shows where."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from sparsekv_cli.models.tokenizer.bpe import byte_symbols
from sparsekv_cli.models.tokenizer.pre import TABLE
from sparsekv_cli.models.tokenizer.vocab import SPACE_MARK

WRITTEN = (
    "Hello, world! I'm sure they'll say: \"it's 5 o'clock\", won't they've?",
    "I'M SURE THEY'LL SAY IT'S THEY'VE WE'RE HE'D 'S 't 'Re ’s x'sy a'll",
    "CamelCaseWords HTTPServer iPhone McDonald fooBar2Baz ABCdef ÀÉÎ ßÀé ǅabc",
    "1 12 123 1234 12345 123456 1234567 12345678 3.14159 1,000,000 0x1F a1b22c333 ½ ² ٣٤٥ १२३४ Ⅷ",
    "  leading, trailing  ",
    "a  b   c    d     e\t\tf \tg\u00a0h\u2003\u2003i\u3000j",
    "line\nline\n\nline\n\n\n  indented\n\t\ttabbed \n \n  \r\nend\r\n\r\n",
    "\n",
    "\n\n\n\n\n\n\n\n",
    " ",
    "        ",
    "   \n   \n",
    "def f(x):\n    return x**2 + y_1 // 3  # comment\n\n\nclass A(B): pass\n",
    '#include <stdio.h>\nint main() { printf("%d\\n", a[i]->b); /* x */ return 0; }',
    "https://example.org/a/b?c=d&e=f#g user@mail.com /usr/local/bin ../x C:\\dir",
    "!!! ... ??? --- === *** ~~~ ``` ||| $$$ <<< >>> ^^^ +++ ((( ))) {{{ }}} [[ ]]",
    "//// \\\\ '' \"\"",
    "$5 €10 £3 ¥7 50% #1 @me & © ® ™ § ° ± × ÷ ← → ∑ ∞ ≠ ≤",
    "你好，世界！我是中文。數字123和English混在一起、没有空格",
    "日本語のテキスト、カタカナとひらがな。「引用」ー１２３",
    "한국어 문장입니다. 안녕하세요! ㄱㄴㄷ 123",
    "Здравствуй, мир! Ёлка ПРИВЕТ Привет",
    "Γειά σου Κόσμε ΑΒΓ αβγ",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    "नमस्ते दुनिया।  বাংলা ভাষা  தமிழ் ภาษาไทย ລາວ ភាសាខ្មែរ မြန်မာ",
    "é e\u0301 n\u0303 a\u0308\u0323 \u0301x cafe\u0301s Å\u030a",
    "😀 😃😄 👨‍👩‍👧 🇩🇪 ❤️ 👍🏽a🚀b1",
    "\x00\x01\x1f\x7f\x85\u200b\u200d\u2028x\u2029y\ufeffz\ufffd",
    "\U0001d400\U0001d7d8 \U00020000 \U000e0001 \U0010ffff \ue000",
    "<|im_start|>user\nHi<|im_end|> <s> </s> [INST] <think> <sentinel:12> IMGIMGAZ",
    "a" * 40 + " " + "1" * 40 + " " + "!" * 40,
    "…“quoted” ‘single’ — dash – en • bullet «guillemets» ¿qué? ¡sí!",
    "word\u0964word।word٫word؟word。word、word，word",
    "x\u1e9ey ſ K ℃ ª º ʰ ʼ ˈ",
)
UNKNOWN = "[\x00\n\u0900-\u0fff\u4e00-\U0010ffff]"
ALPHABETS = (
    "abcXYZ 019'.\n",
    " \t\n\r\u00a0\u3000ab",
    "aA1é中あ한😀! '\n",
    "sStTrReEvVmMlLdD' ",
    "0123456789 ,.a",
    "!?.,;:-_/\\'\"()[]{}<> a1\n",
    "".join(map(chr, range(0x20, 0x250))),
    "".join(map(chr, range(0x300, 0x370))) + "aA1 中",
    "".join(map(chr, range(0x900, 0x980))) + "\u0e01\u0e31\u0e40 1",
    "".join(map(chr, range(0x2000, 0x2100))) + "a1 ",
    "".join(map(chr, range(0x3000, 0x3100))) + "中a1 \n",
    "".join(map(chr, range(0x1F300, 0x1F400))) + "a \u200d\ufe0f",
)


def stress_texts(n_random: int = 60, seed: int = 7) -> list[str]:
    """The written texts, and random ones; the same for the same seed."""
    rng = random.Random(seed)
    made = ["".join(rng.choices(ALPHABETS[i % len(ALPHABETS)], k=40)) for i in range(n_random)]
    return [*WRITTEN, *made]


def merges_of(texts: list[str], symbols_of: Callable[[str], list[str]]) -> list[str]:
    """Merges that join the symbols of the texts to ever longer tokens, with no heed to words.

    So a cut between two words that would be joined without it shows in the ids.
    symbols_of: a character's, which are joined first.
    """
    merges: dict[str, None] = {}
    for char in sorted(set("".join(texts))):
        for left, right in pairwise(accumulate(symbols_of(char))):
            merges[f"{left} {right.removeprefix(left)}"] = None
    rows = [["".join(symbols_of(char)) for char in text] for text in texts]
    while any(len(row) > 1 for row in rows):
        for row in rows:
            merges.update(dict.fromkeys(map(" ".join, zip(row[::2], row[1::2], strict=False))))
        rows = [["".join(row[i : i + 2]) for i in range(0, len(row), 2)] for row in rows]
    return list(merges)


@cache
def joined_bytes() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary in which the stress texts are long tokens."""
    symbols = byte_symbols()
    merges = merges_of(stress_texts(), lambda char: [symbols[byte] for byte in char.encode()])
    made = dict.fromkeys([*symbols, *(merge.replace(" ", "") for merge in merges)])
    return list(made), merges


def byte_level(pre: str | None, **changes: Any) -> dict[str, Any]:
    """The metadata of a byte-level BPE tokenizer with the pre-tokenizer ``pre``."""
    tokens, merges = joined_bytes()
    n = len(tokens)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<|im_start|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": np.array([1] * n + [3, 3], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": n,
        "tokenizer.ggml.eos_token_id": n + 1,
        **changes,
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


@cache
def joined_characters() -> tuple[list[str], list[str]]:
    """Tokens and merges of characters, with U+2581 for spaces; letters of India and Asia have none.

    Single newlines are no part of other tokens, as in Gemma's vocabularies.
    """
    texts = [text.replace(" ", SPACE_MARK) for text in stress_texts()]
    parts = [part for text in texts for part in re.split(UNKNOWN, text)]
    merges = merges_of(parts, lambda char: [char])
    tokens = sorted(set("".join(parts)) | {"\n", "\n\n", "\n\n\n"})
    return [*tokens, *dict.fromkeys(merge.replace(" ", "") for merge in merges)], merges


def of_characters(model: str, **changes: Any) -> dict[str, Any]:
    """The metadata of a tokenizer of characters: ``llama`` or ``gemma4``."""
    tokens, merges = joined_characters()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    first = ["<unk>", "<s>", "</s>", *byte_tokens]
    own = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>"]
    n = len(first) + len(tokens)
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [*first, *tokens, *own],
        "tokenizer.ggml.token_type": np.array(
            [2, 3, 3, *[6] * 256, *[1] * len(tokens), 3, 3, 3, 4], np.int32
        ),
        "tokenizer.ggml.scores": np.arange(len(first) + len(tokens) + len(own)) * -1.0,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": n + 1,
        **changes,
    }


def digest(ids: Sequence[int]) -> str:
    """Eight hex digits that tell ids from other ids."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:8]


# By name, what makes the metadata of a tokenizer.
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "no pre": partial(byte_level, None),
    **{name: partial(byte_level, name) for name in sorted(TABLE)},
    "gemma4": partial(of_characters, "gemma4"),
    "gemma4, without BOS": partial(
        of_characters, "gemma4", **{"tokenizer.ggml.add_bos_token": False}
    ),
    "spm": partial(of_characters, "llama"),
    "spm, without a space in front": partial(
        of_characters, "llama", **{"tokenizer.ggml.add_space_prefix": False}
    ),
    "spm, Phi-3": partial(of_characters, "llama", **{"general.name": "Phi-3 mini"}),
}
