"""PDF and Word files."""

from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile

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


MAIN = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SPACES = {
    "w": MAIN,
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
    "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    **{name: f"urn:{name}" for name in ("a", "o", "pic", "v", "wp", "wps", "c", "dgm")},
}
RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"


def archive_of(parts: dict[str, bytes | str]) -> bytes:
    """A zip file."""
    out = BytesIO()
    with ZipFile(out, "w", ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return out.getvalue()


def docx_of(body: str, **others: str) -> bytes:
    """A Word file of the XML within its body and, by their kinds, in its other parts."""
    names = " ".join(f'xmlns:{name}="{uri}"' for name, uri in SPACES.items())
    relations = "".join(
        f'<Relationship Id="{kind}" Type="{SPACES["r"]}/{kind}" Target="{kind}.xml"/>'
        for kind in others
    )
    parts = {f"word/{kind}.xml": f"<w:{kind} {names}>{xml}</w:{kind}>"
             for kind, xml in others.items()}  # fmt: skip
    main = f"<w:document {names}><w:body>{body}</w:body></w:document>"
    found = f'<Relationships xmlns="{RELATIONS}">{relations}</Relationships>'
    return archive_of({**parts, "word/document.xml": main,
                       "word/_rels/document.xml.rels": found})  # fmt: skip
