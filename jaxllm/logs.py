"""How a process of ours logs: in lines for people, or as one JSON object a line."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, NamedTuple

import msgspec

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = "fields"
"""What a record has here, by `extra={FIELDS: {...}}`, becomes members of its JSON object."""

logger = logging.getLogger(__name__)


class LogSettings(NamedTuple):
    """What is logged, and how: a process hands it on to those that it starts."""

    level: int = logging.INFO
    format: LogFormat = "text"


_settings = LogSettings()


def settings() -> LogSettings:
    return _settings


def configure(chosen: LogSettings, process: str) -> None:
    """Log to standard error from now on. JSON names this process, and has warnings and uncaught errors too."""
    global _settings
    _settings = chosen
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines(process) if chosen.format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=chosen.level, handlers=[handler])
    if chosen.format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


class JSONLines(logging.Formatter):
    """{"time": "2026-01-31T12:00:00.123Z", "level": "info", "logger": …, "process": …, "message": …, …}"""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            stack = "".join(traceback.format_exception(error))
            line["error"] = {"type": type(error).__name__, "message": str(error), "stack": stack}
        return msgspec.json.encode(line).decode()


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), trace)
        return
    logger.critical("uncaught %s", kind.__name__, exc_info=(kind, error or kind(), trace))
