"""What `from jaxllm import …` gives, to programs and to type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import jaxllm
from jaxllm import errors

SOURCE = Path(jaxllm.__file__)


def test_every_public_name_is_there() -> None:
    for name in jaxllm.__all__:
        assert getattr(jaxllm, name)


def test_type_checkers_see_the_same_names() -> None:
    seen = {
        name.name for node in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(node, ast.ImportFrom)
        for name in node.names if (node.module or "").startswith("jaxllm.")
    }  # fmt: skip
    assert {*seen, "__version__"} == set(jaxllm.__all__)
    assert SOURCE.with_name("py.typed").exists()


def test_every_error_is_public() -> None:
    assert {name for name, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)} <= {
        *jaxllm.__all__
    }


def test_importing_jaxllm_loads_no_jax() -> None:
    program = "import sys, jaxllm; sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
