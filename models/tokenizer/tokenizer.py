"""Converts text to token ids and back as llama.cpp does, by the metadata of a GGUF file.

``load_tokenizer`` chooses BPE or SentencePiece. Before these get a text, this module splits off its
special tokens (llama.cpp: ``tokenizer_st_partition``).
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.tokenizer.pre import find_pre_tokenizer
from sparsekv_cli.models.tokenizer.vocab import (
    BYTE,
    BYTE_TOKEN,
    CONTROL,
    NORMAL,
    PREFIX,
    SPACE_MARK,
    SPECIAL,
    USER_DEFINED,
    Vocabulary,
    describe,
    flag,
    read_vocabulary,
)

ASCII_SPACES = " \t\n\v\f\r"


class SpecialToken(NamedTuple):
    """A token that is split off from the text before the rest is tokenized."""

    text: str
    id: int
    parsed_only: bool  # split off only if special tokens are parsed
    eats_spaces: bool  # white space after it is dropped


class Tokenizer:
    """The tokenizer of one model, made by ``load_tokenizer``.

    add_bos, add_eos: whether the model needs BOS before and EOS after a text. eog_ids: tokens that
    end an answer. infill: name -> control token of a text with a gap. control_texts: the spellings
    of tokens that are parsed only with ``parse_special``.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode_plain: Callable[[str], list[int]],
        specials: list[SpecialToken],
        *,
        add_bos: bool,
        add_eos: bool,
        space_prefix: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._encode_plain = encode_plain
        self._specials = specials
        self._is_spm = vocabulary.model == "llama"
        self._bytes_of_symbol = symbol_bytes() if vocabulary.model == "gpt2" else {}
        self._pieces: dict[int, bytes] = {}
        self.space_prefix = space_prefix
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.n_vocab = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eot_id = vocabulary.eot_id
        self.eom_id = vocabulary.eom_id
        self.unk_id = vocabulary.unk_id
        self.pad_id = vocabulary.pad_id
        self.eog_ids = vocabulary.eog_ids
        self.infill = vocabulary.infill
        self.control_texts = [special.text for special in specials if special.parsed_only]

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        add_eos: bool = True,
        parse_special: bool = True,
        plain: Callable[[str], str] | None = None,
    ) -> list[int]:
        """Returns the token ids of ``text``.

        add_bos: None adds BOS and EOS if the model needs them. False adds neither. True adds BOS,
        and EOS if the model needs it. add_eos: False never adds EOS, for a prompt whose text goes
        on. parse_special: whether ``<|im_end|>`` in the text is that token, not its letters. plain:
        a function that returns the original of a covered text between control tokens
        (chat/cover.py). No control token is parsed in that original. Raises SparseKVError for lone
        surrogates, and for BOS or EOS that the model lacks.
        """
        check_encodable(text)
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise SparseKVError(f"no BOS token: {PREFIX}bos_token_id is missing")
            ids.append(self.bos_id)
        after_special = True
        for fragment in self._fragments(text, parse_special, plain):
            if isinstance(fragment, int):
                ids.append(fragment)
                after_special = True
                continue
            if self._is_spm and self.space_prefix and after_special:
                fragment = " " + fragment
            ids += self._encode_plain(fragment)
            after_special = False
        if self.add_eos and add_eos and add_bos is not False:
            if self.eos_id is None:
                raise SparseKVError(f"no EOS token: {PREFIX}eos_token_id is missing")
            ids.append(self.eos_id)
        return ids

    def encode_within(self, text: str) -> list[int]:
        """Returns the ids of a text within another text. No control token is added or parsed."""
        check_encodable(text)
        ids: list[int] = []
        for fragment in split_special(text, self._specials, parse_special=False):
            ids += [fragment] if isinstance(fragment, int) else self._encode_plain(fragment)
        return ids

    def _fragments(
        self, text: str, parse_special: bool, plain: Callable[[str], str] | None
    ) -> Iterator[str | int]:
        """Yields plain texts and the ids of special tokens, in the order of ``text``."""
        if plain is None:
            yield from split_special(text, self._specials, parse_special)
            return
        controls = [special for special in self._specials if special.parsed_only]
        for fragment in split_special(text, controls, parse_special):
            if isinstance(fragment, int):
                yield fragment
            else:
                yield from split_special(plain(fragment), self._specials, parse_special=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Returns the text of ``ids``. Bytes that are not UTF-8 become U+FFFD.

        The space that SentencePiece adds before a text is removed from the first token.
        skip_special: whether control and unknown tokens are left out.
        """
        decoder = StreamDecoder(self, skip_special=skip_special)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token's text. For a special token this is its spelling."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(self.token_text(token_id), token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        """Returns a token's text in the vocabulary. Raises ValueError for an id out of range."""
        if not 0 <= token_id < self.n_vocab:
            raise ValueError(f"token id {token_id}: must be 0 to {self.n_vocab - 1}")
        return self._vocabulary.texts[token_id]

    def is_control(self, token_id: int) -> bool:
        """Returns whether a token is a control token, which is not part of the text."""
        self.token_text(token_id)
        return bool(self._vocabulary.kinds[token_id] & CONTROL)

    def is_shown(self, token_id: int) -> bool:
        """Returns whether a token belongs to the text: neither control nor unknown."""
        self.token_text(token_id)
        return not self._vocabulary.kinds[token_id] & SPECIAL

    def _make_piece(self, text: str, token_id: int) -> bytes:
        """Returns the bytes of a token (llama.cpp: ``token_to_piece``)."""
        kind = int(self._vocabulary.kinds[token_id])
        if kind & (SPECIAL | USER_DEFINED):
            return text.encode()
        if kind & NORMAL:
            if not self._bytes_of_symbol:
                return text.replace(SPACE_MARK, " ").encode()
            return b"".join([self._symbol_bytes(symbol, text) for symbol in text])
        if kind & BYTE:
            match = BYTE_TOKEN.fullmatch(text)
            assert match is not None, "checked when the vocabulary was read"
            return bytes([int(match[1], 16)])
        return b""  # an unused token or an unknown type

    def _symbol_bytes(self, symbol: str, text: str) -> bytes:
        byte = self._bytes_of_symbol.get(symbol)
        if byte is None:  # no symbol of byte-level BPE; llama.cpp writes this text too
            return f"[UNK_BYTE_0x{symbol.encode().hex()}{text}]".encode()
        return byte


class StreamDecoder:
    """Converts tokens to text one by one. It returns only complete UTF-8 characters.

    The joined texts equal ``decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._at_start = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the text that ``token_id`` completes. It may be empty."""
        tokenizer = self._tokenizer
        piece = tokenizer.token_bytes(token_id)
        if self._skip_special and not tokenizer.is_shown(token_id):
            piece = b""
        if self._at_start and tokenizer.space_prefix and piece.startswith(b" "):
            piece = piece[1:]
        self._at_start = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Returns U+FFFD for an incomplete character, else an empty string. Resets the decoder."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = True
        return rest


def load_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a GGUF file. metadata: ``GGUFFile.metadata``.

    Raises SparseKVError for an unsupported tokenizer model or pre-tokenizer, and for a vocabulary
    that contradicts itself.
    """
    model = metadata.get(PREFIX + "model")
    if not isinstance(model, str) or model not in ("gpt2", "llama", "gemma4"):
        raise SparseKVError(
            f"{PREFIX}model is {describe(model)}: 'llama' (SentencePiece), 'gpt2' (byte-level BPE) "
            "or 'gemma4' was expected"
        )
    if model == "gpt2":
        # imported here because a SentencePiece model does not need the library
        from sparsekv_cli.models.tokenizer.bpe import make_bpe_encoder

        pre = find_pre_tokenizer(metadata.get(PREFIX + "pre"))
        vocabulary = read_vocabulary(metadata, model)
        encode_plain = make_bpe_encoder(metadata, vocabulary, pre)
        add_bos, space_prefix = flag(metadata, "add_bos_token", pre.add_bos), False
    elif model == "gemma4":
        from sparsekv_cli.models.tokenizer.bpe import make_line_encoder

        vocabulary = read_vocabulary(metadata, model)
        encode_plain = make_line_encoder(metadata, vocabulary)
        add_bos, space_prefix = True, False  # llama.cpp ignores the file's setting too
    else:
        from sparsekv_cli.models.tokenizer.spm import make_spm_encoder

        vocabulary = read_vocabulary(metadata, model)
        encode_plain = make_spm_encoder(vocabulary)
        add_bos, space_prefix = flag(metadata, "add_bos_token", True), True
    return Tokenizer(
        vocabulary,
        encode_plain,
        find_specials(vocabulary, str(metadata.get("general.name", ""))),
        add_bos=add_bos,
        add_eos=flag(metadata, "add_eos_token", False),
        space_prefix=flag(metadata, "add_space_prefix", space_prefix),
    )


def find_specials(vocabulary: Vocabulary, model_name: str) -> list[SpecialToken]:
    """Returns the tokens that are split off from a text, the longest first."""
    is_phi3 = any(name in model_name.lower() for name in ("phi-3", "phi3"))
    specials = []
    for i in np.flatnonzero(vocabulary.kinds & (SPECIAL | USER_DEFINED)).tolist():
        text = vocabulary.texts[i]
        # llama.cpp decides by the model's name too: GGUF has no field for it
        eats_spaces = is_phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")
        specials.append(SpecialToken(text, i, bool(vocabulary.kinds[i] & SPECIAL), eats_spaces))
    specials.sort(key=lambda special: len(special.text.encode()), reverse=True)
    return specials


def split_special(text: str, specials: list[SpecialToken], parse_special: bool) -> list[str | int]:
    """Splits ``text`` into plain texts and special token ids. No text is empty."""
    fragments: list[str | int] = [text] if text else []
    for special in specials:
        if special.text not in text or (special.parsed_only and not parse_special):
            continue
        cut: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                cut.append(fragment)
                continue
            first, *others = fragment.split(special.text)
            cut.append(first)
            for other in others:
                cut += [special.id, other.lstrip(ASCII_SPACES) if special.eats_spaces else other]
        fragments = [fragment for fragment in cut if fragment != ""]
    return fragments


def check_encodable(text: str) -> None:
    """Raises SparseKVError if ``text`` has a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SparseKVError(
            f"the text is not valid Unicode: {text[error.start]!r} at character {error.start}"
        ) from None


def symbol_bytes() -> dict[str, bytes]:
    """Returns GPT-2's printable symbol -> the byte that it stands for."""
    from sparsekv_cli.models.tokenizer.bpe import byte_symbols

    return {symbol: bytes([byte]) for byte, symbol in enumerate(byte_symbols())}
