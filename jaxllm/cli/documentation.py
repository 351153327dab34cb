"""Docstrings, which --help shows, read from the source where Python leaves them out (`python -OO`)."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

Of = TypeVar("Of", bound=type | Callable[..., Any])


def documentation(of: type | Callable[..., Any]) -> str:
    """The docstring of a class or a function."""
    return inspect.getdoc(documented(of)) or ""


def documented(of: Of) -> Of:
    """Give a class or a function its docstring back."""
    left_out = sys.flags.optimize >= 2 and not (inspect.isfunction(of) and of.__doc__)
    if left_out:
        definition = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]
        assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
        of.__doc__ = ast.get_docstring(definition)
    return of
