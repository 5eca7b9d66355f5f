"""Markdown on the page: what becomes of it, and that it grows without being made anew."""

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
    ("\\(a_1 + b_2\\) $x*y*z$", '\\(a_1 + b_2\\)</code> <code class="maths">$x*y*z$'),
    ("It costs $5 and $6.", "<p>It costs $5 and $6.</p>"),
    ("a\n\\[\nx\n+ y\n\\]\nb", 'class="maths" tabindex="0">\\[\nx\n+ y\n\\]</pre><p>b</p>'),
    ("$$x_1$$", '<pre class="maths" tabindex="0">$$x_1$$</pre>'),
    ("$$\nx", "<p>$$<br />x</p>"),
    ("1. a\n\n   $$\n   x\n   $$\n2. b", ">$$\nx\n$$</pre></li><li>"),
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
