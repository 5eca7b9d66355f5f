"""The text of PDF and Word files, for all commands that read a text (extra ``docs``)."""

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.installation import install_command
from sparsekv_cli.system.pdf_text import pdf_text

PDF, WORD, OLD = "PDF", "Word file", "Office file"
# The first bytes of a file -> its kind. Office stores a file with a password in the old format.
KINDS = {b"%PDF-": PDF, b"PK\3\4": WORD, b"\xd0\xcf\x11\xe0": OLD}
MOST_UNPACKED = 256 << 20  # bytes of all parts of a Word file together


def kind_of(data: bytes) -> str:
    """Returns ``PDF``, ``Word file`` (or another zip archive), ``Office file``, or ""."""
    return next((kind for start, kind in KINDS.items() if data.startswith(start)), "")


def document_text(data: bytes, source: str) -> str:
    """Returns the text of a PDF or Word file: pages, or paragraphs and rows of tables.

    Raises SparseKVError, which has ``source``, for a file that is damaged, encrypted or without
    text. It also raises it if the package that reads such files is missing.
    """
    kind = kind_of(data)
    try:
        text = {PDF: pdf_text, WORD: _word_text, OLD: _old_text}[kind](data)
    except ImportError:
        raise SparseKVError(
            f"{source} is a {kind}, which needs {install_command('docs')}"
        ) from None
    except SparseKVError as error:
        raise SparseKVError(f"{source}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # for damaged files the packages raise anything
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise SparseKVError(
            f"{source}: the {kind} cannot be read: {reason}; save it again, or give its text"
        ) from None
    if not text.strip():
        raise SparseKVError(
            f"{source}: the {kind} has no text: if it is a scan, recognise its text"
        )
    # a PDF may have halves of surrogate pairs
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _word_text(data: bytes) -> str:
    from io import BytesIO
    from zipfile import BadZipFile, ZipFile

    from sparsekv_cli.system.word_text import word_text

    try:
        archive = ZipFile(BytesIO(data))
        parts = archive.infolist()
    except BadZipFile:
        raise SparseKVError("the archive is damaged: copy or save it again") from None
    if not any(part.filename.startswith("word/") for part in parts):
        raise SparseKVError("the archive is no Word file: unpack it, and give a text, PDF or .docx")

    n_bytes = sum(part.file_size for part in parts)
    if n_bytes > MOST_UNPACKED:
        raise SparseKVError(
            f"the Word file unpacks to {n_bytes >> 20} MiB, more than {MOST_UNPACKED >> 20}: "
            "split it, or give its text"
        )
    return word_text(archive)


def _old_text(data: bytes) -> str:
    raise SparseKVError(
        "this is an old Office file, or has a password: save it as .docx without one"
    )
