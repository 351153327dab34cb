"""What is left to `make test-all` is there, and so is what is kept of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.kept import KEPT
from tests.support.sampled import EVERY
from tests.support.thorough import ELSEWHERE

TESTS = Path(__file__).parent
WHOLE_SUITE = 5_000
"""Tests: no folder has so many."""
LISTED = [
    (file, test.partition("[")[0])
    for table in (EVERY, KEPT, ELSEWHERE)
    for file, tests in table.items()
    for test in tests  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(("file", "test"), LISTED)
def test_each_is_a_test_of_its_file(file: str, test: str) -> None:
    *classes, function = test.split("::")
    text = (TESTS / file).read_text()
    assert re.search(rf"^ *def {function}\(", text, re.MULTILINE)
    assert all(f"class {name}" in text for name in classes)


def test_what_is_kept_is_run(request: pytest.FixtureRequest) -> None:
    run = {item.nodeid.removeprefix("tests/") for item in request.session.items}
    if len(run) < WHOLE_SUITE:
        pytest.skip("some files alone were asked for")
    kept = [f"{file}::{test}[{case}]" for file, tests in here(KEPT) for test, cases in tests.items() for case in cases]
    assert [name for name in kept if name not in run] == []
    tests = {name.partition("[")[0] for name in run}
    assert [name for file, each in here(EVERY) for test in each if (name := f"{file}::{test}") not in tests] == []


def here(table: dict[str, Any]) -> list[tuple[str, Any]]:
    """By file, without those of whole programs and for hardware."""
    marked = re.compile(r"pytestmark = pytest\.mark\.(programs|hardware)")
    return [(file, tests) for file, tests in table.items() if not marked.search((TESTS / file).read_text())]
