"""The tokenizer of the tiny models: byte-level BPE with a few merges."""

from __future__ import annotations

from gguf import GGUFWriter, TokenType

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID, BOS_ID = 0, 1


def byte_characters() -> list[str]:
    """GPT-2's 256 printable stand-ins for the bytes, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable}
    shown |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]


def tiny_vocabulary(n_vocab: int) -> tuple[list[str], list[int], list[str]]:
    """(tokens, types, merges): specials, 256 bytes, common merges, then unused padding."""
    words = ("t h", "i n", "a n", "th e", "in g", "an d", "Ġ the", "Ġ and", "Ġ th", "Ġ a")
    letters = "Ġetaoinshrdlucm"
    pairs = [f"{left} {right}" for left in letters for right in letters if right != "Ġ"]
    merges = list(dict.fromkeys([*words, *pairs]))
    tokens = [*SPECIAL_TOKENS, *byte_characters()]
    if n_vocab < len(tokens):
        raise ValueError(f"n_vocab = {n_vocab}: must be {len(tokens)} or more")
    merges = merges[: n_vocab - len(tokens)]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [int(TokenType.NORMAL)] * len(tokens)
    types[: len(SPECIAL_TOKENS)] = [int(TokenType.CONTROL)] * len(SPECIAL_TOKENS)
    n_unused = n_vocab - len(tokens)
    tokens += [f"[PAD{i}]" for i in range(n_unused)]
    types += [int(TokenType.UNUSED)] * n_unused
    return tokens, types, merges


def add_tokenizer(writer: GGUFWriter, n_vocab: int, chat_template: str | None) -> None:
    """A byte-level BPE tokenizer; BOS is added, EOS is 0, and <|im_end|> ends a turn."""
    tokens, types, merges = tiny_vocabulary(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(SPECIAL_TOKENS.index("<|im_end|>"))
    writer.add_add_bos_token(True)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
