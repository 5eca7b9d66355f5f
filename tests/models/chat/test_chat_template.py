"""Chat templates: what transformers renders, and templates that mean no good (FORMAT item 41)."""

import json
import tracemalloc
from datetime import datetime
from typing import Any

import jinja2
import pytest

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat import limits
from sparsekv_cli.models.chat.template import CHATML, render

USER = {"role": "user", "content": "Hi"}
TURNS = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
    {"role": "user", "content": " Wörld? \n"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'For a "city" <b>',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"


def plain_environment() -> jinja2.Environment:
    """jinja2 as transformers sets it up, without any bounds."""

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


# what templates do


def test_chatml_where_there_is_no_template():
    text = render(None, TURNS[:2])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(None, [USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{{ messages[0]['content'] | upper ~ 1 ~ none }}", "HI1None"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
         "{% if i == 3 %}{% break %}{% endif %}{% endfor %}", "023"),
        ("{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ x is defined }}",
         "TrueTrueTrueFalse"),
        ("{{ {'a': 'é<', 'b': [1, none]} | tojson }}", '{"a": "é<", "b": [1, null]}'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{{ {'a': 1} | tojson(separators=(',', ':')) }}", '{"a":1}'),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% macro m(x, y='!') %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}"
         "{% call m('a') %}c{% endcall %}", "a!c"),
        ("{% set ns = namespace(n=0, s='') %}{% for c in 'abc' %}{% set ns.n = ns.n + 1 %}"
         "{% set ns.s = ns.s + c %}{% endfor %}{{ ns.n }}{{ ns.s }}", "3abc"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}",
         "a2Falseb1True"),
        ("{{ 'a-b'.split('-')[-1] }}{{ ' x '.strip() }}{{ 'abc'.startswith('a') }}", "bxTrue"),
        ("{{ 'aXb'.replace('X', '-') }}{{ 'aXbX' | replace('X', '', 1) }}", "a-babX"),
        ("{{ ['a', 'b'] | join(', ') }}{{ ','.join(['c', 'd']) }}", "a, bc,d"),
        ("{{ '%s=%03d' % ('n', 7) }}{{ '{:>3}{x}'.format(1, x=2) }}{{ 7 % 4 }}", "n=007  123"),
        ("{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | list }}{{ [1, 2] | sum }}", "[1, 2]3"),
        ("{% set x %}{{ 'a' }}b{% endset %}{{ x }}{{ x * 2 }}{{ [1] + [2] }}", "ababab[1, 2]"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
         "123"),
        ("{{ 'a\nb' | indent(2) }}{{ 2 ** 10 }}{{ (1, 2)[1] }}{{ 2.6 | round | int }}",
         "a\n  b102423"),
        ("{{ none | map('abs') | list }}{{ x | unique | list }}", "[][]"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ],
)  # fmt: skip
def test_what_templates_use(template, expected):
    assert render(template, [USER], bos_token="<s>", eos_token="</s>") == expected


def test_variables_and_tools():
    template = (
        "{{ date_string }}{{ enable_thinking }}{{ tools[0].function.name }}{{ x is defined }}"
    )
    variables = {"date_string": "1 Jan", "enable_thinking": False, "x": None}
    assert render(template, [USER], tools=[WEATHER], **variables) == "1 JanFalseget_weatherFalse"


def test_time():
    assert render("{{ strftime_now('%Y') }}", [USER]) == str(datetime.now().year)


def test_the_conversation_is_not_changed():
    messages = [dict(USER)]
    with pytest.raises(SparseKVError, match="not allowed"):
        render("{{ messages.append(1) }}", messages)
    with pytest.raises(SparseKVError, match="not allowed"):
        render("{{ messages[0].update(role='system') }}", messages)
    assert messages == [USER]


