"""What is left to `make test-slow` is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.covered_elsewhere import COVERED

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("test", COVERED)
def test_each_is_a_test_of_its_file(test: str) -> None:
    file, _, name = test.partition("::")
    function, _, case = name.partition("[")
    text = (ROOT / file).read_text()
    assert re.search(rf"^def {function}\(", text, re.MULTILINE)
    assert not case or "@pytest.mark.parametrize" in text or "params=" in text
