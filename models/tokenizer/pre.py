"""Pre-tokenizers: regular expressions that split a text into words before byte-level BPE.

``tokenizer.ggml.pre`` names the pre-tokenizer. Expressions and settings are those of llama.cpp's
llama-vocab.cpp. Each expression splits the pieces that the expression before it made. Text between
two matches is a piece too. llama.cpp's own matcher reads some expressions in another way. These
expressions here follow that matcher and have a comment.
"""

import re
from dataclasses import dataclass

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.tokenizer.vocab import describe

CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = rf"(?:{CONTRACTION})|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
QWEN2 = rf"(?:{CONTRACTION})|{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}"

# A capitalised or lower-case word. In llama.cpp only ASCII letters have a case.
LOWER = r"(?:(?![A-Z])\p{L})"
UPPER = r"(?:(?![a-z])\p{L})"
CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*@"
SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
GPT4O = (
    CASED_WORD.replace("@", f"(?:{CONTRACTION})?") + rf"|\p{{N}}{{1,3}}|{SYMBOLS_SLASH}|{SPACES}"
)
# llama.cpp has one class for all letters, so \p{Lu} and \p{Ll} are both \p{L}
MARKED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{CONTRACTION})?"
# groups of three digits from the right; the text before a number belongs to its first group
DIGITS_FROM_RIGHT = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
MARKED_LETTERS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
DEEPSEEK3 = rf"{ASCII_SIGN}[A-Za-z]+|{MARKED_LETTERS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
DEEPSEEK3_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
# without \s: llama.cpp replaces wide spaces before it matches
DEEPSEEK_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}&&[^\s]]+"
DEEPSEEK_LETTERS = (  # hexadecimal code points and ranges
    "00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF 0370-0373 0376 0377 "
    "037B-037D 037F 0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481 048A-052F 0531-0556 "
    "10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC "
    "2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
    "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B "
    "A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A "
    "10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943 "
)
DEEPSEEK_SIGNS = r"!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}"
AFMOE_ASIAN = (  # CJK, kana, Thai, Lao, Khmer, Myanmar, Hangul
    "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF 0E40-0E7F 0E80-0EFF "
    "1780-17FF 1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"


def class_of(ranges: str) -> str:
    """Returns the inside of a character class for ranges such as ``0041-005A 00B5``."""
    return re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", ranges).replace(" ", "")


@dataclass(frozen=True)
class PreTokenizer:
    """The rules that split a text into words before the merges."""

    regexes: tuple[str, ...]  # applied one after the other
    ignore_merges: bool = False  # True: a word that is a token is not split
    add_bos: bool = False  # whether BOS is added if the file does not say it

    def oniguruma(self) -> list[str]:
        """Returns the expressions for the tokenizers library, with llama.cpp's categories."""
        category = re.compile(r"\\p\{\w\}")
        return [category.sub(lambda m: f"[{m[0]}&&[^{LATER}]]", regex) for regex in self.regexes]


# Letters, marks, digits and signs of Unicode 16. The library's engine knows them. In llama.cpp's
# tables (Unicode 15.1) they have no category. Ends of a range may be unassigned.
LATER = class_of(
    "0897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D8F "
    "10EC2-10EFC 11380-113E2 116D0-116E3 11BC0-11BF9 11F5A 13460-143FA 16100-16139 16D40-16D79 "
    "18CFF 1CC00-1CEB3 1E5D0-1E5FF 1F8B2-1F8C1 1FA89-1FA8F 1FABE 1FAC6 1FADC-1FADF 1FAE9 "
    "1FBCB-1FBEF"
)

TABLE: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True
    ),
    "jais-2": PreTokenizer(
        (
            rf"(?:{CONTRACTION})|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|\s*[\r\n]+|"
            + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s",
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[A-Za-z{class_of(DEEPSEEK_LETTERS)}]+",
            rf"\s?[{DEEPSEEK_SIGNS}]+",
            r"\s+\z",
            DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}")),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            DEEPSEEK3_CJK,
            rf"{ASCII_SIGN}[A-Za-z]+|{MARKED_LETTERS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "youtu": PreTokenizer(
        (
            r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|"
            r"[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
            r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|"
            r"[\x{3105}-\x{312F}]+|" + DEEPSEEK3_CJK,
            rf"{MARKED_WORD}|\p{{N}}|{SYMBOLS_SLASH}|{SPACES}",
        ),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")),
    "qwen35": PreTokenizer(
        (
            rf"(?:{CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",
        )
    ),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
    "tekken": PreTokenizer(
        (CASED_WORD.replace("@", "") + rf"|\p{{N}}|{SYMBOLS_SLASH}|{SPACES}",),
        ignore_merges=True,
        add_bos=True,
    ),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        add_bos=True,
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))")),
    "seed-coder": PreTokenizer(
        (rf"(?:{CONTRACTION})|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",)
    ),
    "ufakzeka": PreTokenizer((rf"{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}",)),
    "afmoe": PreTokenizer((DIGITS_FROM_RIGHT, f"[{class_of(AFMOE_ASIAN)}]+", DEEPSEEK3)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            rf"(?:{CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|"
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "granite-embed-multi-97m": PreTokenizer(
        (GPT4O.replace(r")\p{L})", r")[\p{L}\p{M}])"),), ignore_merges=True
    ),
}