def test_long_conversations_and_texts():
    messages = [USER, {"role": "assistant", "content": "Hello."}] * 1000
    messages.append({"role": "user", "content": "x" * 3_000_000})
    template = (
        "{% for m in messages %}"
        "{% if loop.index <= messages | length %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert len(render(template, messages)) == 3_008_000
    assert len(render(None, messages)) > 3_008_000


# what goes wrong


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "syntax error at line 1: Expected an expression"),
        ("a\n{{ x", "syntax error at line 2"),
        ("{% for %}", "syntax error"),
        ("{{ 1 | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ foo.bar }}", "'foo' is undefined"),
        ("{{ foo() }}", "'foo' is undefined"),
        ("{{ foo | tojson }}", "not JSON serializable"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ raise_exception('roles\n\nmust alternate') }}", "conversation: roles must alternate"),
        ("{{ raise_exception('x' * 100000) }}", "xxx..."),
        ("{{ ''.__class__.__mro__ }}", "not allowed: access to attribute '__class__'"),
        ("{{ ''['__class__'].x }}", "not allowed"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "not allowed"),
        ("{{ cycler.__init__.__globals__ }}", "not allowed"),
        ("{{ raise_exception.__globals__.x }}", "not allowed"),
        ("{{ '' | attr('__class__') }}", "No filter named 'attr'"),
        ("{{ (1).to_bytes(9, 'big') }}", "may not"),
        ("{{ self.x() }}", "no attribute 'x'"),
    ],
)
def test_errors_are_one_line(template, message):
    with pytest.raises(SparseKVError) as error:
        render(template, [USER])
    text = str(error.value)
    assert message in text and "\n" not in text and len(text) < 400
    assert text.startswith("chat template: ")


DOUBLING = "{% set n = namespace(x=START) %}" + LOOP + "{% set n.x = STEP %}" + END + "{{ n.x }}"
NESTED = "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set m = namespace(a=n.x, b=n.x) %}{% set n.x = m %}{% endfor %}"  # noqa: E501


def doubling(start: str, step: str) -> str:
    return DOUBLING.replace("START", start).replace("STEP", step)


GREEDY = {
    "loops in loops": LOOP * 3 + END * 3,
    "loops that show": LOOP * 2 + "text" + END * 2,
    "loops in a macro": "{% macro m() %}" + LOOP * 2 + "a" + END * 2 + "{% endmacro %}{{ m() }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "large range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "filters in loops": LOOP + "{% set t = range(99999) | sort %}" + END,
    "text times": "{{ 'a' * 10 ** 10 }}",
    "times text": "{{ 10 ** 10 * 'a' }}",
    "list times": "{{ [0] * 10 ** 9 }}",
    "list of lists": "{% set x = [[0] * 1000] * 1000 %}{{ [x] * 1000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "squares": doubling("2", "n.x * n.x"),
    "doubled +": doubling("'a'", "n.x + n.x"),
    "doubled ~": doubling("'a'", "n.x ~ n.x"),
    "doubled set": "{% set n = namespace(x='a') %}" + LOOP
    + "{% set t %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = t %}" + END,
    "doubled list": doubling("[1]", "[n.x, n.x]"),
    "doubled tuple": doubling("(1,)", "(n.x, n.x)"),
    "doubled dict": doubling("1", "{'a': n.x, 'b': n.x}"),
    "doubled dict()": doubling("1", "dict(a=n.x, b=n.x)"),
    "doubled items": doubling("{}", "{'a': n.x.items(), 'b': n.x.items()}"),
    "namespaces": NESTED + "{{ n.x }}",
    "namespaces, filter": NESTED + "{{ n.x | string }}",
    "namespaces, format": NESTED + "{{ '%s' | format(n.x) }}",
    "namespaces, join": NESTED + "{{ [1] | map('default', n.x) | join(n.x) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 10, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "brace width": "{{ '{:>10000000000}'.format(1) }}",
    "brace in brace": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "many fields": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 10) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "json separators": "{{ ([1] * 9999) | tojson(separators=('a' * 99999, ':')) }}",
    "join filter": "{{ range(100000) | join('a' * 100000) }}",
    "join": "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "sum of lists": "{{ ([[1] * 100] * 100) | sum(start=[]) }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "strftime": "{{ strftime_now('%1000000000d') }}",
    "much shown": "{% for i in range(1000) %}{{ 'a' * 100000 }}{% endfor %}",
    "much set": "{% set x %}" + LOOP + "{{ 'a' * 1000 }}" + END + "{% endset %}",
    "nested brackets": "{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}",
    "nested blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "many parts": "{{ a }}" * 9000,
    "long template": "a" * 10**7,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("template", GREEDY.values(), ids=GREEDY)
def test_greedy_templates_are_stopped(template, monkeypatch):
    """Each ends in one line, ahead of the watchdog, having taken little memory on the way."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)
    tracemalloc.start()
    try:
        with pytest.raises(SparseKVError) as error:
            render(template, [USER])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert peak < 64 << 20


def test_time_limit_without_tracing():
    with pytest.raises(SparseKVError, match="stopped: it takes"):
        render(LOOP * 3 + "{% set t = i | string | upper | length %}" + END * 3, [USER])


# the template of models that have none


def test_chatml_is_a_plain_template():
    given = {"messages": TURNS, "add_generation_prompt": True}
    assert render(CHATML, TURNS) == plain_environment().from_string(CHATML).render(**given)
