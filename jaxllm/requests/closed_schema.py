"""JSON schemas without the properties that they allow but do not name.

A model would go on inventing them until it is cut off. What the closed schema allows, the schema allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

_ALONE = {"$ref", "allOf", "anyOf", "oneOf"}
"""What may describe the same value as the schema that has them."""
_SAYS_MORE = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "const", "enum", "not", "if",
    "dependencies", "dependentSchemas", "dependentRequired", "$dynamicRef", "$recursiveRef", "extends",
}  # fmt: skip
"""A schema with one of these says itself which properties may come, or in ways that are not followed here."""

_COUNTS = {"minProperties", "maxProperties"}
"""An object of several parts, one of which counts its properties, stays open."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it names properties and does not say what others may come.

    Parts that describe one value together, such as those of allOf, are closed together: closed each by itself they
    would forbid each other's properties. The schemas of properties inside them stay as they are.

    Worked example: {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]} becomes
    {"properties": {"a": {}, "b": {}}, "allOf": [{"properties": {"b": {}}}], "additionalProperties": false}.
    """
    if not isinstance(schema, dict):
        return schema
    try:
        copy = deepcopy(schema)
        return copy if _Closing(copy).run() else schema
    except (RecursionError, TypeError, AttributeError):
        return schema  # malformed, which llguidance says better, or too deep


class _Closing:
    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._found: dict[int, dict[str, Any]] = {}
        self._parts: set[int] = set()
        """Of the schemas found those that describe a value together with others, or a piece of such a value."""

    def run(self) -> bool:
        """Close what can be; False where a reference leads to nobody knows which parts."""
        seen, todo = set(), [(self._root, False)]
        while todo:
            node, part = todo.pop()
            if not isinstance(node, dict) or (id(node), part) in seen:
                continue
            seen.add((id(node), part))
            self._found[id(node)] = node
            if part:
                self._parts.add(id(node))
            members = self._members(node)
            if members is None:
                if part or not self._is_alone(node):
                    return False
                members = []
            together = part or not self._is_alone(node)
            todo += [(member, together) for member in members]
            names: dict[str, bool] | None = {} if self._is_alone(node) else self._declared(members)
            todo += [(v, part or names is None or name in names) for name, v in node.get("properties", {}).items()]
            todo += [(value, together) for value in _other_values(node)]
        closings = [(node, self._closing(node)) for key, node in self._found.items() if key not in self._parts]
        for node, names in closings:
            if names is not None:
                own = node.get("properties", {})
                node["properties"] = own | {name: {} for name in names if name not in own}
                node["additionalProperties"] = False
        return True

    def _closing(self, node: dict[str, Any]) -> dict[str, bool] | None:
        """The only properties that the value may have; None to leave it open, or to its alternatives."""
        if "properties" not in node and self._is_alone(node):
            return None
        names = self._declared([node])
        if names is None or not (any(names.values()) or "properties" in node):
            return None
        counted = [part for part in self._described([node]) if not part.keys().isdisjoint(_COUNTS)]
        return names if not counted or (counted == [node] and node.get("minProperties", 0) <= len(names)) else None

    def _declared(self, nodes: list[Any]) -> dict[str, bool] | None:
        """What the schemas require or declare, which is true; None where one of them says more about properties."""
        names: dict[str, bool] = {}
        for node in self._described(nodes):
            if self._members(node) is None or not node.keys().isdisjoint(_SAYS_MORE):
                return None
            names |= dict.fromkeys(node.get("properties", {}), True)
            names = dict.fromkeys(node.get("required", []), False) | names
        return names

    def _described(self, nodes: list[Any]) -> Iterator[dict[str, Any]]:
        """The schemas, and those that describe the same value with them."""
        seen, todo = set(), list(nodes)
        while todo:
            node = todo.pop(0)
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                yield node
                todo += self._members(node) or []

    def _members(self, node: dict[str, Any]) -> list[Any] | None:
        """The schemas that describe the same value as `node`; None where a reference leads outside."""
        members = [member for key in ("allOf", "anyOf", "oneOf") for member in node.get(key, [])]
        if "$ref" not in node:
            return members
        target = self._target(node["$ref"])
        return None if target is None else [target, *members]

    def _is_alone(self, node: dict[str, Any]) -> bool:
        """Each of the node's members describes the value with nobody else's help, if it is the one."""
        keys = _ALONE & node.keys()
        if not keys:
            return True
        if len(keys) > 1 or not node.keys().isdisjoint({"properties", "required", *_COUNTS, *_SAYS_MORE}):
            return False
        if "oneOf" in keys:
            return self._are_told_apart(node["oneOf"])
        return "allOf" not in keys or len(node["allOf"]) == 1

    def _are_told_apart(self, members: list[Any]) -> bool:
        """By a property that all require, with other values in each; else closing makes one of what was several."""
        objects = [m for m in map(self._resolved, members) if not (isinstance(m, dict) and m.get("type") == "null")]
        if not all(isinstance(m, dict) and "required" in m and "properties" in m for m in objects):
            return len(objects) == 1
        for name in objects[0]["required"] if objects else ():
            values = [value for m in objects for value in _values(m, name)]
            if all(name in m["required"] and _values(m, name) for m in objects) and len(set(values)) == len(values):
                return True
        return len(objects) == 1

    def _resolved(self, node: Any) -> Any:
        return self._target(node["$ref"]) if isinstance(node, dict) and node.keys() == {"$ref"} else node

    def _target(self, reference: str) -> Any:
        """What a reference to this document means; None for another."""
        if not reference.startswith("#"):
            return None
        node: Any = self._root
        for step in filter(None, reference[1:].split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            node = node[int(step)] if isinstance(node, list) and step.isdigit() else node
            node = node.get(step) if isinstance(node, dict) else node
        return node if isinstance(node, (dict, bool)) else None


def _other_values(node: dict[str, Any]) -> Iterator[Any]:
    """The schemas of values inside the value that no property names."""
    for key in ("items", "prefixItems", "additionalItems", "additionalProperties", "contains"):
        value = node.get(key)
        yield from value if isinstance(value, list) else [value]
    yield from node.get("patternProperties", {}).values()


def _values(schema: dict[str, Any], name: str) -> list[str]:
    """Strings that a property may be, where it may be nothing else."""
    found = schema["properties"].get(name)
    if not isinstance(found, dict):
        return []
    values = [found["const"]] if "const" in found else found.get("enum", [])
    return values if all(isinstance(value, str) for value in values) else []
