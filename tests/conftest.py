from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import jax
import pytest

from tests.support import thorough, typecheck

# Images of containers set it, and each of the hundreds of processes that tests start would compile every module anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["JAXLLM_CPU_ISA"] = "all"  # a first start compiles the kernels of one instruction set; here all are tested

CORE = (
    "batch", "device", "device_state", "executables", "handle", "keys", "packing", "runner", "sampler", "saved",
    "sizes", "slots", "step",
)  # fmt: skip
FEATURES = ("adapters", "chain", "drafts", "grammar", "inside", "logits", "readout", "states")
"""What works with arrays; what schedules, and what keeps pages, is tested with stand-ins that are no such types."""
CHECKED = (
    *(f"engine.core.{name}" for name in CORE),
    *(f"engine.features.{name}" for name in FEATURES),
    *("models", "pallas_kernels", "quantization", "sharding", "weights"),
)
typecheck.check([f"jaxllm.{name}" for name in CHECKED])  # before any of them is imported

from jaxllm import compat  # noqa: E402
from jaxllm.config import CACHE_DIR  # noqa: E402
from tests.support.quick_compile import quick_compile  # noqa: E402
from tests.support.remembered_steps import remembering_steps  # noqa: E402

gc.set_threshold(
    50_000, 50, 1000
)  # tracing makes many objects that live; looking through them again and again takes time

hypothesis.settings.register_profile("jaxllm", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxllm")


KEPT = CACHE_DIR / "tests"
COMPILED = KEPT / "compiled"
"""What XLA made of all that tests call, which later runs need not make again; half of a run's time."""
STEPS = KEPT / "steps"
"""The same of engines' steps, whole: neither other workers nor later runs of the same sources trace them again."""
MOST_KEPT = 2**32
"""Bytes."""


def pytest_configure(config: pytest.Config) -> None:
    """Forget what has been compiled once it has become too much; before there are workers, who may all use it."""
    first = not hasattr(config, "workerinput")
    if first and sum(path.stat().st_size for path in KEPT.rglob("*")) > MOST_KEPT:
        shutil.rmtree(KEPT)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before those that are marked are left out."""
    thorough.mark(items)
    items.sort(key=lambda item: not item.nodeid.startswith(BEGUN_FIRST))


BEGUN_FIRST = ("tests/test_stages.py", "tests/test_data_parallel.py")
"""The files with the longest single programs: at the end nothing would be left to do beside them."""


KEPT_BY_CHILDREN = {
    "TESTS_COMPILE_CACHE": str(COMPILED),  # for an engine's `compile_cache_dir`
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""The environment of processes that tests start."""


@pytest.fixture(scope="session", autouse=True)
def own_compile_cache() -> Iterator[None]:
    """Every engine, in whichever process, shares compiled steps with the tests' others, and with nobody else's."""
    enable = compat.enable_compile_cache
    enable(COMPILED)

    def redirected(_: Path) -> None:
        enable(COMPILED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "enable_compile_cache", redirected)
        patch.setattr(compat, "compile_cache", lambda: None)  # whole executables are of the sources of a moment
        for name, value in KEPT_BY_CHILDREN.items():
            patch.setenv(name, value)
        yield


MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000
"""Linux gives a process 65,530; where they are used up, XLA dies of the next executable that it loads."""


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """What JAX keeps of every function that was ever called takes about seven mappings each: drop it in time."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        typecheck.forget_functions()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module that looks at what XLA makes says `OPTIMIZED = True`; one whose tests change what steps are made of, or
    look at how they are made, says `REMEMBERED = False`.
    """
    optimized = getattr(request.module, "OPTIMIZED", False)
    remembered = getattr(request.module, "REMEMBERED", True)
    with (
        nullcontext() if optimized else quick_compile(),
        remembering_steps(STEPS, "all" if optimized else "few") if remembered else nullcontext(),
    ):
        yield
