from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  what the hook names below

CHECKED = ("engine.device", "models", "pallas_kernels", "quantization", "sharding", "weights")
install_import_hook([f"jaxllm.{name}" for name in CHECKED], "tests.typecheck.checked")  # the shapes in signatures hold

from jaxllm import compat  # noqa: E402
from tests.quick_compile import quick_compile  # noqa: E402

gc.set_threshold(
    50_000, 50, 1000
)  # tracing makes many objects that live; looking through them again and again takes time

hypothesis.settings.register_profile("jaxllm", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxllm")


@pytest.fixture(scope="session", autouse=True)
def own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines built in this run share compiled steps, over its processes, and not with what an earlier run left."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compile-cache"
    enable = compat.enable_compile_cache
    enable(directory)

    def redirected(_: Path) -> None:
        enable(directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "enable_compile_cache", redirected)
        patch.setenv("TESTS_COMPILE_CACHE", str(directory))  # of processes that are started
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module that looks at what XLA makes says `OPTIMIZED = True`."""
    with nullcontext() if getattr(request.module, "OPTIMIZED", False) else quick_compile():
        yield
