"""What a flag's value would have to be, in plain words, where cyclopts would name the types of Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import CycloptsError, Token
from cyclopts.argument import Argument
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    MixedArgumentError,
    RepeatArgumentError,
    ValidationError,
)
from cyclopts.validators import Number

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}


def in_words(error: CycloptsError) -> str:
    """One line that names the flag, the value and what is accepted; errors of other kinds are in plain words as is."""
    argument = error.argument
    match error:
        case CoercionError() if argument is not None:
            given = _given(argument, error.token)
            annotation = error.target_type if given.keys else argument.hint
            return f"{given.keyword or argument.name} is {given.value!r}: it must be {_accepted(argument, annotation)}"
        case ValidationError() if argument is not None:
            name = next((token.keyword for token in argument.tokens if token.keyword), argument.name)
            value = " ".join(token.value for token in argument.tokens)
            return f"{name} is {value!r}: {_within(argument) or error.exception_message}"
        case MissingArgumentError() if argument is not None:
            return f"{error.keyword} requires an argument" if error.keyword else f"{_shown(argument)} must be given"
        case MixedArgumentError() if argument is not None:
            return f"{argument.name} is given as a whole and by its keys; one of the two is accepted"
        case RepeatArgumentError():
            return f"{error.token.keyword} is given more than once"
    error.verbose = False
    return str(error)


def _shown(argument: Argument) -> str:
    """The name by which the usage shows it: MODEL for what is given by its place, as --model may be."""
    return argument.name if argument.index is None else argument.name.lstrip("-").upper()


def _given(argument: Argument, wrong: Token | None) -> Token:
    """The word of the command line that is wrong: a list or an object is taken apart before its parts are judged."""
    keyword = wrong.keyword if wrong else None
    same = [token for token in argument.tokens if token.keyword == keyword]
    return same[-1] if same else wrong or Token(keyword=argument.name)


def _accepted(argument: Argument, annotation: Any) -> str:
    """What a value may be, in words; of a flag whose value is an object, how that is given."""
    words = " or ".join(dict.fromkeys(map(_words, _kinds(annotation))))
    if not words:
        return f"a JSON object, such as {argument.name} '{{\"KEY\": VALUE}}', or {argument.name}.KEY VALUE"
    return words


def _within(argument: Argument) -> str:
    """The bounds of a number; "" where something else is checked, which says itself what it wants."""
    checks = argument.parameter.validator
    bounds = [one for one in (checks if isinstance(checks, Iterable) else [checks]) if isinstance(one, Number)]
    wanted = [f"{one.gte} or more" for one in bounds if one.gte is not None]
    wanted += [f"above {one.gt}" for one in bounds if one.gt is not None]
    return f"it must be {' and '.join(wanted)}" if wanted else ""


def _kinds(annotation: Any) -> list[Any]:
    """The types that a value may have: of a list, its entries'; none where it is an object."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for member in get_args(annotation) if member is not NoneType for kind in _kinds(member)]
    if origin in (list, tuple, set, frozenset, Sequence):
        return [kind for member in get_args(annotation) if member is not ... for kind in _kinds(member)]
    if origin is dict or annotation is dict or dataclasses.is_dataclass(annotation):
        return []
    return [annotation]


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        *others, last = map(repr, get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    return _WORDS[kind]
