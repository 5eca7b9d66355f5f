"""The colours of a report, for light and dark pages."""

import re
from collections.abc import Mapping

# name -> its colour on white and on black. Pictures are drawn in the first. In a page, the names
# replace the colours.
THEME: Mapping[str, tuple[str, str]] = {
    "ink": ("#1c2128", "#e6edf3"),
    "muted": ("#656d76", "#8d96a0"),
    "line": ("#d0d7de", "#373e47"),
    "page": ("#ffffff", "#12161c"),
    "found": ("#1a7f4b", "#4cc38a"),
    "lost": ("#c8323c", "#ff7b72"),
    "full": ("#1c2129", "#e6edf4"),
    "topk": ("#2f6fbf", "#6cb0ff"),
    "streaming": ("#7d8590", "#9aa4af"),
    "quest": ("#c96a10", "#ffa657"),
    "snapkv": ("#2b8a5a", "#56d39b"),
    "h2o": ("#6f8f10", "#b6d34a"),
    "lfps": ("#d02f4b", "#ff6b81"),
    "fasa": ("#7d52c0", "#bc9cff"),
    "sals": ("#0f8f97", "#4fd3db"),
    "freekv": ("#b63a86", "#ff8ac7"),
    "faedkv": ("#8a6540", "#d3a97c"),
}
# Colours of methods that have none in THEME.
OTHERS = ("#4f5fd7", "#93850f", "#a14747", "#3d7f7f")
MARKERS = "osD^vPX<>hp*d"


def colour_of(method: str, methods: list[str]) -> str:
    """Returns the colour of a method on white. methods: the names of all methods of the report."""
    if method in THEME:
        return THEME[method][0]
    unknown = [name for name in dict.fromkeys(methods) if name not in THEME]
    return OTHERS[unknown.index(method) % len(OTHERS)]


def marker_of(method: str, methods: list[str]) -> str:
    """Returns a method's marker. It differs from the markers of methods with similar colours."""
    return MARKERS[list(dict.fromkeys(methods)).index(method) % len(MARKERS)]


def themed(svg: str) -> str:
    """Returns an SVG picture with colours by name, ``var(--ink)``, which a page defines."""
    names = {light: name for name, (light, _) in THEME.items()}
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0],
        svg,
    )


def style() -> dict[str, str]:
    """Returns the CSS variables that define the colours of a page: ``light`` and ``dark``."""
    return {
        name: "".join(f"--{key}:{colours[i]};" for key, colours in THEME.items())
        for i, name in enumerate(("light", "dark"))
    }
