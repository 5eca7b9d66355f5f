"""Closes the objects of a JSON schema: no key may be added to those that they describe.

llama.cpp does the same. JSON Schema allows further keys, and a small model writes them until its
answer is cut. An object stays open if it has ``additionalProperties``, or if it describes no key.

Several parts may describe one object: ``allOf``, ``$ref`` with other keywords, ``anyOf`` with
``properties``. They become one object with the keys of all parts. Each part, closed alone, would
exclude the keys of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

KEYS, MORE = ("properties", "patternProperties"), "additionalProperties"
GROUPS = ("anyOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")
KEPT = (*DEFINITIONS, "$schema", "$id", "x-guidance")  # keywords that belong to a whole schema
# Keywords that do not limit an object. A schema with these only is no part.
NOTES = ("title", "description", "default", "examples", "example", "deprecated", "readOnly")
MOST_SCHEMAS = 50_000  # most schemas within a schema; a reference counts its target each time


class _NotClosedError(Exception):
    """The schema cannot be closed: it is too large or wrong, or it refers to a missing schema."""


def closed(schema: Any) -> Any:
    """Returns a copy of the schema with closed objects; the schema itself if that fails."""
    try:
        closer = _Closer(schema)
        new = closer.close(schema)
        if closer.named:
            new = {**new, "$defs": {**new.get("$defs", {}), **closer.named}}
        for reference in _references(new):
            _found(new, reference)
    except (_NotClosedError, RecursionError):
        return schema
    return new


class _Closer:
    """Closes the objects of one schema. named: name in $defs -> object that contains itself."""

    def __init__(self, root: Any) -> None:
        self._root, self._n_left = root, MOST_SCHEMAS
        # JSON of each object that is being closed -> the name it needs, or None
        self._begun: dict[str, str | None] = {}
        self.named: dict[str, Any] = {}

    def close(self, node: Any) -> Any:
        """Returns a closed copy of a schema. ``node`` may be any part of the root schema."""
        if not isinstance(node, dict):
            return node
        self._count()
        limits = [key for key in node if key not in (*NOTES, *KEPT)]
        if limits in (["$ref"], ["anyOf"], ["oneOf"]) or not {"allOf", "$ref", *GROUPS} & {*limits}:
            return self._closed_alone(node)
        new = self._once({key: value for key, value in node.items() if key not in KEPT})
        kept = {key: value for key, value in node.items() if key in KEPT}
        return {**new, **kept, **{key: self._each(kept[key]) for key in DEFINITIONS if key in kept}}

    def _closed_alone(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a closed copy of a schema that is described in one place."""
        new = dict(node)
        for key in (*KEYS, *DEFINITIONS):
            if key in node:
                new[key] = self._each(node[key])
        for key in (*GROUPS, "prefixItems"):
            if isinstance(node.get(key), list):
                new[key] = [self.close(each) for each in node[key]]
        for key in ("items", MORE):
            if key in node:
                new[key] = self.close(node[key])
        if MORE not in node and any(isinstance(node.get(key), dict) for key in KEYS):
            new[MORE] = False
            known = new.get("properties", {})
            others = [key for key in _strings(node.get("required")) if key not in known]
            if others and not node.get("patternProperties"):
                new["properties"] = {**known, **dict.fromkeys(others, True)}
        return new

    def _each(self, schemas: Any) -> Any:
        if not isinstance(schemas, dict):
            return schemas
        return {name: self.close(each) for name, each in schemas.items()}

    def _once(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a closed copy of a schema of several parts; within itself, a reference to it."""
        place = json.dumps(node)
        if place in self._begun:
            name = self._begun[place] = self._begun[place] or f"closed-{self._n_left}"
            return {"$ref": f"#/$defs/{name}"}
        self._begun[place] = None
        new = self._together(self._parts(node))
        needed = self._begun.pop(place)
        if needed is None:
            return new
        self.named[needed] = new
        return {"$ref": f"#/$defs/{needed}"}

    def _parts(self, node: Any) -> list[Any]:
        """Returns the parts of a schema as a list: itself, its references and its allOf."""
        self._count()
        if not isinstance(node, dict):
            return [node]
        own = {key: value for key, value in node.items() if key not in ("allOf", "$ref")}
        parts: list[Any] = [own] if own else []
        if "$ref" in node:
            parts += self._parts(_found(self._root, node["$ref"]))
        for each in _list(node.get("allOf", [])):
            parts += self._parts(each)
        return parts

    def _together(self, parts: list[Any]) -> dict[str, Any]:
        """Returns one closed schema, which fits what fits all ``parts``."""
        self._count()
        for i, part in enumerate(parts):
            group = next((key for key in GROUPS if isinstance(part, dict) and key in part), None)
            if group is not None:  # each alternative gets the other parts
                rest = {key: value for key, value in part.items() if key != group}
                common = [*parts[:i], *([rest] if rest else []), *parts[i + 1 :]]
                return {group: [self._alternative(common, each) for each in _list(part[group])]}
        objects = [part for part in parts if isinstance(part, dict)]
        if any(MORE in part for part in objects) or len(objects) < len(parts):
            return {"allOf": [self._closed_alone({MORE: True, **part})
                              if isinstance(part, dict) else part for part in parts]}  # fmt: skip
        merged: dict[str, Any] = {}
        for key in KEYS:
            if any(key in part for part in objects):
                merged[key] = self._merged([part.get(key, {}) for part in objects])
        if items := [part["items"] for part in objects if "items" in part]:
            merged["items"] = _all_of(items)
        required = [key for part in objects for key in _strings(part.get("required"))]
        if required:
            merged["required"] = required
        left = [{k: v for k, v in part.items() if k not in merged} for part in objects]
        others = [self._closed_alone(each) for each in left if each]
        new = self._closed_alone(merged)
        if len(others) > 1:
            return {**new, "allOf": others}
        return {**new, **others[0]} if others else new

    def _alternative(self, others: list[Any], one: Any) -> dict[str, Any]:
        if not others:
            return self.close(one)
        return self._once({"allOf": [*others, one]})

    def _merged(self, groups: Iterable[Any]) -> dict[str, Any]:
        """Returns name -> schema. Schemas with the same name in several groups become one."""
        lists: dict[str, list[Any]] = {}
        for group in groups:
            for name, each in group.items() if isinstance(group, dict) else ():
                lists.setdefault(name, []).append(each)
        return {name: _all_of(each) for name, each in lists.items()}

    def _count(self) -> None:
        self._n_left -= 1
        if self._n_left < 0:
            raise _NotClosedError


def _all_of(schemas: list[Any]) -> Any:
    different = [each for i, each in enumerate(schemas) if each not in schemas[:i]]
    return different[0] if len(different) == 1 else {"allOf": different}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _NotClosedError
    return value


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _references(node: Any) -> Iterable[Any]:
    """Yields the texts of all references within a schema."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = [*node.values()]
    for each in node if isinstance(node, list) else ():
        yield from _references(each)


def _found(root: Any, reference: Any) -> Any:
    """Returns the schema to which a reference such as ``#/$defs/name`` points.

    Raises _NotClosedError if it points to nothing or out of the schema.
    """
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _NotClosedError
    node = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            raise _NotClosedError
    return node
