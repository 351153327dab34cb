"""All that a server and its engine's process say is JSON, where that is asked for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.mixed_requests import SETTINGS, write_model

pytestmark = pytest.mark.programs


def flags(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def test_every_line_of_every_process_is_json(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cache = os.environ.get("TESTS_COMPILE_CACHE", str(tmp_path / "cache"))
    settings = SETTINGS | {"port": 0, "data_dir": tmp_path, "log_format": "json", "compile_cache_dir": cache}
    command = [sys.executable, "-m", "jaxllm", "serve", str(model), "--enforce-eager", *flags(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for text in process.stdout:
            lines.append(json.loads(text))
            if found := re.search(r"^Serving .* on (\S+)/v1 ", lines[-1]["message"]):
                break
        else:
            raise AssertionError("it ended before it served")
        asked = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        httpx.post(f"{found[1]}/v1/completions", json=asked, timeout=120).raise_for_status()
        process.send_signal(signal.SIGTERM)
        lines += [json.loads(text) for text in process.stdout]
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert {line["process"] for line in lines} == {"api", "engine/tiny"}
    [request] = [line for line in lines if line["logger"] == "jaxllm.requests"]
    assert (request["model"], request["output_tokens"], request["finish_reasons"]) == ("tiny", 5, ["length"])
    assert lines[-1]["message"].startswith("Stopping")
