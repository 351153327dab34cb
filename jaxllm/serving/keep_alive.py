"""`keep_alive`: how long a request wants its model to stay loaded after it, as ollama spells that."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

from pydantic import BeforeValidator

from jaxllm.serving.http.request_model import RequestModel, refuse
from jaxllm.wording import shown

FOREVER = sys.float_info.max
"""For as long as nobody needs its place. Infinity is no number of a request's."""
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+|0)", re.ASCII)
_MAX_LENGTH = 64


def seconds(value: Any) -> Any:
    """'1h30m' -> 5400.0, 300 -> 300.0, -1 and '-1m' -> FOREVER; a validator, which refuses all else."""
    match value:
        case None:
            return None
        case bool():
            pass
        case int() | float():
            return FOREVER if value < 0 else float(value)
        case str() if len(value) <= _MAX_LENGTH and (found := _DURATION.fullmatch(value)):
            parts = re.findall(_PART, found[2])
            total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
            return FOREVER if found[1] == "-" and total else total
    raise refuse(
        f'keep_alive is {shown(value)}; it must be seconds, or a time such as "10m" or "1h30m"; 0 unloads the model '
        "after the request, and what is below 0 never"
    )


class KeepAliveFields(RequestModel):
    """How long a model stays."""

    keep_alive: Annotated[float | None, BeforeValidator(seconds, json_schema_input_type=float | str | None)] = None
    """How long the model stays loaded after this request, as "10m", or seconds; 0: not at all, -1: for good."""
