"""JSON schemas with closed objects: which keys an answer may have."""

import json
from typing import Any

import llguidance
import pytest

from sparsekv_cli.sampling.grammar import read_grammar
from sparsekv_cli.sampling.schema import closed

NUMBER = {"type": "integer"}


def with_key(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: NUMBER}, **others}


A, B, C, D = (with_key(name) for name in "abcd")
NODE = {"type": "object", "properties": {"v": NUMBER, "next": {"$ref": "#/$defs/N", **B}}}
ONE_OF = {"x-guidance": {"coerce_one_of": True}}

# A schema, texts that it takes, and texts that it does not take.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (A, ["{}", '{"a":1}'], ['{"a":1,"z":1}', '{"z":1}']),
    "without a type": ({"properties": {"a": NUMBER}}, ['{"a":1}', "3"], ['{"z":1}']),
    "no keys described": ({"type": "object"}, ['{"z":1}'], []),
    "no keys at all": ({"type": "object", "properties": {}}, ["{}"], ['{"z":1}']),
    "open by its word": (with_key("a", additionalProperties=True), ['{"a":1,"z":1}'], []),
    "open to numbers": (
        with_key("a", additionalProperties=NUMBER), ['{"a":1,"z":1}'], ['{"z":"x"}']
    ),
    "required only by name": (
        with_key("a", required=["q"]), ['{"q":[]}', '{"a":1,"q":{}}'], ['{"q":1,"z":1}']
    ),
    "patterns": (
        {"type": "object", "patternProperties": {"^x": A}},
        ['{"x1":{"a":1}}'], ['{"y":1}', '{"x1":{"z":1}}'],
    ),
    "nested": (
        {"type": "array", "items": {"type": "object", "properties": {"o": A, "f": {}}}},
        ['[{"o":{"a":1},"f":{"z":1}}]'], ['[{"z":1}]', '[{"o":{"z":1}}]'],
    ),
    "null or an object": (
        {**A, "type": ["object", "null"]}, ["null", '{"a":1}'], ['{"z":1}']
    ),
    "references": (
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}, "n": {"$ref": "#"}},
         "$defs": {"A": A}},
        ['{"n":{"n":{"x":{"a":1}}}}'], ['{"x":{"z":1}}', '{"n":{"z":1}}'],
    ),
    "definitions": (
        {"$ref": "#/definitions/A", "definitions": {"A": A}}, ['{"a":1}'], ['{"z":1}']
    ),
    "a reference and keys": (
        {"$ref": "#/$defs/A", **B, "$defs": {"A": A}}, ['{"b":1,"a":1}', '{"a":1}'], ['{"z":1}']
    ),
    "a reference to itself and keys": (
        {"$ref": "#/$defs/N", "$defs": {"N": NODE}},
        ['{"v":1}', '{"next":{"b":1,"v":1,"next":{"b":2}}}'],
        ['{"b":1}', '{"next":{"z":1}}', '{"next":{"next":{"z":2}}}'],
    ),
    "allOf": ({"allOf": [A, B]}, ['{"a":1,"b":1}', '{"b":1}'], ['{"z":1}', '{"a":1,"z":1}']),
    "allOf and keys": ({"allOf": [A], **B}, ['{"b":1,"a":1}'], ['{"a":1,"z":1}']),
    "allOf of references": (
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
        ['{"a":1,"b":1}'], ['{"z":1}'],
    ),
    "allOf that requires": (
        {"allOf": [A, {**B, "required": ["b"]}]}, ['{"a":1,"b":1}', '{"b":1}'], ['{"a":1}']
    ),
    "allOf with an open part": (
        {"allOf": [{**A, "additionalProperties": True}, B]}, ['{"a":1,"b":1,"z":1}'], []
    ),
    "one key in two parts": (
        {"allOf": [{"properties": {"o": A}}, {"properties": {"o": B}}], "type": "object"},
        ['{"o":{"a":1,"b":1}}'], ['{"o":{"z":1}}', '{"z":1}'],
    ),
    "one reference in allOf": (
        {"type": "object", "properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "title": "t"}},
         "$defs": {"A": A}},
        ['{"x":{"a":1}}'], ['{"x":{"z":1}}'],
    ),
    "anyOf": ({"anyOf": [A, B, {"type": "null"}]}, ['{"b":1}', "null"], ['{"a":1,"b":1}']),
    "anyOf and keys": (
        {**A, "anyOf": [B, C]}, ['{"a":1,"b":1}', '{"c":1}'], ['{"b":1,"c":1}', '{"z":1}']
    ),
    "two of anyOf": (
        {"allOf": [{"anyOf": [A, B]}, {"anyOf": [C, D]}]},
        ['{"a":1,"d":1}', '{"b":1,"c":1}'], ['{"a":1,"b":1}', '{"z":1}'],
    ),
    "anyOf that requires": (
        {"type": "object", "properties": {"a": NUMBER, "b": NUMBER},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"z":1}'],
    ),
    "oneOf by a constant": (
        {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"], "oneOf": [
            {"properties": {"k": {"const": "a"}, "p": NUMBER}},
            {"properties": {"k": {"const": "b"}, "q": NUMBER}},
        ], **ONE_OF},
        ['{"k":"a","p":1}', '{"k":"b","q":1}'], ['{"k":"b","p":1}', '{"k":"a","z":1}'],
    ),
}  # fmt: skip


def takes(definition: str, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, definition, log_level=0)
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_the_described_keys(name):
    schema, good, bad = CASES[name]
    definition = read_grammar("json-schema", json.dumps(schema)).definition
    assert [text for text in good if not takes(definition, text)] == []
    assert [text for text in bad if takes(definition, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/D0", "properties": {"z": {}}, "$defs": {
            f"D{i}": {"allOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(40)
        } | {"D40": A}},
        {"$ref": "https://example.org/a.json", "properties": {}},
        {"allOf": 3}, {"anyOf": {}, "properties": {}}, {"$ref": [], "properties": {}},
    ],
    ids=["of itself", "doubled 40 times", "elsewhere", "a number", "an object", "a list"],
)  # fmt: skip
def test_a_schema_that_stays_as_it_is(schema):
    assert closed(schema) is schema


def test_a_deep_schema_stays_as_it_is():
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    assert closed(schema) is schema
