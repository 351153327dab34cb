"""Every error jaxllm raises on purpose. A message is one line with the field, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


def one_line(text: object, most: int = 300) -> str:
    """Somebody else's words on one printable line, and not as long as they like."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))[:most]


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason(error: Exception) -> str:
    """Why a file could not be used, without the number that Python begins with: 'no such file or directory'."""
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else one_line(error)


class JaxLLMError(Exception):
    """Base of all errors below: catching it catches everything jaxllm says on purpose."""


class ConfigError(JaxLLMError):
    """A setting (flag, YAML key, variable, keyword argument) that cannot be honoured."""


class DoesNotFitError(ConfigError):
    """A model with these settings takes more memory than there is."""


class ModelNotFoundError(ConfigError):
    """A model argument that is no built-in name, directory, file or reachable hub id."""


class CheckpointError(JaxLLMError):
    """A checkpoint that is corrupt, truncated, or not of the architecture it claims."""


@dataclass(frozen=True, init=False)
class Field:
    """A place in a request: str(Field("messages", 3, "content")) is 'messages[3].content'."""

    path: tuple[str | int, ...]

    def __init__(self, *path: str | int):
        object.__setattr__(self, "path", path)

    def __str__(self) -> str:
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return text.removeprefix(".")


class InvalidRequestError(JaxLLMError):
    """A request that cannot be honoured; `param` names the offending field in the OpenAI error body.

    A message in pieces knows which of them are fields; by default the first field is the offending one.
    """

    def __init__(self, message: str | Sequence[str | Field], param: str | Field | None = None):
        self.pieces = (message,) if isinstance(message, str) else tuple(message)
        super().__init__("".join(map(str, self.pieces)))
        first = next((piece for piece in self.pieces if isinstance(piece, Field)), None)
        self.field = first if param is None else Field(param) if isinstance(param, str) else param

    @property
    def param(self) -> str | None:
        return None if self.field is None else str(self.field)

    def named(self, name: Callable[[Field], Field]) -> InvalidRequestError:
        """The same error with `name(field)` for each of its fields."""
        pieces = [name(piece) if isinstance(piece, Field) else piece for piece in self.pieces]
        return type(self)(pieces, self.field and name(self.field))


class ContextLengthError(InvalidRequestError):
    """A prompt, or a prompt and the completion asked for, that the context does not hold."""


class QueueFullError(JaxLLMError):
    """The waiting queue is at its limit; the client should retry later."""


class StorageFullError(JaxLLMError):
    """The disk that objects are stored on, or this user's share of it, is full; what was to be stored is not."""


class EnginePausedError(JaxLLMError):
    """The engine was told to pause and takes no requests until it is told to go on."""


class EngineDeadError(JaxLLMError):
    """The engine loop has stopped; every running request fails with this."""


@contextmanager
def rust_errors(kind: type[JaxLLMError], before: str) -> Iterator[None]:
    """Raise errors of tokenizers as one line of `kind`: Exceptions, and the BaseException of pyo3 where it panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{before}{one_line(error)}") from None
