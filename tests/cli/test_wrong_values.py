"""Odd values of every flag of every command are refused in plain words: the flag, the value and what is accepted."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from cyclopts import App, CycloptsError

from jaxllm.cli.main import app
from jaxllm.cli.settings import in_words
from jaxllm.config import EngineConfig, ServeConfig, make_config
from jaxllm.config.sources import read_settings
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.requests.sampling import SamplingParams

FOREIGN = re.compile(
    r"\b(dict|dictionary|list\[|tuple|frozenset|int|float|str|bool|NoneType|None|Optional|Union|Literal|typing|pydantic"
    r"|Input|unable|validat\w+|coerc\w+|convert\w*|instance|Unused|Parameter|_type)\b|<class|[<>]=|value error",
)
ODD_TEXTS = ("foo", "", "[1]", '{"a": 1}')
ODD_VALUES: tuple[Any, ...] = (
    *ODD_TEXTS,
    "{",
    "-1",
    "1e999",
    "null",
    "1,x",
    "a=b=c",
    -1,
    0,
    1.5,
    True,
    [],
    [[]],
    {},
    {"a": {}},
    10**30,
    float("nan"),
    b"x",
    object(),
)


def commands(parent: App) -> Iterator[Callable[..., Any]]:
    """The function of every command, `bench latency` among them."""
    for name in parent:
        if not name.startswith("-"):
            if (command := parent[name].default_command) is not None:
                yield command
            yield from commands(parent[name])


def parameters() -> Iterator[inspect.Parameter]:
    """What commands take. A setting that is a text for them is left out: its values are below."""
    for command in commands(app):
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            annotation = get_args(parameter.annotation)[:1] or (parameter.annotation,)
            if not (annotation == (str | None,) and name in ServeConfig.model_fields):
                yield parameter.replace(kind=parameter.KEYWORD_ONLY)


PARAMETERS = {f"{parameter.name}: {parameter.annotation}": parameter for parameter in parameters()}


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=lambda parameter: parameter.name)
def test_odd_values_of_every_flag(parameter: inspect.Parameter) -> None:
    def command(**given: Any) -> None:
        """Takes nothing else."""

    command.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    alone = App()
    alone.default(command)
    names = {name for argument in alone.assemble_argument_collection() for name in argument.names if name[:2] == "--"}
    for flag in names:
        for given in (flag, f"{flag}.key", f"{flag}.42"):
            for text in ODD_TEXTS:
                try:
                    alone.parse_args([f"{given}={text}"], exit_on_error=False, print_error=False)
                except CycloptsError as error:
                    check(in_words(error), flag, text)
                except InvalidRequestError as error:
                    check(str(error), flag, text)


def check(message: str, flag: str, text: str) -> None:
    rest = message.replace(repr(text), "").replace(flag, "")
    assert "\n" not in message and not FOREIGN.search(rest), message


@pytest.mark.parametrize("name", ServeConfig.model_fields)
def test_odd_values_of_every_setting(name: str) -> None:
    for value in ODD_VALUES:
        for read in (
            lambda v: read_settings(ServeConfig, {name: v}, environ={}),
            lambda v: make_config(ServeConfig, **{name: v}),
        ):
            try:
                read(value)
            except ConfigError as error:
                rest = str(error).replace(repr(value), "")
                assert "\n" not in rest and not FOREIGN.search(rest), error


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"method": "ngram"}', "num_speculative_tokens: it must be given"),
        ('{"num_speculative_tokens": 2, "depth": 1}', "depth: there is no such key"),
        ('{"num_speculative_tokens": "x"}', "num_speculative_tokens: it must be an integer"),
        ("[1]", 'it must be a JSON object, such as {"key": 1}'),
    ],
)
def test_keys_of_an_object(cli: Any, value: str, message: str) -> None:
    result = cli("plan", "--speculative-config", value)
    assert result.code == 2 and result.err == f"jaxllm: error: --speculative-config is {value!r}: {message}\n"


def test_every_parameter_of_sampling_was_tried() -> None:
    tried = {parameter.name for parameter in PARAMETERS.values()}
    assert {*SamplingParams.__dataclass_fields__} - tried - {*EngineConfig.model_fields} == {
        "detokenize",
        "logits_processors",
    }
