"""Which tests show what each route and each field does, read off their `covers` markers.

What a body accepts without effect, and what is refused by name, has none: test_api.py tests all of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Claim:
    """`@pytest.mark.covers(subject, *fields)`: a route, or fields of a section of api_surface.py."""

    file: str
    """Below tests/serving."""
    test: str
    subject: str
    fields: tuple[str, ...]
    text: str
    """The test without its claims, and what it names at its file's top."""


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
            own = ast.unparse(node)
            words = set(re.findall(r"\w+", own))
            text = "\n".join([own, *(text for name, text in tops.items() if name in words)])
            for marker in markers:
                subject, *fields = (ast.literal_eval(argument) for argument in marker.args)
                yield Claim(str(path.relative_to(HERE)), node.name, subject, tuple(fields), text)


def _is_claim(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers"


def _named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions and constants at a file's top, as text."""
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else [node]:
            if isinstance(target, ast.Name | ast.FunctionDef):
                yield getattr(target, "id", None) or target.name, ast.unparse(node)  # type: ignore[union-attr]
