"""Which tests show what each route and each field does, read off their `covers` decorators.

What a body accepts without effect, and what is refused by name, has none: test_api.py tests all of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Claim:
    """`@covers(subject, *fields)`: a route, or fields of a section of api_surface.py."""

    file: str
    """Below tests/serving."""
    test: str
    subject: str
    fields: tuple[str, ...]
    node: ast.stmt = field(repr=False, compare=False)
    tops: dict[str, ast.stmt] = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """The test without its claims, and what it names at its file's top."""
        own = ast.unparse(self.node)
        words = set(re.findall(r"\w+", own))
        return "\n".join([own, *(ast.unparse(node) for name, node in self.tops.items() if name in words)])


@cache
def claims() -> list[Claim]:
    """Of every test of the server."""
    return [claim for path in sorted(HERE.rglob("test_*.py")) for claim in _claims(path)]


def _claims(path: Path) -> Iterator[Claim]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tops = dict(_named(tree))
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            markers = [one for one in node.decorator_list if _is_claim(one)]
            node.decorator_list = [one for one in node.decorator_list if one not in markers]
            for marker in markers:
                subject, *fields = (ast.literal_eval(argument) for argument in marker.args)
                yield Claim(str(path.relative_to(HERE)), node.name, subject, tuple(fields), node, tops)


def _is_claim(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "covers"


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions and constants at a file's top."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.Assign(targets=targets):
                yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
