"""What is private to JAX, or differs between its releases, and that one file of ours is the only one to know it."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import jax
import pytest

from jaxllm import compat

ROOT = Path(__file__).parents[1]

PRIVATE = [
    ("jax._src.hardware_utils", "has_visible_nvidia_gpu"),
    ("jax._src.xla_bridge", "backends_are_initialized"),
    ("jaxlib.xla_client", "register_custom_call_handler"),
    ("jaxlib.xla_client", "_xla.register_custom_call_target"),
    ("jax._src.compiler", "get_compile_options"),
    ("jax._src.config", "persistent_cache_min_compile_time_secs"),
    ("jax.experimental.serialize_executable", "serialize"),
    ("jax.experimental.serialize_executable", "deserialize_and_load"),
]

USERS = {"jaxllm/compat.py", "tests/support/quick_compile.py", "tests/test_compat.py"}
"""Files that may name something private."""

_NAMES_PRIVATE = re.compile(r"\bjax\._src\b|^\s*(?:from|import) jaxlib\b(?! *$)", re.MULTILINE)


@pytest.mark.parametrize(("module", "name"), PRIVATE, ids=lambda value: value)
def test_a_private_name_is_where_it_was(module: str, name: str) -> None:
    assert callable(reduce(getattr, name.split("."), importlib.import_module(module)))


def test_nobody_else_names_anything_private() -> None:
    sources = [
        path for folder in ("jaxllm", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    users = {str(path.relative_to(ROOT)) for path in sources if _NAMES_PRIVATE.search(path.read_text(encoding="utf-8"))}
    assert users <= USERS


def test_what_comes_out_of_xlas_cache_is_not_saved(tmp_path: Path) -> None:
    """Saved once more it lacks its code, and fails when it is called."""
    program = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from jaxllm import compat
compat.enable_compile_cache(Path(sys.argv[1]))
lowered = jax.jit(lambda x, i: jnp.sin(x[i]).sum()).lower(jnp.ones((8, 8)), jnp.array([1, 2]))
if sys.argv[2] == "kept":
    compat.compile_lowered(lowered)
else:
    print(compat.compile_to_save(lowered)[1], end=" ")
"""
    said = [
        subprocess.run([sys.executable, "-c", program, str(tmp_path), how], check=True, capture_output=True, text=True)
        for how in ("to save", "to save", "kept", "to save")
    ]
    assert "".join(one.stdout for one in said) == "True True False "


def test_a_compiler_option_that_xla_does_not_know_is_left_out_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_unknown_options", set())
    options = {"xla_no_such_option": True, "xla_backend_optimization_level": 0, "xla_nor_this_one": 3}
    with caplog.at_level(logging.WARNING):
        for x in (1.0, 2.0):
            assert compat.compile_lowered(jax.jit(lambda x: x + 1).lower(x), options)(x) == x + 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(
        f"JAX {jax.__version__} has no compiler option {name}" in " ".join(said) for name in options if "_no" in name
    )
    assert compat._unknown_options == {"xla_no_such_option", "xla_nor_this_one"}


def test_a_value_that_xla_refuses_is_an_error() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level"):
        compat.compile_lowered(lowered, {"xla_backend_optimization_level": "most"})


def test_every_setting_that_we_make_our_own_is_one_of_jax() -> None:
    """Each is one that a program may change, and that a thread may have another value of."""
    found = []

    @compat.under_own_settings
    def look() -> None:
        for name, value in compat.OWN_SETTINGS.items():
            here = compat.jax_config.config_states[name].value
            found.append(getattr(here, "value", here) == value)

    look()
    assert found == [True] * len(compat.OWN_SETTINGS)
