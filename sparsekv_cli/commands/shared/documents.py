"""The text of PDF and Word files, for every command that reads a text (extra ``docs``)."""

import logging
from collections.abc import Callable
from io import BytesIO
from zipfile import BadZipFile, ZipFile

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.installation import install_command

PDF, WORD = "PDF", "Word file"
MOST_UNPACKED = 256 << 20  # bytes of all parts of a Word file


def kind_of(data: bytes) -> str:
    """``PDF``, ``Word file``, or nothing for another file."""
    if data.startswith(b"%PDF-"):
        return PDF
    if data.startswith(b"PK\3\4"):
        try:
            with ZipFile(BytesIO(data)) as parts:
                return WORD if "word/document.xml" in parts.namelist() else ""
        except BadZipFile:
            return ""
    return ""


def document_text(data: bytes, kind: str, source: str) -> str:
    """Returns the text of a file of a ``kind_of``: pages, or paragraphs and rows of tables.

    Raises SparseKVError, which names ``source``: for a file that is damaged, encrypted or without a
    text, and if the package that reads it is missing.
    """
    read: Callable[[bytes], str] = _pdf_text if kind == PDF else _word_text
    try:
        text = read(data)
    except ImportError:
        raise SparseKVError(
            f"{source} is a {kind}, which needs {install_command('docs')}"
        ) from None
    except SparseKVError as error:
        raise SparseKVError(f"{source}: {error}") from None
    except Exception as error:  # of damaged files the packages raise anything
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise SparseKVError(f"{source}: the {kind} cannot be read: {reason}") from None
    if not text.strip():
        raise SparseKVError(
            f"{source}: the {kind} has no text: if it is a scan, recognise its text"
        )
    return text


def _pdf_text(data: bytes) -> str:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what it logs is in the error
    reader = PdfReader(BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise SparseKVError("the PDF is encrypted: save it without a password")
    return "\n\n".join(page.extract_text() for page in reader.pages)


def _word_text(data: bytes) -> str:
    from docx import Document
    from docx.table import Table

    with ZipFile(BytesIO(data)) as parts:
        n_bytes = sum(part.file_size for part in parts.infolist())
    if n_bytes > MOST_UNPACKED:
        raise SparseKVError(
            f"the Word file unpacks to {n_bytes >> 20} MiB, of which {MOST_UNPACKED >> 20} are read"
        )
    lines = []
    for part in Document(BytesIO(data)).iter_inner_content():
        if isinstance(part, Table):
            lines += [" | ".join(cell.text for cell in row.cells) for row in part.rows]
        else:
            lines.append(part.text)
    return "\n".join(lines)
