"""How annotations are checked while tests run: an int is a float, as PEP 484 has it.

Shapes are checked where a signature has some; what jaxtyping does for that at each call, twice over, would be a quarter
of the run's time for the functions that have none.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype._util.func import utilfunctest
from jaxtyping import AbstractArray

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_check_shapes = jaxtyping.jaxtyped
if sys.version_info < (3, 12):  # which keeps what it finds; until then every isinstance() of a protocol looks again
    typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)  # type: ignore[attr-defined]
_has_shapes: dict[tuple[str, str, types.CodeType], bool] = {}


def check(packages: list[str]) -> None:
    """Check what is imported of these packages from now on."""
    jaxtyping.jaxtyped = _jaxtyped  # type: ignore[assignment]
    jaxtyping.install_import_hook(packages, "tests.support.typecheck.checked")


def forget_functions() -> None:
    """Let go of functions that were made inside others, and of all that they refer to, such as whole engines.

    beartype remembers for each function that it has ever checked whether it is such a one.
    """
    for asked in (utilfunctest.is_func_nested, utilfunctest.is_func_local):
        for cell in asked.__closure__ or ():
            if isinstance(cell.cell_contents, dict):
                cell.cell_contents.clear()


def _jaxtyped(target: Any = None, *, typechecker: Any = None) -> Any:
    """In place of jaxtyping's own: for functions without shapes the type checker alone."""
    if target is not None or typechecker is None:
        return _check_shapes(target, typechecker=typechecker)
    return lambda target: _choose_class(target) if inspect.isclass(target) else _choose(target)


def _choose_class(target: type) -> type:
    """What a dataclass is made of is checked; methods are on their own."""
    if dataclasses.is_dataclass(target) and "__init__" in vars(target):
        target.__init__ = _choose(target.__init__)  # type: ignore[misc]
    return target


def _choose(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decided at the first call, when every name in the annotations is defined."""
    chosen: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        if chosen is None:
            key = function.__module__, function.__qualname__, function.__code__  # of what is defined again and again
            if key not in _has_shapes:
                _has_shapes[key] = _annotated_with_shapes(function)
            chosen = _check_shapes(function, typechecker=checked) if _has_shapes[key] else checked(function)
        return chosen(*args, **kwargs)

    return call


def _annotated_with_shapes(function: Callable[..., Any]) -> bool:
    try:
        return any(map(_has_shape, typing.get_type_hints(function).values()))
    except NameError:  # of a name that is imported for type checkers only
        return True


def _has_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))
