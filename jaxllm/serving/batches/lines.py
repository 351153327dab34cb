"""The lines of a batch's input file: checked as a whole before any runs, then read a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic_core

from jaxllm.serving.batches.batch_types import BatchError
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.body import SMALL_BODY, check_structure
from jaxllm.wording import did_you_mean, shown

MAX_ERRORS = 100
"""Wrong lines that are listed; checking stops there."""

_FIELDS = ("custom_id", "method", "url", "body")
_REFUSED_FLAGS = ("stream", "background")

# Where a request holds a list of prompts, each of which is a sequence of its own.
_PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input"}


@dataclass(frozen=True)
class Line:
    custom_id: str
    body: dict[str, Any]

    def num_sequences(self, endpoint: str) -> int:
        """How many sequences the engine will run for this line, as far as the unchecked body tells."""
        counts = [self.body.get(name) for name in ("n", "best_of")]
        each = max([count for count in counts if isinstance(count, int)], default=1)
        prompts = self.body.get(_PROMPTS.get(endpoint, ""))
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
            each *= len(prompts)
        return max(each, 1)


@dataclass
class InputReport:
    """What checking an input file found; `model` is what all lines ask for, if they agree."""

    total: int = 0
    model: str | None = None
    errors: list[BatchError] = field(default_factory=list)


class _WrongLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param


def check_input(path: Path, endpoint: str) -> InputReport:
    """Check every line for what a batch asks of it; the bodies themselves are checked by the endpoint, line by line."""
    report = InputReport()
    first_use: dict[str, int] = {}
    models: set[str | None] = set()
    for number, text in _numbered(path):
        report.total += 1
        try:
            line = _parse(text, endpoint)
            if line.custom_id in first_use:
                message = f"custom_id {shown(line.custom_id)} is already that of line {first_use[line.custom_id]}"
                raise _WrongLine("duplicate_custom_id", message, "custom_id")
        except _WrongLine as error:
            report.errors.append(BatchError(code=error.code, message=str(error), param=error.param, line=number))
            if len(report.errors) == MAX_ERRORS:
                return report
            continue
        first_use[line.custom_id] = number
        model = line.body.get("model")
        models.add(model if isinstance(model, str) else None)
    if report.total == 0:
        report.errors.append(BatchError(code="empty_file", message="the input file has no lines"))
    report.model = models.pop() if len(models) == 1 else None
    return report


def read_lines(path: Path, endpoint: str, done: set[str], size: int) -> Iterator[list[Line]]:
    """The lines of a checked file whose custom_id is not in `done`, up to `size` at a time."""
    lines: list[Line] = []
    for _, text in _numbered(path):
        line = _parse(text, endpoint)
        if line.custom_id not in done:
            lines.append(line)
        if len(lines) == size:
            yield lines
            lines = []
    if lines:
        yield lines


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, counted from 1."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def _parse(text: bytes, endpoint: str) -> Line:
    try:
        if len(text) > SMALL_BODY:
            check_structure(text)
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except APIError as error:
        raise _WrongLine("invalid_json_line", str(error)) from None
    except ValueError as error:
        raise _WrongLine("invalid_json_line", f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _WrongLine("invalid_json_line", f"the line is {shown(value)}; it must be a JSON object")
    for name in _FIELDS:
        if value.get(name) is None:
            raise _WrongLine("missing_required_parameter", f"{name} is required", name)
    for name in value:
        if name not in _FIELDS:
            hint = did_you_mean(name, _FIELDS)
            raise _WrongLine("unknown_parameter", f"unknown field {shown(name)}{hint}", name)
    custom_id, method, url, body = (value[name] for name in _FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        raise _WrongLine("invalid_custom_id", f"custom_id is {shown(custom_id)}; it must be a text", "custom_id")
    if method != "POST":
        raise _WrongLine("invalid_method", f"method is {shown(method)}; it must be 'POST'", "method")
    if url != endpoint:
        raise _WrongLine("invalid_url", f"url is {shown(url)}; the batch's endpoint is {endpoint!r}", "url")
    if not isinstance(body, dict):
        raise _WrongLine("invalid_body", f"body is {shown(body)}; it must be a JSON object", "body")
    for name in _REFUSED_FLAGS:
        if body.get(name):
            message = f"body.{name} is {shown(body[name])}; a line of a batch cannot have it"
            raise _WrongLine("invalid_body", message, f"body.{name}")
    return Line(custom_id, body)
