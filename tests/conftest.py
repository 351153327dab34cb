from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  what the hook names below

CHECKED = ("engine.device", "models", "pallas_kernels", "quantization", "sharding", "weights")
install_import_hook([f"jaxllm.{name}" for name in CHECKED], "tests.typecheck.checked")  # the shapes in signatures hold

from jaxllm import compat  # noqa: E402

hypothesis.settings.register_profile("jaxllm", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxllm")


@pytest.fixture(scope="session", autouse=True)
def own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines built in this process share compiled steps with each other, and not with what an earlier run left."""
    directory = tmp_path_factory.mktemp("compile-cache")
    enable = compat.enable_compile_cache

    def redirected(_: Path) -> None:
        enable(directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "enable_compile_cache", redirected)
        yield
