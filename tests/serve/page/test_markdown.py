"""Markdown and formulas on the page: what becomes of them as they grow."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

RENDER = """
    const into = document.createElement('div');
    for (const text of texts) markdown(text, into);
    done(new XMLSerializer().serializeToString(into).replaceAll(/ xmlns="[^"]*"/g, ''));
"""
PLAIN = [
    ("# A\n\n#### B", "<h3>A</h3><h6>B</h6>"),
    ("one\ntwo", "<p>one<br />two</p>"),
    ("**a** *b* ~~c~~ `d<`", "<strong>a</strong> <em>b</em> <s>c</s> <code>d&lt;</code>"),
    (
        "- a\n  1. b\n     - c",
        '<ul><li>a<ol start="1"><li>b<ul><li>c</li></ul></li></ol></li></ul>',
    ),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr /><p>b</p>"),
    ("a &amp; b &lt;", "<p>a &amp; b &lt;</p>"),
    ("<b>x</b>", "&lt;b&gt;x&lt;/b&gt;"),
    ("\\(a_{1\\) $x*}$", '\\(a_{1\\)</code> <code class="maths">$x*}$'),
    ("It costs $5 and $6.", "<p>It costs $5 and $6.</p>"),
    ("a\n\\[\nx\n+ }\n\\]\nb", 'class="maths" tabindex="0">\\[\nx\n+ }\n\\]</pre><p>b</p>'),
    ("$$x_{$$", '<pre class="maths" tabindex="0">$$x_{$$</pre>'),
    ("$$\nx", "<p>$$<br />x</p>"),
    ("1. a\n\n   $$\n   x\n   $$\n2. b", "</math></div></li><li>"),
    ("see https://example.org/a_b_c.", '<a href="https://example.org/a_b_c"'),
    ("![a cat](https://example.org/c.png)", ">[picture: a cat]</a>"),
]


def render(site: Any, *texts: str) -> str:
    return site.markdown(RENDER, *texts)


def test_what_becomes_of_it(site: Any) -> None:
    for text, expected in PLAIN:
        assert expected in render(site, text), text
    table = render(site, "| a | b |\n|:-:|--:|\n| 1 | `|` \\| 2 |")
    assert '<div class="table" tabindex="0"><table><thead>' in table
    assert '<td class="center">1</td>' in table and '<th class="right">b</th>' in table


def test_code(site: Any) -> None:
    shown = render(site, "```python\ndef f(): return '<b>'\n```")
    assert '<span class="hljs-keyword">def</span>' in shown and "'&lt;b&gt;'</span>" in shown
    assert 'role="group" aria-label="Code python"' in shown and '="Copy the code"' in shown
    for text in ("```nonsense\na<b\n```", "    a<b", "```\na<b"):
        assert "<code>a&lt;b" in render(site, text)
    assert "hljs" not in render(site, "```python\n" + "a = 1\n" * 6000 + "```")


BLOCKS = "# A\n\nb\n\n```c\nint a;\n```\n\n- c\n- d\n\n| a |\n|---|\n| b |\n"


@pytest.mark.parametrize("text", [BLOCKS, "a [b]\n\n[b]: https://e.org"])
def test_it_grows_to_what_it_is_at_once(site: Any, text: str) -> None:
    assert render(site, *[text[:n] for n in range(len(text) + 1)]) == render(site, text)


def test_blocks_that_are_whole_stay(site: Any) -> None:
    """A reader may select them while the answer grows."""
    script = """
        const into = document.createElement('div');
        markdown('one\\n\\ntwo', into);
        const [one, two] = into.children;
        markdown('one\\n\\ntwo three', into);
        done([one === into.children[0], two === into.children[1], into.textContent]);
    """
    assert site.markdown(script) == [True, False, "onetwo three"]


MATHS = """
    const done = arguments[1];
    import('/static/text/maths.js').then(({ maths }) => {
      done(arguments[0].map((text) => {
        const made = maths(text, true);
        const shown = made?.querySelector('semantics').firstChild;
        return made && new XMLSerializer().serializeToString(shown)
            .replaceAll(/ xmlns="[^"]*"/g, '');
      }));
    });
"""
FORMULAS = [
    ("x_1^2", "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>"),
    ("f'(x)", "<msup><mi>f</mi><mo>′</mo></msup>"),
    (r"\frac{a}{b}", "<mfrac><mi>a</mi><mi>b</mi></mfrac>"),
    (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
    (r"\sqrt[3]{x}", "<mroot><mi>x</mi><mn>3</mn></mroot>"),
    (r"\sum_{i=1}^n i", '<munderover><mo movablelimits="true">∑</mo>'),
    (r"\int_0^1", "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>"),
    (r"\lim_{x\to 0}", '<munder><mo movablelimits="true" form="prefix">lim</mo>'),
    (r"\alpha \leq \beta", "<mrow><mi>α</mi><mo>≤</mo><mi>β</mi></mrow>"),
    (r"\mathbb{R}^n", '<msup><mi mathvariant="normal">ℝ</mi><mi>n</mi></msup>'),
    (r"\mathbf{x}", '<mi mathvariant="normal">𝐱</mi>'),
    (r"\text{if } x", "<mtext>if </mtext>"),
    (r"\left( x \right]", '<mo stretchy="true" fence="true">(</mo><mi>x</mi>'),
    (r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}", "<mtd><mi>b</mi></mtd></mtr><mtr><mtd>"),
    (r"\begin{cases} 1 & x>0 \\ 0 \end{cases}", '<mtable class="left">'),
    (r"\begin{aligned} a &= b \\ &= c \end{aligned}", '<mtable class="aligned">'),
    (r"\hat{x} \bar y", '<mover accent="true"><mi>x</mi><mo stretchy="false">^</mo></mover>'),
    (r"\not= \{ 1 \}", "<mo>=\u0338</mo>"),
    (r"\binom n k", '<mfrac linethickness="0"><mi>n</mi><mi>k</mi></mfrac>'),
    (r"\xrightarrow{f}", '<mover><mo stretchy="true">→</mo><mi>f</mi></mover>'),
    (r"\unknown{a_1}{b} + 1", r"<mtext>\unknown{a_1}{b}</mtext><mo>+</mo>"),
    (r"\constructor \__proto__", r"<mtext>\constructor</mtext>"),
    ("<img onerror=x>", '<mo stretchy="false">&lt;</mo><mi>i</mi>'),
    (r"\text{<script>}", "<mtext>&lt;script&gt;</mtext>"),
    ("5 - 3 < 10{,}000.5", "<mo>−</mo>"),
]
BAD = ["}", "{", r"\frac{a}", r"\left( x", r"\begin{matrix} a", r"\begin{nonsense}\end{nonsense}"]
BAD += [r"\begin{matrix}\end{pmatrix}", r"\right)", "a & b", "x^", r"\begin{constructor}"]
HUGE = ["{" * 5000, r"\sqrt" * 3000, "x^" * 1500, "x" * 5000, r"\left(" * 900, r"\frac" * 1900]
HUGE += [r"\begin{matrix}" * 100, r"\text{" * 2000, r"\foo{" * 1900, "a&" * 1900, r"\not" * 3900]


def test_formulas(site: Any) -> None:
    made = site.browser.execute_async_script(MATHS, [text for text, _ in FORMULAS])
    for (text, expected), found in zip(FORMULAS, made, strict=True):
        assert found and expected in found, text


def test_what_has_an_error_is_left_as_text(site: Any) -> None:
    made = site.browser.execute_async_script(MATHS, BAD + HUGE)
    assert made == [None] * len(made)


def test_formulas_in_an_answer(site: Any) -> None:
    site.send(
        "One", r"It is $x^2$ for \(a\).", "\n\n$$\\frac{1}{2}$$\n\n", r"and \(\foo{x}\), \(}\)"
    )
    assert site.js("return document.querySelectorAll('math').length") == 4
    assert site.js("return document.querySelector('.formula math').display ?? 'block'") == "block"
    shown = site.texts(".text")[0]
    assert r"\foo{x}" in shown and r"\(}\)" in shown
    sizes = (
        "return [...document.querySelectorAll('math')].map(e => e.getBoundingClientRect().height)"
    )
    assert all(height > 5 for height in site.js(sizes))
