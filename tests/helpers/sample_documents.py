"""PDF and Word files."""

from io import BytesIO

from docx import Document


def pdf_of(*pages: str) -> bytes:
    """A PDF whose pages have a line each."""
    n, parts = len(pages), [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(n))
    parts[1] = f"<< /Type /Pages /Count {n} /Kids [{kids}] >>".encode()
    parts.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents {5 + 2 * i} 0 R "
        parts.append(f"{page}/Resources << /Font << /F1 3 0 R >> >> >>".encode())
        drawn = f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode()
        parts.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
    data, starts = b"%PDF-1.4\n", []
    for i, part in enumerate(parts, 1):
        starts.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (i, part)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(parts) + 1)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return data + head + table + end % (len(parts) + 1, len(data))


def word_of(*lines: str) -> bytes:
    """A Word file of lines, a row of a table and one more line; without lines it is empty."""
    document, out = Document(), BytesIO()
    for line in lines:
        document.add_paragraph(line)
    if lines:
        table = document.add_table(rows=1, cols=2)
        table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right"
        document.add_paragraph("after it")
    document.save(out)
    return out.getvalue()
