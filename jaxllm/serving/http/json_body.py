"""JSON bodies: read within limits of one and of all, and large ones parsed in a process of their own."""

from __future__ import annotations

import codecs
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import pydantic_core
from msgspec.msgpack import Ext, decode, encode

from jaxllm.own_process import AskedProcesses, Died, TimedOut, answer_questions
from jaxllm.requests.sampling import INT64_MIN
from jaxllm.serving.http.api_error import RETRY_AFTER_SECONDS, APIError, dotted
from jaxllm.wording import shown

if TYPE_CHECKING:
    from starlette.requests import Request  # a process that reads bodies needs no web framework

SMALL_BODY = 64 * 1024  # bytes up to which a body is taken as it is, whatever it holds
MAX_VALUES = 2**20  # elements and fields of one body: ids of eight contexts of 128 Ki tokens
MAX_STRUCTURE = 100_000  # objects, lists and named fields of one body: twelve for each piece of the longest chat
UINT64_MAX = 2**64 - 1
SLICE = 64 * 1024  # bytes, which a call unpacks in less than a millisecond
READ_SECONDS = 10  # the processor time that one body may take
READ_MEMORY_BYTES = 2**30  # beside a few times the body's own bytes
MAX_DEPTH = 201  # of lists and objects within each other, in pydantic_core
_NICE = 10
_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")
_LONGEST = 19  # digits from which on an integer may be beyond 64 bits
_TEXT, _LIST, _INTEGERS, _OBJECT = range(4)
_LIST_OF_ONE, _OBJECT_OF_ONE = b"\x91", b"\x81"


def check_structure(raw: bytes) -> bool:
    """True if a number outside strings may be beyond 64 bits. Raises APIError 400 for too many values or objects."""
    values = structure = 0
    overflow, before = False, b""
    for outside in _outside_strings(raw):
        values += outside.count(b",")
        structure += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        if structure > MAX_STRUCTURE:
            raise _too_much("objects, lists and named fields", MAX_STRUCTURE)
        if values > MAX_VALUES:
            raise _too_much("values", MAX_VALUES)
        overflow = overflow or may_overflow(before + outside)
        before = outside[-_LONGEST:]
    return overflow


def parse_json(raw: bytes) -> Any:
    """Raises APIError 400 with line and column where the JSON is malformed."""
    try:
        return pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        if "recursion limit" in str(error):
            problem = f"the body is nested more than {MAX_DEPTH} deep"
            raise APIError(400, problem, code="invalid_json") from None
        raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises APIError 400 where the JSON is malformed, or no object."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise APIError(400, f"the body is {shown(value)}; it must be a JSON object", code="invalid_json")
    return value


def may_overflow(raw: bytes) -> bool:
    """True if a number in it, or in a text of it, may be beyond 64 bits. Worked example: 1.5E+400 becomes 0.0e000."""
    shape = raw.translate(_SHAPE, b"+")
    return any(large in shape for large in (b"0" * _LONGEST, b"0e00", b".e00"))


def check_numbers(value: Any) -> None:
    """Raises APIError 400 naming the first number that is neither a 64-bit integer nor a finite float."""
    open_values: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while open_values:
        path, value = open_values.pop()
        match value:
            case dict():
                open_values += (((*path, name), part) for name, part in value.items())
            case list():
                open_values += (((*path, at), part) for at, part in enumerate(value))
            case bool() | str() | None:
                pass
            case int() if not INT64_MIN <= value <= UINT64_MAX:
                raise _wrong_number(path, value, "a 64-bit integer")
            case float() if not math.isfinite(value):
                raise _wrong_number(path, value, "a number that a 64-bit float can hold")


class Integers(list[int]):
    """A long list of nothing but integers, so that a validator need not look at each of them again."""


def pack(value: Any) -> bytes:
    """MessagePack, in which whatever is larger than SLICE is an extension made of parts that are not."""
    if len(packed := encode(value)) <= SLICE:
        return packed
    del packed  # else each level of a deep value would hold all that is below it
    match value:
        case str():
            return encode(Ext(_TEXT, value.encode()))
        case list():
            kind = _INTEGERS if set(map(type, value)) == {int} else _LIST
            return encode(Ext(kind, encode(list(_parts(value)))))
        case dict():
            return encode(Ext(_OBJECT, encode(list(_parts(value)))))
    raise TypeError(f"no JSON value is a {type(value)}")


def unpack(packed: bytes | memoryview) -> Any:
    return decode(packed, ext_hook=_extended)


class BodyProcess:
    """One process, started when it is first needed and again after it has ended; callers wait for each other."""

    def __init__(self, largest: int, memory_bytes: int = READ_MEMORY_BYTES) -> None:
        """`largest` is the most bytes that a body may have."""
        self._memory_bytes = memory_bytes + 16 * largest
        self.processes = AskedProcesses("jaxllm.serving.http.json_body", str(self._memory_bytes))

    def read(self, pieces: Sequence[bytes]) -> dict[str, Any]:
        """The value of a body that came in pieces. Blocks; any thread may call it. Raises APIError 400."""
        try:
            reply = self.processes.ask(*pieces, processor_seconds=READ_SECONDS)
        except (TimedOut, Died):
            problem = f"the body takes more than {READ_SECONDS} seconds or {self._memory_bytes:,} bytes to read"
            raise APIError(400, problem, code="body_too_complex") from None
        read = unpack(reply)
        if "error" in read:
            raise APIError(400, **read["error"])
        return read["value"]

    def close(self) -> None:
        self.processes.close()


