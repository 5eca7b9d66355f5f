"""What a chat template may not do: hang inside one operation, fill the memory, show addresses."""

import itertools
import time
import tracemalloc

import pytest

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat import limits
from sparsekv_cli.models.chat.template import render

USER = {"role": "user", "content": "Hi"}
STRIDE = 2**61 - 1  # Python's hashes of its multiples are all 0
LONG, NEARLY = "('a' * 1000000)", "('a' * 250000 ~ 'b' ~ 'a' * 250000)"
LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
NAMESPACES = (
    "{% set n = namespace(x=1) %}{% for i in range(60) %}"
    "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}"
)
LISTS = "{% set x = range(100000) | list %}{% set y = range(100000) | list %}"


def linked(step: str) -> str:
    """A template that keeps all that it makes, each in a namespace that holds the one before."""
    keep = f"{{% set n.x = namespace(a=n.x, b={step}) %}}"
    return "{% set n = namespace(x=0) %}{% set t = range(99999) | list %}" + LOOP + keep + END


def stopped(template: str) -> str:
    with pytest.raises(SparseKVError) as error:
        render(template, [USER])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 2 ** 60 }}", "{{ 1152921504606846976 }}", "{{ 1073741824 * 1073741824 }}",
        "{{ 1152921504606846975 + 1 }}", "{{ -1152921504606846975 - 1 }}",
        "{{ [1152921504606846975, 1] | sum }}", "{{ '1152921504606846976' | int }}",
        "{{ 1e300 | int }}",
    ],
)  # fmt: skip
def test_templates_compute_with_60_bits(template):
    assert "more than 60 bits" in stopped(template)


def test_numbers_of_a_conversation_may_be_larger():
    shown = render("{{ messages[0].n }} {{ messages | tojson }}", [{"n": 2**64}])
    assert shown == f'{2**64} [{{"n": {2**64}}}]'


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].n | unique | list | length }}",
        "{{ dict(messages[0].n | batch(2) | list) | length }}",
        "{{ namespace(messages[0].n | batch(2) | list) is defined }}",
    ],
)
def test_input_of_filters_is_counted(template, monkeypatch):
    """Numbers of the conversation, whose hashes are equal: each takes longer than the last."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)
    numbers = list(range(0, 120000 * STRIDE, STRIDE))
    start = time.thread_time()
    with pytest.raises(SparseKVError, match="takes longer"):
        render(template, [{"n": numbers, "content": "x" * 100000}])
    assert time.thread_time() - start < 6


SLOW = {
    "unique": "{{ range(0,60000*(2**61-1),2**61-1)|unique|list }}",
    "dict": "{{ dict(range(0,60000*(2**61-1),2**61-1)|batch(2)|list)|length }}",
    "rfind": f"{{{{ {LONG}.rfind({NEARLY}) }}}}",
    "rindex": f"{{{{ {LONG}.rindex({NEARLY}) }}}}",
    "rsplit": f"{{{{ {LONG}.rsplit({NEARLY}) }}}}",
    "rsplit by name": f"{{{{ {LONG}.rsplit(sep={NEARLY}) }}}}",
    "rpartition": f"{{{{ {LONG}.rpartition({NEARLY}) }}}}",
    "strip": f"{{{{ {LONG}.strip('b' * 1000000 ~ 'a') }}}}",
    "lstrip": f"{{{{ {LONG}.lstrip('b' * 1000000 ~ 'a') }}}}",
    "rstrip": f"{{{{ {LONG}.rstrip('b' * 1000000 ~ 'a') }}}}",
    "trim": f"{{{{ {LONG} | trim('b' * 1000000 ~ 'a') }}}}",
    "is lower": NAMESPACES + "{{ n.x is lower }}",
    "is upper": NAMESPACES + "{{ n.x is upper }}",
    "comparisons": LISTS + "{% if x" + " == y == x" * 1900 + " %}{% endif %}",
    "tests": LISTS + "{% if 'a' is in x or 'b' is in(x) %}{% endif %}" * 700,
}


@pytest.mark.parametrize("template", SLOW.values(), ids=SLOW)
def test_slow_templates_are_stopped(template, monkeypatch):
    """After about MAX_SECONDS; each would take minutes."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)
    start = time.thread_time()
    assert "stopped" in stopped(template)
    assert time.thread_time() - start < 3


LARGE = {
    "texts": linked("'a' * 1000000 ~ i"),
    "variables": "".join(f"{{% set a{i} = 'a' * 1000000 %}}" for i in range(1300)),
    "blocks": LOOP + "{% set s %}" + "a" * 100000 + "{% endset %}" + END,
    "slices": linked("t[1:]"),
    "lists": linked("[0] * 100000"),
    "arguments": linked("cycler(*t)"),
    "replaced": linked("('a' * 1000).replace('a', 'b' * 1000)"),
    "padded": linked("'a'.ljust(1000000)"),
    "indented": linked("i | string | indent(1000000, true)"),
    "joined": linked("[1, 2] | join('a' * 400000)"),
    "upper": "{% set s = 'a' * 1000000 %}" + linked("s.upper()"),
    "split": "{% set s = 'a' * 1000000 %}" + linked("s.split('b')"),
}


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_what_is_kept_is_bounded(template, monkeypatch):
    """However fast the machine is."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 30)
    monkeypatch.setattr(limits, "MAX_COPIES", 8)
    assert "characters in all" in stopped(template)


def test_json_is_bounded_while_it_is_indented():
    value: list = [0] * 100000
    for _ in range(200):
        value = [value]
    tracemalloc.start()
    try:
        with pytest.raises(SparseKVError, match="more than"):
            render("{{ messages | tojson(indent=16) }}", [{"x": value}])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "value",
    [
        *("range", "''.format_map", "[].index", "cycler(1)", "joiner()", "[1] | map('abs')"),
        *("[range]", "{'a': range}", "dict(a=range)", "namespace(a=1)", "self"),
        *("range | string", "range | upper", "range | e", "range | center", "range | trim"),
        *("range | replace('a', 'b')", "[range] | join", "range ~ ''", "'%s' % range"),
        *("'%s' | format(range)", "'{}'.format(range)", "'{0.upper}'.format('a')"),
        *("'{0[a]}'.format({'a': range})", "range | tojson", "x | default(range)"),
        *("raise_exception([range])", "raise_exception(range)"),
    ],
)
def test_no_address_is_shown(value):
    text = stopped(f"{{{{ {value} }}}}")
    assert " at 0x" not in text


def test_the_time_of_other_programs_does_not_count(monkeypatch):
    """On a busy machine a second passes soon; the template has worked for a moment only."""
    clock = itertools.count()
    monkeypatch.setattr(limits.time, "perf_counter", lambda: float(next(clock)))
    assert render("{% for i in range(9) %}{{ i }}{% endfor %}", []) == "012345678"
