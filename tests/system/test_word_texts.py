"""Word files: nothing of what a reader sees is missing, and each text is there once."""

from __future__ import annotations

import time

import pytest
from sample_documents import docx_of

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system import word_text
from sparsekv_cli.system.documents import document_text


def r(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def p(inner: str) -> str:
    return f"<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr>{inner}</w:p>"


def cell(inner: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{inner}</w:tc>"


def row(*cells: str) -> str:
    return f"<w:tr>{''.join(cells)}</w:tr>"


def table(*rows: str) -> str:
    return f"<w:tbl><w:tblPr/><w:tblGrid/>{''.join(rows)}</w:tbl>"


def mark(kind: str, inner: str = "") -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}">{inner}</w:fldChar></w:r>'


def control(inner: str) -> str:
    return f"<w:sdt><w:sdtPr><w:alias/></w:sdtPr><w:sdtContent>{inner}</w:sdtContent></w:sdt>"


def box(inner: str) -> str:
    """A text box as Word writes it: once as it is now, once as older programs read it."""
    content = f"<w:txbxContent>{inner}</w:txbxContent>"
    return (
        f'<w:r><mc:AlternateContent><mc:Choice Requires="wps"><w:drawing><wps:txbx>{content}'
        f"</wps:txbx></w:drawing></mc:Choice><mc:Fallback><w:pict><v:textbox>{content}</v:textbox>"
        "</w:pict></mc:Fallback></mc:AlternateContent></w:r>"
    )


def boxes(n: int) -> str:
    return p(box(boxes(n - 1)) if n else r("deep"))


CODE = "<w:r><w:instrText>PAGE 7</w:instrText></w:r>"
SPAN = '<w:gridSpan w:val="2"/>'
DRAWN = "<w:drawing><wp:inline>{}<a:graphic><pic:pic/></a:graphic></wp:inline></w:drawing>"
CASES = {
    "control": (control(p(r("in") + control(r("side")))), "inside"),
    "inserted": (p("<w:ins>" + r("new") + "</w:ins><w:del><w:r><w:delText>old</w:delText></w:r>"
                   "</w:del>"), "new"),
    "moved": (p("<w:moveFrom>" + r("from") + "</w:moveFrom><w:moveTo>" + r("to") + "</w:moveTo>"),
              "to"),
    "simple field": (p(r("a ") + f'<w:fldSimple w:instr="DATE">{r("today")}</w:fldSimple>'),
                     "a today"),
    "field": (p(mark("begin") + CODE + mark("separate") + r("7") + mark("end") + r(" of 9")),
              "7 of 9"),
    "field in the code of a field": (
        p(mark("begin") + CODE + mark("begin") + CODE + mark("separate") + r("inner") + mark("end")
          + mark("separate") + r("outer") + mark("end")), "outer"),
    "field within a link": (
        p("<w:hyperlink>" + mark("begin") + CODE + mark("separate") + r("shown") + mark("end")
          + "</w:hyperlink>"), "shown"),
    "field over paragraphs": (p(mark("begin") + CODE + mark("separate") + r("one")) + p(r("two")
                              + mark("end")) + p(r("three")), "one\ntwo\nthree"),
    "field without an end": (p(mark("begin") + CODE + r("code")) + p(r("after")), "\nafter"),
    "check boxes": (
        p(mark("begin", '<w:ffData><w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox>'
               "</w:ffData>") + mark("end") + r("yes")
          + mark("begin", '<w:ffData><w:checkBox><w:default w:val="0"/></w:checkBox></w:ffData>')
          + mark("end") + r("no")), "[x]yes[ ]no"),
    "list to choose from": (
        p(mark("begin", '<w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="red"/>'
               '<w:listEntry w:val="blue"/></w:ddList></w:ffData>') + mark("end")), "blue"),
    "link": (p("<w:hyperlink>" + r("link") + "</w:hyperlink>"), "link"),
    "smart tag": (p("<w:smartTag><w:smartTag>" + r("Paris") + "</w:smartTag></w:smartTag>"),
                  "Paris"),
    "custom xml": ("<w:customXml>" + p(r("kept")) + "</w:customXml>", "kept"),
    "signs": (p("<w:r><w:t>a</w:t><w:br/><w:t>b</w:t><w:tab/><w:t>c</w:t><w:noBreakHyphen/>"
                '<w:t>d</w:t><w:softHyphen/><w:sym w:font="Arial" w:char="2192"/>'
                '<w:sym w:font="Wingdings" w:char="F0FC"/><w:cr/></w:r>'),
              "a\nb\tc-d\u2192[Wingdings F0FC]\n"),
    "a symbol that is none": (p(r("a") + '<w:r><w:sym w:font="X" w:char="zz"/></w:r>'), "a[X zz]"),
    "spoken": (p("<w:r><w:ruby><w:rt>" + r("kan") + "</w:rt><w:rubyBase>" + r("K")
                 + "</w:rubyBase></w:ruby></w:r>"), "K(kan)"),
    "merged": (table(row(cell(p(r("wide")), SPAN), cell(p(r("c")))),
                     row(*(cell(p(r(each))) for each in "xyz"))), "wide | c\nx | y | z"),
    "merged downwards": (
        table(row(cell(p(r("tall")), '<w:vMerge w:val="restart"/>'), cell(p(r("1")))),
              row(cell(p(""), "<w:vMerge/>"), cell(p(r("2")))),
              row(cell(p(""), '<w:vMerge w:val="continue"/>'), cell(p(r("3"))))),
        "tall | 1\n | 2\n | 3"),
    "a cell of two lines": (table(row(cell(p(r("one")) + p(r("two"))), cell(p(r("b"))))),
                            "one two | b"),
    "a row and a cell in controls": (
        table(control(row(control(cell(p(r("a")))), cell(control(p(r("b"))))))), "a | b"),
    "a row that was deleted": (
        table("<w:tr><w:trPr><w:del/></w:trPr>" + cell(p(r("old"))) + "</w:tr>", row(cell(p(r("x")))
              )), "x"),
    "table in a table": (table(row(cell(p(r("a")) + table(row(cell(p(r("in"))), cell(p(r("ner")))))
                                        + p("")), cell(p(r("b"))))), "a | b\nin | ner"),
    "text box": (p(r("around") + box(p(r("boxed")) + table(row(cell(p(r("x"))), cell(p(r("y")))))
                                     )), "around\nboxed\nx | y"),
    "text box in text boxes": (p(r("x")) + boxes(5), "x" + 6 * "\n" + "deep"),
    "text box in a cell": (table(row(cell(p(r("a") + box(p(r("boxed"))))), cell(p(r("b"))))),
                           "a boxed | b"),
    "old text box": (p(r("x") + "<w:r><w:pict><v:textbox><w:txbxContent>" + p(r("old"))
                       + "</w:txbxContent></v:textbox></w:pict></w:r>"), "x\nold"),
    "only the form for older programs": (
        p("<mc:AlternateContent><mc:Fallback>" + r("old") + "</mc:Fallback></mc:AlternateContent>"),
        "old"),
    "equation": (
        p(r("E=") + "<m:oMath><m:r><m:t>m</m:t></m:r><m:sSup><m:e><m:r><m:t>c</m:t></m:r></m:e>"
          "<m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup><m:r><m:t>+</m:t></m:r><m:f><m:num><m:r>"
          "<m:t>a</m:t></m:r></m:num><m:den><m:r><m:t>b</m:t></m:r></m:den></m:f></m:oMath>"),
        "E=m(c)^(2)+(a)/(b)"),
    "sum": (
        p('<m:oMathPara><m:oMath><m:nary><m:naryPr><m:chr m:val="\u2211"/></m:naryPr><m:sub><m:r>'
          "<m:t>i</m:t></m:r></m:sub><m:sup><m:r><m:t>n</m:t></m:r></m:sup><m:e><m:r><m:t>x</m:t>"
          "</m:r></m:e></m:nary></m:oMath></m:oMathPara>"), "\u2211_(i)^(n)(x)"),
    "inserted document": (p(r("a")) + '<w:altChunk r:id="x"/>', "a\n[inserted document left out]"),
    "object": (p(r("a") + '<w:r><w:object><v:shape><v:imagedata/></v:shape><o:OLEObject '
                 'ProgID="Excel.Sheet.12"/></w:object></w:r>'),
               "a[embedded object Excel.Sheet.12 left out]"),
    "pictures": (p(r("a") + "<w:r>" + DRAWN.format('<wp:docPr descr="A cat"/>')
                   + DRAWN.format("<wp:docPr/>") + "<w:pict><v:imagedata/></w:pict></w:r>"),
                 "a[picture: A cat][picture][picture]"),
    "chart and diagram": (p(r("a") + "<w:r><w:drawing><c:chart/></w:drawing><w:drawing>"
                            "<dgm:relIds/></w:drawing></w:r>"),
                          "a[chart left out][diagram left out]"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "text"), CASES.values(), ids=CASES)
def test_each_text_is_there_once(body, text):
    assert document_text(docx_of(body), "x.docx") == text


def test_what_lies_apart_has_its_place():
    note = '<w:{0} w:id="-1"><w:p/></w:{0}><w:{0} w:id="4">{1}</w:{0}>'.format
    data = docx_of(
        p(r("See") + '<w:r><w:footnoteReference w:id="4"/></w:r>'
          + '<w:r><w:endnoteReference w:id="4"/><w:commentReference w:id="4"/></w:r>')
        + p('<w:r><w:footnoteReference w:id="4"/><w:footnoteReference w:id="9"/></w:r>'),
        header=p(r("Confidential")) + p(""),
        footer=p(r("Page ") + mark("begin") + CODE + mark("separate") + r("1") + mark("end")),
        footnotes=note("footnote", p("<w:r><w:footnoteRef/></w:r>" + r("First")) + p(r("more"))),
        endnotes=note("endnote", table(row(cell(p(r("a"))), cell(p(r("b")))))),
        comments='<w:comment w:id="4" w:author="Ann">' + p(r("Sure?")) + "</w:comment>",
    )  # fmt: skip
    assert document_text(data, "x").split("\n") == [
        "[header] Confidential", "See[footnote 1][endnote 1][comment 1]",
        "[footnote 1][footnote 2]", "[footnote 1] First", "[footnote 1] more",
        "[footnote 2] left out", "[endnote 1] a | b", "[comment 1, Ann] Sure?", "[footer] Page 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (p("<w:r>" + DRAWN.format('<wp:docPr descr=""/>') + "</w:r>"), "has no text"),
        (table(row(cell(p("")), cell(p("")))), "has no text"),
        (p(r("a") + '<w:r><w:footnoteReference w:id="1"/></w:r>'), "cannot be read: .*no item"),
        ("<w:ins>" * 20000 + p(r("a")) + "</w:ins>" * 20000, None),
        (p("<w:ins>" * 20000 + r("a") + "</w:ins>" * 20000), "cannot be read"),
        (100_000 * p(""), "marks in a part, more than 500000: split it"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_line(monkeypatch, body, said):
    monkeypatch.setattr(word_text, "MOST_TAGS", 500_000)
    if said is None:
        assert document_text(docx_of(body), "x") == "a"
    else:
        with pytest.raises(SparseKVError, match=f"x.*{said}") as caught:
            document_text(docx_of(body), "x")
        assert "\n" not in str(caught.value)


def test_a_cell_over_many_columns_is_one_cell():
    huge = '<w:gridSpan w:val="999999999"/>'
    started = time.process_time()
    found = document_text(docx_of(table(200 * row(cell(p(r("a")), huge), cell(p(r("b")))))), "x")
    assert found.split("\n") == 200 * ["a | b"]
    assert time.process_time() - started < 2