def same(pre: PreTokenizer, *names: str) -> None:
    """Adds ``pre`` to TABLE under several names."""
    for name in names:
        TABLE[name] = pre


same(PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True), "llama-bpe", "llama3", "llama-v3")
same(TABLE["llama-bpe"], "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
same(PreTokenizer((LLAMA3,)), "dbrx", "smaug-bpe", "chatglm-bpe")
same(PreTokenizer((LLAMA3,), ignore_merges=True), "glm4", "glm5")
same(PreTokenizer((QWEN2,)), "qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez")
same(TABLE["qwen2"], "kormo", "f2llmv2", "solar-open", "grok-2")
same(PreTokenizer((r"\p{N}", GPT2)), "smollm", "starcoder", "refact", "command-r", "codeshell")
same(TABLE["smollm"], "exaone", "minerva-7b", "mellum2")
same(PreTokenizer((GPT2,)), "gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2")
same(TABLE["gpt-2"], "exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe")
same(TABLE["gpt-2"], "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code", "jina-v1-en")
same(PreTokenizer((r"\p{N}{1,3}", DEEPSEEK3_CJK, DEEPSEEK3)), "deepseek-v3", "hunyuan-dense")
same(TABLE["deepseek-v3"], "joyai-llm", "hy_v4")
same(PreTokenizer((BLOOM,)), "poro-chat", "bloom", "gpt3-finnish")
same(PreTokenizer((GPT4O,)), "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")
same(
    PreTokenizer((DIGITS_FROM_RIGHT, rf"{MARKED_WORD}|\p{{N}}{{1,3}}|{SYMBOLS_SLASH}|{SPACES}")),
    "tiny_aya",
    "cohere2moe",
)
same(
    PreTokenizer(
        (
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{WORD}|\p{{N}}|{SYMBOLS}|\s*[\r\n]|"
            r"\s+(?!\S)|\s+",
        )
    ),
    "bailingmoe",
    "bailingmoe2",
    "llada-moe",
)


def find_pre_tokenizer(name: object) -> PreTokenizer:
    """Returns the pre-tokenizer ``name`` (None: ``default``). Raises SparseKVError if unknown."""
    if name is None or (isinstance(name, str) and not name):
        return TABLE["default"]
    if not isinstance(name, str) or name not in TABLE:
        raise SparseKVError(
            f"tokenizer.ggml.pre is {describe(name)}, which is not known: text would be cut "
            f"wrongly (known: {', '.join(sorted(TABLE))})"
        )
    return TABLE[name]
