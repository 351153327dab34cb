"""One meaning a word: in the server with its conversations, and in all else, no two types share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxllm

ROOT = Path(jaxllm.__file__).parent

SERVER = ("serving", "chat")


@pytest.mark.parametrize("in_server", [True, False], ids=["the server", "all else"])
def test_each_type_has_a_name_of_its_own(in_server: bool) -> None:
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if (place.parts[0] in SERVER) == in_server:
            for name in type_names(path.read_text(encoding="utf-8")):
                places[name].append(str(place))
    assert len(places) > 50
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_classes_and_aliases_are_types_and_other_values_are_not() -> None:
    source = """
class Step: ...
Kind = Literal["a"]
Pair = tuple[str, str]
Size: TypeAlias = int
LIMIT = 3
T = TypeVar("T")
names = {"a": Kind}
Kept = Step()
def make():
    class Inner: ...
"""
    assert [*type_names(source)] == ["Step", "Kind", "Pair", "Size", "Inner"]


def type_names(source: str) -> Iterator[str]:
    """Of all classes, and of the type aliases at the top: in CapWords, and of something that is no call."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if node in tree.body:
                if name[0].isupper() and not name.isupper() and not isinstance(value, ast.Call):
                    yield name
