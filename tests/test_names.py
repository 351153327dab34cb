"""One meaning a word: no two modules define types of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import jaxllm

PACKAGE = Path(jaxllm.__file__).parent
LEFT_OUT = ("serving",)


def type_names(module: ast.Module) -> list[str]:
    """Classes, and aliases such as `Pages = tuple[Array, ...]`, which are written as classes are."""
    found = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        found += [name for name in names if name[0].isupper() and not name.isupper()]
    return found


def test_a_name_stands_for_one_type() -> None:
    homes = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in LEFT_OUT:
            for name in type_names(ast.parse(path.read_text(encoding="utf-8"))):
                homes[name].append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
    assert homes["Kernels"] == ["pallas_kernels/kernels.py"] and homes["Pages"] == ["pallas_kernels/pages.py"]
