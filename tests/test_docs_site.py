"""The documentation's site has every page, and the check of its HTML finds what it is for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.build_docs import faults

ROOT = Path(__file__).parents[1]


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)


def test_the_navigation_has_every_page_once():
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(pages_of(project["nav"])) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_overview_has_every_page():
    overview = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in overview]
    assert missing == ["index.md"]


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js, which is elsewhere"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "loads //fonts.example/css, which is elsewhere"),
        ('<img src="gone.png">', "names gone.png, which is not there"),
        ('<a href="other.html">', "names other.html, which is not there"),
        ('<a href="#nowhere">', "names #nowhere, a place that is not there"),
        ('<h2 id="here"></h2><a href="#here"><a href="https://example.org/"><a href="/page.html#here">', None),
    ],
)
def test_the_check_of_the_site(html: str, fault: str | None, tmp_path: Path):
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    assert list(faults(tmp_path)) == ([] if fault is None else [f"page.html {fault}"])
