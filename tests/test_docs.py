"""The documentation says what the code says. `python -m tests.test_docs` writes the tables of settings anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from jaxllm.config import EngineConfig, ServeConfig

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "docs/configuration.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLES = re.compile(r"(?<=<!-- settings -->\n).*(?=<!-- end of settings -->)", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def settings_tables() -> str:
    server = {name: field for name, field in ServeConfig.model_fields.items() if name not in EngineConfig.model_fields}
    parts = [("Engine", EngineConfig.model_fields), ("Server", server)]
    return "\n".join(f"## {title}\n\n{table(fields)}" for title, fields in parts)


def table(fields: dict[str, FieldInfo]) -> str:
    rows = [(f"`{name}`", f"`{default(field)}`", meaning(field)) for name, field in fields.items()]
    head = [("Setting", "Default", "Meaning"), ("---", "---", "---")]
    return "".join(f"| {' | '.join(row)} |\n" for row in [*head, *rows])


def default(field: FieldInfo) -> str:
    if isinstance(field.default, Path):
        return str(field.default).replace(str(Path.home()), "~")
    if field.default is None or isinstance(field.default, bool):
        return "null" if field.default is None else str(field.default).lower()
    return str(field.default)


def meaning(field: FieldInfo) -> str:
    accepted = choices(field.annotation)
    text = " ".join((field.description or "").split())
    return text + (f" One of {', '.join(f'`{choice}`' for choice in accepted)}." if accepted else "")


def choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if "Literal" in str(get_origin(annotation)) else ()


def test_the_tables_of_settings_are_those_of_the_code():
    found = TABLES.search(CONFIGURATION.read_text(encoding="utf-8"))
    assert found and found.group() == f"\n{settings_tables()}\n", "out of date; run: python -m tests.test_docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    missing = [
        link for link in LINK.findall(document.read_text(encoding="utf-8")) if not (document.parent / link).exists()
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path):
    """`engine/core.py` is jaxllm/engine/core.py, `configs/smollm2.yaml` is that."""
    named = re.findall(r"`((?:[\w-]+/)+(?:[\w.-]+\.(?:py|yaml|md|ipynb))?)`", document.read_text(encoding="utf-8"))
    assert not [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "jaxllm"))]


@pytest.mark.parametrize("name", ["models", "pallas_kernels", "sharding", "serving"])
def test_the_map_at_the_root_leads_into_the_package(name: str):
    link = ROOT / name
    assert link.is_symlink() and link.readlink() == Path("jaxllm") / name and link.is_dir()


if __name__ == "__main__":
    text = CONFIGURATION.read_text(encoding="utf-8")
    CONFIGURATION.write_text(TABLES.sub(lambda _: f"\n{settings_tables()}\n", text), encoding="utf-8")
