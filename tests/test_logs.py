"""What a process logs, as lines for people and as JSON objects."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from jaxllm.logs import FIELDS, JSONLines

pytestmark = pytest.mark.programs


def line(record: logging.LogRecord) -> dict:
    text = JSONLines("api").format(record)
    assert "\n" not in text
    return json.loads(text)


def record(message: str, *arguments: object, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "jaxllm.x", "levelname": "WARNING", "msg": message, "args": arguments, "created": 1767225600.0625}
        | more
    )


def test_a_line_is_an_object() -> None:
    assert line(record("%s has\n%d lines", "it", 2)) == {
        "time": "2026-01-01T00:00:00.062Z",
        "level": "warning",
        "logger": "jaxllm.x",
        "process": "api",
        "message": "it has\n2 lines",
    }


def test_fields_are_members() -> None:
    assert line(record("x", **{FIELDS: {"status": 200, "key": None}}))["status"] == 200


def test_an_exception_has_its_stack() -> None:
    try:
        raise ValueError("no good")
    except ValueError:
        error = line(record("failed", exc_info=sys.exc_info()))["error"]
    assert (error["type"], error["message"]) == ("ValueError", "no good")
    assert "test_an_exception_has_its_stack" in error["stack"]


PROGRAM = """
import logging, threading, warnings
from jaxllm import logs
logs.configure(logs.LogSettings(logging.INFO, FORMAT), "engine/m")
logging.getLogger("jaxllm.one").info("hello")
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise OSError("the end")
"""


def said(kind: str) -> str:
    program = PROGRAM.replace("FORMAT", repr(kind))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr


def test_all_that_a_process_says_is_json() -> None:
    lines = [json.loads(text) for text in said("json").splitlines()]
    assert [one["level"] for one in lines] == ["info", "warning", "critical", "critical"]
    assert "careful" in lines[1]["message"] and lines[1]["logger"] == "py.warnings"
    assert [one["error"]["type"] for one in lines[2:]] == ["ZeroDivisionError", "OSError"]
    assert {one["process"] for one in lines} == {"engine/m"}


def test_text_is_for_people() -> None:
    assert said("text").splitlines()[0].endswith(" INFO jaxllm.one: hello")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_command_line_that_is_wrong_says_so_in_one_line(kind: str, tmp_path) -> None:
    command = [sys.executable, "-m", "jaxllm", "serve", "no-such-model", "--log-format", kind, "--port", "0"]
    found = subprocess.run([*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    last = found.stderr.splitlines()[-1]
    if kind == "text":
        assert last.startswith("jaxllm: error: model 'no-such-model' ")
    else:
        lines = [json.loads(text) for text in found.stderr.splitlines()]
        assert lines[-1]["level"] == "critical" and lines[-1]["message"].startswith("model 'no-such-model' ")
