"""JSON schemas closed to properties that they do not name and to values without an end, and counted where possible."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from jaxllm.requests.schema import UnenforceableError, as_list, differ, followed_members, is_lenient, pointed

_MEMBERS = ("allOf", "anyOf", "oneOf")
_ALONE = {"$ref", *_MEMBERS}
"""What may describe the same value as the schema that has them."""
_SAYS_MORE = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "const", "enum", "not", "if",
    "dependencies", "dependentSchemas", "dependentRequired", "$dynamicRef", "$recursiveRef", "extends",
}  # fmt: skip
"""A schema with one of these says itself which properties may come, or in ways that are not followed here."""

_COUNTS = {"minProperties", "maxProperties"}
"""An object of several parts, one of which counts its properties, stays open."""
_TYPES = {"null", "boolean", "number", "string", "array", "object"}
_OTHER_VALUES = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains")


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it names properties and does not say what others may come.

    Raises UnenforceableError: no finite value fits, or `minProperties` asks for properties whose names the schema
    leaves open, which a grammar cannot keep from being the same. With `"x-guidance": {"lenient": true}` it is left out.

    Parts that describe one value together, such as those of allOf, are closed together: closed each by itself they
    would forbid each other's properties. The schemas of properties inside them stay as they are.

    Worked example: {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]} becomes
    {"properties": {"a": {}, "b": {}}, "allOf": [{"properties": {"b": {}}}], "additionalProperties": false}.
    """
    try:
        copy = deepcopy(schema)
        _Closing(copy).run()
        return copy
    except (RecursionError, TypeError, AttributeError):
        return schema  # malformed, which llguidance says better, or too deep


class _Closing:
    def __init__(self, root: dict[str, Any]):
        self._root, self._lenient = root, is_lenient(root)

    def run(self) -> None:
        """Close what can be, which is nothing where a reference leads to nobody knows which parts."""
        todo, known = [(self._root, False)], True
        found: dict[tuple[int, bool], dict[str, Any]] = {}  # True: a part describes a value together with others
        while todo:
            node, part = todo.pop()
            if not isinstance(node, dict) or (id(node), part) in found:
                continue
            found[id(node), part] = node
            members, together = self._members(node), part or not self._is_alone(node)
            if members is None:
                members, known = [], known and not together
            todo += [(member, together) for member in members]
            names: dict[str, bool] | None = {} if self._is_alone(node) else self._declared(members)
            todo += [(v, part or names is None or name in names) for name, v in node.get("properties", {}).items()]
            others = (value for key in _OTHER_VALUES for value in as_list(node.get(key)))
            todo += [(value, together) for value in (*others, *node.get("patternProperties", {}).values())]
        wholes = [node for (key, _), node in found.items() if (key, True) not in found]
        for node, names in [(node, self._closing(node) if known else None) for node in wholes]:
            if names is not None:
                own = node.get("properties", {})
                node["properties"] = own | {name: {} for name in names if name not in own}
                node["additionalProperties"] = False
        for node in wholes:
            self._check_count(node)
        self._forbid_endless({key: node for (key, _), node in found.items()})

    def _forbid_endless(self, nodes: dict[int, dict[str, Any]]) -> None:
        """Allow only types that there are finite values of, a least fixed point: no object that requires itself."""
        finite: dict[int, set[str]] = {key: set() for key in nodes}
        order, before = list(nodes), -1
        while before != (before := sum(map(len, finite.values()))):
            order.reverse()  # in one of the directions a chain of references is followed at once
            for key in order:
                finite[key] = self._finite_types(nodes[key], finite)
        if not finite.get(id(self._root), _TYPES):
            raise UnenforceableError("no finite value satisfies the schema: what it requires leads to itself again")
        for key, node in nodes.items():
            types = as_list(node.get("type", sorted(_TYPES)))
            left = [name for name in types if name in finite[key] or (name == "integer" and "number" in finite[key])]
            if not left:
                node.clear()
                node["enum"] = []
            elif len(left) < len(types) and not node.keys() & {"const", "enum", *_ALONE}:
                node["type"] = left

    def _finite_types(self, node: dict[str, Any], finite: dict[int, set[str]]) -> set[str]:
        def of(schema: Any) -> set[str]:
            return finite.get(id(schema), _TYPES) if schema is not False else set()

        found = {"number" if name == "integer" else name for name in as_list(node.get("type", [*_TYPES]))}
        found.intersection_update(*map(of, self._members(node, ("allOf",)) or []))
        for key in {"anyOf", "oneOf"} & node.keys():
            found &= set().union(*map(of, node[key]))
        parts = [] if node.keys() <= {"$ref", "$defs"} else list(self._described([node], ("allOf",)))
        least = max((part.get("minItems", 0) for part in parts), default=0)
        for part in parts:
            own, others = part.get("properties", {}), part.get("additionalProperties", True)
            others = True if "patternProperties" in part else others
            if not all(of(own.get(name, others)) for other in parts for name in other.get("required", [])):
                found.discard("object")
            items, rest = part.get("prefixItems", []), part.get("items", True)
            if not all(map(of, [*items, *[rest] * (least > len(items))][:least])):
                found.discard("array")
        return found

    def _check_count(self, node: dict[str, Any]) -> None:
        """Of the properties that must come at most one has a free name: two could have the same."""
        every, parts = [node], [node]
        if not self._is_alone(node):
            every, parts = list(self._described([node])), list(self._described([node], ("allOf",)))
        if any(part.get("additionalProperties") is False and not part.get("patternProperties") for part in parts):
            return
        own = {name for part in parts for name in part.get("required", [])}
        for part in every:
            if "object" in as_list(part.get("type", "object")) and part.get("minProperties", 0) > len(own) + 1:
                if not self._lenient:
                    problem = f"minProperties is {part['minProperties']} where {len(own)} properties are required"
                    raise UnenforceableError(f"{problem}; at most one more may have a name that the schema leaves open")
                del part["minProperties"]

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

    def _described(self, nodes: list[Any], by: tuple[str, ...] = _MEMBERS) -> Iterator[dict[str, Any]]:
        """The schemas, and those that describe the same value with them."""
        seen, todo = set(), list(nodes)
        while todo:
            node = todo.pop(0)
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                yield node
                todo += self._members(node, by) or []

    def _members(self, node: dict[str, Any], by: tuple[str, ...] = _MEMBERS) -> list[Any] | None:
        """The schemas that describe the same value as `node`; None where a reference leads outside."""
        members = [member for key in by for member in node.get(key, [])]
        if "$ref" not in node:
            return members
        target = pointed(node["$ref"], self._root)
        return [target, *members] if isinstance(target, (dict, bool)) else None

    def _is_alone(self, node: dict[str, Any]) -> bool:
        """Each of the node's members describes the value with nobody else's help, if it is the one."""
        keys = _ALONE & node.keys()
        if not keys:
            return True
        if len(keys) > 1 or not node.keys().isdisjoint({"properties", "required", *_COUNTS, *_SAYS_MORE}):
            return False
        if "oneOf" in keys:
            found = followed_members(node["oneOf"], self._root)
            objects = [m for m in found if not (isinstance(m, dict) and m.get("type") == "null")]
            return len(objects) == 1 or (bool(objects) and differ(objects))
        return "allOf" not in keys or len(node["allOf"]) == 1