def _answer(raw: bytes) -> bytes:
    try:
        overflow = check_structure(raw)
        value = parse_object(raw)
        if overflow:
            check_numbers(value)
    except APIError as error:
        told = error.body["error"]
        return pack({"error": {name: told[name] for name in ("message", "param", "code")}})
    return pack({"value": value})


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """The parts that are not in quotes, slice by slice: of all at once the pieces would take gigabytes."""
    start, in_string = 0, False
    while start < len(raw):
        end = min(start + SLICE, len(raw))
        part = raw[start:end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not to be cut in two
            end += 1
            part = raw[start:end]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        start = end


def _too_much(what: str, limit: int) -> APIError:
    return APIError(400, f"the body has more than {limit} {what}, the most it may have", code="body_too_complex")


def _wrong_number(path: tuple[str | int, ...], value: float, accepted: str) -> APIError:
    name = dotted(path)
    return APIError(400, f"{name} is {shown(value)}; it must be {accepted}", param=name or None)


def _parts(values: list[Any] | dict[str, Any]) -> Iterator[bytes]:
    if len(packed := encode(values)) <= SLICE:
        yield packed
        return
    del packed
    middle = len(values) // 2
    match values:
        case [alone]:
            yield _LIST_OF_ONE + pack(alone)
        case list():
            yield from chain(_parts(values[:middle]), _parts(values[middle:]))
        case dict() if middle:
            items = list(values.items())
            yield from chain(_parts(dict(items[:middle])), _parts(dict(items[middle:])))
        case dict():
            ((key, alone),) = values.items()
            yield _OBJECT_OF_ONE + pack(key) + pack(alone)


def _extended(kind: int, content: memoryview) -> Any:
    if kind == _TEXT:
        decoder = codecs.getincrementaldecoder("utf-8")()
        return "".join(decoder.decode(content[at : at + SLICE]) for at in range(0, len(content), SLICE))
    parts = map(unpack, decode(content, type=list[memoryview]))
    if kind == _OBJECT:
        fields: dict[str, Any] = {}
        for part in parts:
            fields |= part
        return fields
    values: list[Any] = Integers() if kind == _INTEGERS else []
    for part in parts:
        values += part
    return values


class Share:
    """One body's share of the memory for all; if it is `given_up`, its pieces were dropped for others to have room."""

    def __init__(self, memory: BodyMemory):
        self.memory = memory
        self.pieces: list[bytes] = []
        self.nbytes = 0
        self.given_up = False


class BodyMemory:
    """Memory that the bodies of all requests share until they are parsed.

    Beyond `limit` bytes the large body that has not grown for longest is given up: who sends slowly makes room for
    others. Bodies of at most SMALL_BODY bytes always have room.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._nbytes = 0
        self._growing: dict[Share, None] = {}
        """Large bodies that are being read; the last is the one that has grown last."""

    @contextmanager
    def share(self) -> Iterator[Share]:
        share = Share(self)
        try:
            yield share
        finally:
            self._give_back(share)

    def keep(self, share: Share, piece: bytes) -> None:
        nbytes, before = sys.getsizeof(piece), share.nbytes // SMALL_BODY
        share.pieces.append(piece)
        share.nbytes += nbytes
        self._nbytes += nbytes
        if share.nbytes // SMALL_BODY > before:  # a few bytes now and then are no growth
            self._growing.pop(share, None)
            self._growing[share] = None
        while self._nbytes > self._limit and self._growing:
            slowest = next(iter(self._growing))
            self._give_back(slowest)
            slowest.given_up = True

    def complete(self, share: Share) -> None:
        self._growing.pop(share, None)

    def _give_back(self, share: Share) -> None:
        self.complete(share)
        self._nbytes -= share.nbytes
        share.nbytes = 0
        share.pieces.clear()


async def read_body(request: Request, limit: int, share: Share) -> list[bytes]:
    """The body, which is JSON, in the pieces that it came in. Raises APIError 415, and what `read_pieces` raises."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(415, f"Content-Type is {content_type!r}; it must be application/json")
    return await read_pieces(request, limit, share)


async def read_pieces(request: Request, limit: int, share: Share) -> list[bytes]:
    """The body in its pieces. Raises APIError 413 if it is too large, and 503 if others need its share of memory."""
    message = f"the body is larger than {limit} bytes"
    too_large = APIError(413, message, code="body_too_large", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        share.memory.keep(share, chunk)
        if share.given_up:
            message = "the server reads too many large bodies at once to keep this one; send it again later"
            headers = {"Connection": "close", "Retry-After": RETRY_AFTER_SECONDS}
            raise APIError(503, message, type="server_error", code="bodies_too_large", headers=headers)
    share.memory.complete(share)
    return share.pieces


if __name__ == "__main__":
    os.nice(_NICE)
    answer_questions(_answer, int(sys.argv[1]))
