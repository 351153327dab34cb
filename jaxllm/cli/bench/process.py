"""jaxllm in a process of its own, as a benchmark starts it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from jaxllm import own_process
from jaxllm.cli.settings import names_setting
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.sharding.wire import free_port

_STOP_SECONDS = 20
_PENDING = "jaxllm:compiles_pending"


@contextmanager
def child(arguments: list[str], config: EngineConfig, stdout: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run `jaxllm ARGUMENTS` with exactly `config`; yields the process and the file its stderr goes to.

    The configuration travels as a file only its owner can read, and is the child's only source of settings.
    """
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as directory:
        settings, log = Path(directory, "config.yaml"), Path(directory, "stderr.log")
        settings.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not names_setting(name)}
        command = own_process.command("jaxllm.cli.main", *arguments, "--config", str(settings))
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def failure(process: subprocess.Popen[bytes], log: Path) -> ConfigError:
    """The child's own last words."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("jaxllm: error: ") if lines else "it said nothing"
    return ConfigError(f"the measured process ended with exit code {process.wait()}: {last}")


@contextmanager
def server(config: EngineConfig, timeout: float) -> Iterator[str]:
    """Run `jaxllm serve` on a free port and yield its URL once it is ready and has nothing left to compile."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with child(["serve", "--host", "127.0.0.1", "--port", str(port)], config, subprocess.DEVNULL) as (process, log):
        deadline = time.monotonic() + timeout
        while not _ready(url):
            if process.poll() is not None:
                raise failure(process, log)
            if time.monotonic() > deadline:
                raise ConfigError(f"the server was not ready after {timeout:g} s (--ready-timeout)")
            time.sleep(0.2)
        yield url


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200 and _compiled(url)
    except httpx.TransportError:
        return False


def _compiled(url: str) -> bool:
    from prometheus_client.parser import text_string_to_metric_families

    metrics = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=5).raise_for_status().text)
    pending = [sample.value for metric in metrics if metric.name == _PENDING for sample in metric.samples]
    return bool(pending) and not any(pending)
