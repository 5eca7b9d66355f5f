"""SentencePiece tokenizers (``tokenizer.ggml.model = "llama"``) by the sentencepiece library.

llama.cpp joins two adjacent pieces, again and again: those whose joined text is the token with the
highest score. The leftmost pair wins a tie. The kind of the token does not matter.
Text without a token becomes bytes. sentencepiece's BPE does the same if each token is a NORMAL
piece. This module writes a ModelProto with these rules. The caller handles special tokens and the
leading space.
"""

import struct
from collections.abc import Callable

import sentencepiece

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.tokenizer.vocab import BYTE_TOKEN, PREFIX, Vocabulary, check_all_bytes

# sentencepiece_model.proto: types of a piece
PIECE_NORMAL, PIECE_UNKNOWN, PIECE_BYTE = 1, 2, 6


def make_spm_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Returns an encoder of plain text. Raises SparseKVError for a missing byte token."""
    check_all_bytes(vocabulary)
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model_proto(vocabulary))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise SparseKVError(f"{PREFIX}tokens: sentencepiece refuses it: {reason}") from None

    def encode(text: str) -> list[int]:
        return processor.encode(text, out_type=int)

    return encode


def model_proto(vocabulary: Vocabulary) -> bytes:
    """Returns the vocabulary as a serialized ModelProto (sentencepiece_model.proto).

    It is written without the protobuf package, whose import takes longer than this function.
    """
    assert vocabulary.scores is not None
    parts: list[bytes] = []
    for text, score in zip(vocabulary.texts, vocabulary.scores.tolist(), strict=True):
        kind = PIECE_BYTE if BYTE_TOKEN.fullmatch(text) else PIECE_NORMAL
        parts.append(piece(text, score, kind))
    unknown = "<unknown>"  # required by the library; not used, because all bytes are tokens
    while unknown in vocabulary.ids:
        unknown += ">"
    parts.append(piece(unknown, 0.0, PIECE_UNKNOWN))
    trainer = (
        number(3, 2)  # model_type = BPE
        + number(35, 1)  # byte_fallback
        + number(40, len(vocabulary.texts))  # unk_id
        + number(41, -1)  # bos_id, eos_id, pad_id: none
        + number(42, -1)
        + number(43, -1)
        + field(45, unknown.encode())  # unk_piece
    )
    normalizer = (
        field(1, b"identity")
        + number(3, 0)  # add_dummy_prefix
        + number(4, 0)  # remove_extra_whitespaces
        + number(5, 1)  # escape_whitespaces: space -> U+2581
    )
    parts += [field(2, trainer), field(3, normalizer)]
    return b"".join(parts)


def piece(text: str, score: float, kind: int) -> bytes:
    """Returns an entry of ModelProto.pieces: a token's text, score and type."""
    score_bytes = b"\x15" + struct.pack("<f", score)  # field 2, 32 bits
    return field(1, field(1, text.encode()) + score_bytes + number(3, kind))


def field(index: int, payload: bytes) -> bytes:
    """Returns a length-delimited protobuf field."""
    return varint(index << 3 | 2) + varint(len(payload)) + payload


def number(index: int, value: int) -> bytes:
    """Returns a protobuf field with a variable-length integer."""
    return varint(index << 3) + varint(value & 0xFFFFFFFFFFFFFFFF)


def varint(value: int) -> bytes:
    """Encodes an integer in 7 bits per byte, lowest first. All bytes except the last have bit 7."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
