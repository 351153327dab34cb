"""Functions of a caller's own that change logits before a token is chosen, and what requests say of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.errors import ConfigError, Field, InvalidRequestError
from jaxllm.wording import did_you_mean

if TYPE_CHECKING:
    import jax
    import numpy as np

_DTYPES = {"b": "bool", "i": "int32", "u": "int32", "f": "float32"}


class LogitsState(NamedTuple):
    """What a logits processor is told of its request.

    Attributes:
        tokens: int32 `[L]`, the prompt and what has been generated, then -1 to the longest context's end.
        length: how many tokens these are: the position of the token that is to be chosen.
        prompt_length: how many of them are the prompt's.
    """

    tokens: jax.Array
    length: jax.Array
    prompt_length: jax.Array


@dataclass(frozen=True)
class LogitsProcessor:
    """A function of `(logits, state)` that JAX can trace and that gives other logits.

    Attributes:
        name: what requests call it.
        function: takes float32 logits `[V]` and a `LogitsState`, and arguments by their names.
        defaults: the value of each argument where a request gives none; requests give the same shapes and dtypes.
    """

    name: str
    function: Callable[..., jax.Array]
    defaults: Mapping[str, np.ndarray]


def read_processors(functions: Sequence[Callable[..., jax.Array]]) -> tuple[LogitsProcessor, ...]:
    """The processors of an engine, whose keyword-only parameters are their arguments. Raises ConfigError."""
    found = tuple(map(_read, functions))
    names = [processor.name for processor in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"logits_processors has two functions called {name!r}; requests must tell them apart")
    return found


def _read(function: Callable[..., jax.Array]) -> LogitsProcessor:
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise ConfigError(f"logits_processors has {function!r}; it must be a function of (logits, state) with a name")
    parameters = inspect.signature(function).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    first = [parameter for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(first) != 2 or any(parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in first):
        taken = ", ".join(parameter.name for parameter in parameters)
        accepted = "it must take (logits, state), and arguments behind a *: (logits, state, *, scale=1.0)"
        raise ConfigError(f"logits_processors has {name}({taken}); {accepted}")
    return LogitsProcessor(name, function, {parameter.name: _default(name, parameter) for parameter in named})


def _default(name: str, parameter: inspect.Parameter) -> np.ndarray:
    import numpy as np

    given, said = parameter.default, f"logits_processors: the argument {parameter.name!r} of {name} has"
    if given is inspect.Parameter.empty:
        raise ConfigError(f"{said} no default value, which says what shape and type requests may give it")
    value = np.asarray(given)
    if value.dtype.kind not in _DTYPES:
        accepted = "it must be a number, True or False, or an array of them"
        raise ConfigError(f"{said} the default {given!r}; {accepted}")
    return value.astype(_DTYPES[value.dtype.kind])


Chosen = Mapping[str, Mapping[str, Any]]
"""The processors that a request uses, by name, each with the arguments that it gives."""


def read_chosen(given: Mapping[str, Any] | Sequence[str]) -> dict[str, dict[str, Any]]:
    """`Chosen` from names, or from names and arguments. Raises InvalidRequestError: it is neither."""
    accepted = "a list of names, or a dictionary of names and arguments, as {'scale': {'factor': 2.0}}"
    problem = _refused(f" is {given!r}; it must be {accepted}")
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
        raise problem
    chosen = given if isinstance(given, Mapping) else {name: {} for name in given if isinstance(name, str)}
    if len(chosen) != len(given):
        raise problem
    for name, arguments in chosen.items():
        if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
            raise problem
    import numpy as np

    def plain(value: Any) -> Any:
        return value if isinstance(value, str) or value is None else np.asarray(value).tolist()  # can be compared

    return {name: {key: plain(value) for key, value in (found or {}).items()} for name, found in chosen.items()}


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError([Field("logits_processors"), problem])


def argument(name: str, key: str, value: Any, shape: Sequence[int], dtype: str) -> np.ndarray:
    """A request's argument `key` of the processor `name`. Raises InvalidRequestError: it does not fit."""
    import numpy as np

    try:
        found = np.asarray(value)
        fits = found.dtype.kind in _DTYPES and np.can_cast(_DTYPES[found.dtype.kind], dtype, "same_kind")
        if fits and dtype == "int32":
            fits = bool((np.abs(found.astype(np.float64)) < 2**31).all())
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits or found.shape != tuple(shape):
        raise _refused(f" has {value!r} for {key!r} of {name}; it must be {dtype} of the shape {list(shape)}")
    return found.astype(dtype)


Declared = Mapping[str, Mapping[str, tuple[tuple[int, ...], str]]]
"""The processors of an engine by name, each with the shape and the dtype of its arguments."""


def check_chosen(declared: Declared, chosen: Chosen) -> None:
    """Refuse what an engine does not have. Raises InvalidRequestError: a processor, or an argument, or its value."""
    for name, arguments in chosen.items():
        if not declared:
            raise _refused(f" has {name!r}, and this engine has none; they are given as LLM(logits_processors=[...])")
        if name not in declared:
            raise _refused(f" has {name!r}{did_you_mean(name, declared)}; this engine has {', '.join(declared)}")
        for key, value in arguments.items():
            if key not in declared[name]:
                known = ", ".join(declared[name]) or "no arguments"
                raise _refused(f" has {key!r} for {name}{did_you_mean(key, declared[name])}; it takes {known}")
            argument(name, key, value, *declared[name][key])
