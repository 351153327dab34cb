"""A server says at its start that anybody may use it, and which settings of another server it does not honour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError
from jaxllm.serving import server

ELSEWHERE = {
    "OLLAMA_HOST": "0.0.0.0", "VLLM_PORT": "8000", "LLAMA_ARG_CTX_SIZE": "4096", "VLLM_API_KEY": "k", "PATH": "/bin",
    "LLAMA_API_KEY": "k", "OLLAMA_MODELS": "/models",
}  # fmt: skip
SERVICE = {
    "VLLM_PORT": "tcp://10.0.0.7:80", "VLLM_SERVICE_HOST": "10.0.0.7", "VLLM_SERVICE_PORT_HTTP": "80",
    "VLLM_PORT_80_TCP": "tcp://10.0.0.7:80", "VLLM_PORT_80_TCP_ADDR": "10.0.0.7",
}  # fmt: skip


def warned(caplog: pytest.LogCaptureFixture, environ: dict[str, str], **settings: Any) -> list[str]:
    caplog.clear()
    server.warn_of_open_doors(ServeConfig(**settings).of_server, environ)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gpu7.example"])
def test_a_public_address_without_a_key_is_warned_of(caplog: pytest.LogCaptureFixture, host: str) -> None:
    [line] = warned(caplog, {}, host=host)
    assert line.startswith(f"host is {host} and there is no API key: everybody who reaches this address may use")


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"host": "::1"}, {"host": "localhost"}, {"uds": Path("/run/s.sock")}, {"host": "0.0.0.0", "api_key": "k"},
        {"host": "0.0.0.0", "api_key_file": Path("/keys.yaml")}, {"host": "0.0.0.0", "ssl_cert_reqs": 2},
    ],
)  # fmt: skip
def test_a_server_that_asks_who_calls_or_is_for_this_machine_says_nothing(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    assert warned(caplog, SERVICE, **settings) == []


def test_variables_of_other_servers_are_told_in_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, ELSEWHERE) == [
        "LLAMA_ARG_CTX_SIZE is set: it stands for --max-model-len=4096 where that is not given",
        "OLLAMA_HOST is set: it stands for --host=0.0.0.0 --port=11434 where that is not given",
        "OLLAMA_MODELS is set: see --download-dir; models of ollama are not read",
        "VLLM_PORT is set: processes of an engine find each other by docs/scale.md",
    ]


def test_a_start_warns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    with pytest.raises(ConfigError, match="data_dir is"):
        server.serve(ServeConfig(host="0.0.0.0", port=0, data_dir=Path("/dev/null/data")))
    assert "host is 0.0.0.0" in caplog.text and "VLLM_NO_USAGE_STATS is set: " in caplog.text
