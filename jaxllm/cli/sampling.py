"""The sampling flags of `generate` and `chat`, read off SamplingParams: its fields, its types, its documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import Group, Parameter

from jaxllm.cli.documentation import documentation, documented
from jaxllm.cli.streams import as_typed
from jaxllm.config import EngineConfig
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams

SAMPLING_GROUP = Group(
    "Sampling", sort_key=1, help="A flag wins over the model's own recommendation, and that over the default shown."
)

# Text is what these commands are for; --seed is the engine's own, which unseeded requests draw from; functions of
# logits are given to an engine in Python.
_LEFT_OUT = {"detokenize", "logits_processors", *EngineConfig.model_fields}
_FLAG_TYPES: dict[str, Any] = {
    "stop": list[str] | None,
    "stop_token_ids": list[int] | None,
    "logit_bias": dict[str, float] | None,
}
_DEFAULT_MAX_TOKENS = 512


def takes_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every SamplingParams field as a flag; its second parameter receives those that were given."""
    config, _, *own = inspect.signature(command, eval_str=True).parameters.values()
    flags = sampling_flags()
    signature = inspect.Signature(sorted([config, *own, *flags], key=lambda parameter: parameter.kind))

    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        sampling = {flag.name: given.pop(flag.name) for flag in flags if flag.name in given}
        return command(given.pop("config"), sampling, **given)

    run.__name__, run.__doc__ = command.__name__, documentation(command)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def sampling_params(given: Mapping[str, Any], model_defaults: SamplingDefaults = SamplingDefaults()) -> SamplingParams:
    """Flags over the checkpoint's generation_config over SamplingParams' own defaults.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    typed = {name: _as_typed(value) for name, value in given.items()}
    return SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, **model_defaults.fields(), **typed})


def _as_typed(value: Any) -> Any:
    """The texts of a flag, alone or in a list."""
    if isinstance(value, list):
        return [_as_typed(entry) for entry in value]
    return as_typed(value) if isinstance(value, str) else value


def sampling_flags() -> list[inspect.Parameter]:
    """One keyword parameter a field; a flag that is not given leaves the choice to the model."""
    types = get_type_hints(SamplingParams)
    for member in (member for annotation in types.values() for member in get_args(annotation)):
        if dataclasses.is_dataclass(member):  # its fields become flags as well
            documented(member)  # type: ignore[type-var]
    texts = _field_texts()
    flags = []
    for field in dataclasses.fields(SamplingParams):
        if field.name in _LEFT_OUT:
            continue
        default = _DEFAULT_MAX_TOKENS if field.name == "max_tokens" else field.default
        shown = isinstance(default, bool | int | float)
        parameter = Parameter(
            help=texts[field.name] + (f" [default: {default}]" if shown else ""),
            group=SAMPLING_GROUP,
            negative=None if default is True else (),
            show_default=False,
            validator=_token_ids if field.name == "logit_bias" else None,
        )
        annotation = Annotated[_FLAG_TYPES.get(field.name, types[field.name] | None), parameter]
        flags.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return flags


def _token_ids(_: type, logit_bias: dict[str, float] | None) -> None:
    if not all(token.isdigit() for token in logit_bias or ()):
        raise ValueError(
            "it must map token ids to numbers, as in --logit-bias.42 -1.5 or --logit-bias '{\"42\": -1.5}'"
        )


def _field_texts() -> dict[str, str]:
    """The 'Attributes:' of SamplingParams' docstring: 'a, b: text.' -> {'a': 'text.', 'b': 'text.'}."""
    attributes = re.findall(r"^ +([a-z_, ]+): (.+)$", documentation(SamplingParams), flags=re.MULTILINE)
    return {name: text[0].upper() + text[1:] for names, text in attributes for name in names.split(", ")}
