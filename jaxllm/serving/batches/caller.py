"""Lines of a batch: read and checked, each sent to its route as a request would be, and answered in a line."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pydantic_core
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from jaxllm.config.server import ServerConfig
from jaxllm.errors import StorageFullError
from jaxllm.serving.access.keys import Tenant
from jaxllm.serving.batches.types import BatchError, LineError, LineResponse, LineResult
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.json_body import SMALL_BODY, check_numbers, check_structure
from jaxllm.serving.http.route import TENANT, YIELDS
from jaxllm.serving.model_loader import AT_CAPACITY, FAILED
from jaxllm.serving.served_model import LoadableModel
from jaxllm.serving.state import ServerState
from jaxllm.wording import did_you_mean, shown

logger = logging.getLogger(__name__)

BATCH_PRIORITY = 1000
"""Of every line, unless it asks for an even later turn; other requests have 0, and lower runs earlier."""

QUEUE_FULL, UNAVAILABLE, NO_ROOM = 429, 503, 507
ALL_PLACES = sys.maxsize
_HEADERS = {"Content-Type": "application/json"}
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

MAX_ERRORS = 100
"""Wrong lines that are listed; checking stops there."""
_FIELDS = ("custom_id", "method", "url", "body")
_REFUSED_FLAGS = ("stream", "background")
# Where a request holds a list of prompts, each of which is a sequence of its own.
_PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input"}


class Unavailable(Exception):
    """A line has no answer and will get none now: its model's engine died, or the server is stopping."""

    def __init__(self, model: LoadableModel):
        super().__init__(model.name)
        self.model = model


class Places:
    """The sequences of batches under way at once, first come, first served; who wants more than `total` runs alone."""

    def __init__(self, total: Callable[[], int]):
        self._total = total
        self._taken = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, wanted: int) -> None:
        """Wait for `wanted` places, or until no other has any."""
        async with self._turn:
            while self._taken and self._taken + wanted > self._total():
                self._freed.clear()
                await self._freed.wait()
            self._taken += wanted

    def give(self, count: int) -> None:
        self._taken -= count
        self._freed.set()


class Caller:
    def __init__(self, app: FastAPI, state: ServerState):
        self._app = app
        self._registry = state.registry
        self._config = state.config
        self._places: dict[LoadableModel, Places] = {}
        self._keys = state.keys

    def model_of(self, line: Line) -> LoadableModel:
        """The model that a line asks for; the default one where its endpoint will refuse what it asks for."""
        name = line.body.get("model")
        return self._registry.find(name if isinstance(name, str) and self._registry.serves(name) else None)

    def places(self, line: Line) -> Places:
        model = self.model_of(line)
        return self._places.setdefault(model, Places(partial(_num_places, model, self._config)))

    async def call(self, endpoint: str, line: Line, owner: str | None) -> LineResult:
        """The endpoint's answer, whatever it is, in the name of the batch's `owner`; waits while there is no room.

        Raises Unavailable, and StorageFullError where the answer was to be stored and there was no room.
        """
        try:
            tenant = self._keys.named(owner)
            check_numbers(line.body)
        except APIError as error:
            body = msgspec.Raw(msgspec.json.encode(error.body))
            return line_result(line, response=LineResponse(status_code=error.status, request_id=None, body=body))
        content = msgspec.json.encode(_with_priority(line.body, tenant.priority_ceiling or 0))
        transport = httpx.ASGITransport(partial(self._in_name_of, tenant), raise_app_exceptions=False)
        for delay in itertools.chain(_RETRY_SECONDS, itertools.repeat(_RETRY_SECONDS[-1])):
            request = httpx.Request("POST", f"http://localhost{endpoint}", headers=_HEADERS, content=content)
            answer = await transport.handle_async_request(request)
            said = msgspec.json.decode(await answer.aread())
            code = _error_code(said) if answer.status_code == UNAVAILABLE else None
            if answer.status_code == UNAVAILABLE and code not in (AT_CAPACITY, FAILED):
                raise Unavailable(self.model_of(line))
            if answer.status_code == NO_ROOM:
                raise StorageFullError(said["error"]["message"])
            if answer.status_code != QUEUE_FULL and code != AT_CAPACITY:
                break
            await asyncio.sleep(delay)
        body = msgspec.Raw(msgspec.json.encode(said))  # without line breaks
        request_id = answer.headers.get("x-request-id")
        response = LineResponse(status_code=answer.status_code, request_id=request_id, body=body)
        return line_result(line, response=response)

    async def _in_name_of(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, without a key, as the server knows only hashes; it logs errors as the HTTP server would."""
        try:
            await self._app({**scope, TENANT: tenant, YIELDS: True, "client": None}, receive, send)
        except Exception:
            logger.exception("a line of a batch failed")
            raise


def line_result(line: Line, *, response: LineResponse | None = None, error: LineError | None = None) -> LineResult:
    return LineResult(id=f"batch_req_{uuid.uuid4().hex}", custom_id=line.custom_id, response=response, error=error)


@dataclass(frozen=True)
class Line:
    custom_id: str
    body: dict[str, Any]

    def num_sequences(self, endpoint: str) -> int:
        """The number of sequences that the engine will run for this line, as far as the unchecked body tells."""
        counts = [self.body.get(name) for name in ("n", "best_of")]
        each = max([count for count in counts if isinstance(count, int)], default=1)
        prompts = self.body.get(_PROMPTS.get(endpoint, ""))
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
            each *= len(prompts)
        return max(each, 1)


@dataclass
class InputReport:
    """The findings in an input file; `model` is the one that all lines ask for, if they agree."""

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


def _num_places(model: LoadableModel, config: ServerConfig) -> int:
    """As configured, or what leaves an eighth of the engine to others; one until a line has loaded the model."""
    total = 1 if model.info is None else model.info.max_num_seqs
    return config.max_batch_concurrency or max(total - max(total // 8, 1), 1)


def _error_code(answer: Any) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _with_priority(body: dict[str, Any], ceiling: int) -> dict[str, Any]:
    asked = body.get("priority")
    if asked is not None and not isinstance(asked, int):
        return body  # which the endpoint will refuse
    return body | {"priority": max(asked or 0, ceiling, BATCH_PRIORITY)}


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
