from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.quick_compile import quick_jit


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly_when_called() -> Iterator[None]:
    """Kernels run once in each of their many shapes."""
    with quick_jit():
        yield
