"""The server over TLS, with certificates that are made here."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import trustme

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.http.listening import make_context
from tests.serving import fake_engine
from tests.serving.conftest import wait_for

pytestmark = pytest.mark.programs

ROOT = Path(fake_engine.__file__).parents[2]
HOST = "127.0.0.1"


class Started(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    log: Path


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """A server in a process of its own, with these settings."""
    processes = []

    def start(**settings: Any) -> Started:
        log = tmp_path / "log"
        named = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        environment = os.environ | {"FAKE_SETTINGS": json.dumps({"data_dir": str(tmp_path / "data")} | named)}
        command = [sys.executable, "-m", fake_engine.__name__, "0", "0", "1"]
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT,
                env=environment,
            )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving fake on http"), (line, log.read_text())
        return Started(process, line.split(" on ")[1].split("/v1")[0], log)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def write(path: Path, certificate: trustme.LeafCert) -> Path:
    """The key and the certificates in one file."""
    certificate.private_key_and_cert_chain_pem.write_to_path(path)
    return path


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


def serial(url: str, context: ssl.SSLContext) -> int:
    """Of the certificate that a new connection is shown."""
    with httpx.Client(verify=context) as client, client.stream("GET", f"{url}/livez") as response:
        tls = response.extensions["network_stream"].get_extra_info("ssl_object")
        return int(tls.getpeercert()["serialNumber"], 16)


def test_openais_sdk_over_https(serve: Callable[..., Started], authority: trustme.CA, tmp_path: Path) -> None:
    server = serve(ssl_certfile=write(tmp_path / "server.pem", authority.issue_cert(HOST)))
    assert server.url.startswith("https://")
    with httpx.Client(verify=trusting(authority)) as http:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0)
        chunks = client.completions.create(model="fake", prompt="Hi", stream=True, max_tokens=50)
        assert "".join(chunk.choices[0].text for chunk in chunks) == fake_engine.REPLY
    with httpx.Client(verify=trusting(trustme.CA())) as http, pytest.raises(httpx.ConnectError):
        http.get(f"{server.url}/livez")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url.replace('https', 'http')}/livez")


def test_a_certificate_and_its_key_may_be_two_files(
    serve: Callable[..., Started], authority: trustme.CA, tmp_path: Path
) -> None:
    made = authority.issue_cert(HOST)
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    for at, pem in enumerate(made.cert_chain_pems):
        pem.write_to_path(tmp_path / "server.pem", append=at > 0)
    server = serve(ssl_certfile=tmp_path / "server.pem", ssl_keyfile=tmp_path / "key.pem")
    assert httpx.get(f"{server.url}/livez", verify=trusting(authority)).status_code == 200


def test_sighup_reads_the_certificate_again_and_keeps_it_where_the_new_one_is_wrong(
    serve: Callable[..., Started], authority: trustme.CA, tmp_path: Path
) -> None:
    file, context = tmp_path / "server.pem", trusting(authority)
    server = serve(ssl_certfile=write(file, authority.issue_cert(HOST)))
    first = serial(server.url, context)
    write(file, authority.issue_cert(HOST))
    assert serial(server.url, context) == first
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: serial(server.url, context) != first)
    second = serial(server.url, context)
    file.write_text("nothing")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the certificate stays as it is: ssl_certfile is" in server.log.read_text())
    assert serial(server.url, context) == second


def test_clients_may_need_a_certificate(serve: Callable[..., Started], authority: trustme.CA, tmp_path: Path) -> None:
    clients = trustme.CA()
    clients.cert_pem.write_to_path(tmp_path / "clients.pem")
    server = serve(
        ssl_certfile=write(tmp_path / "server.pem", authority.issue_cert(HOST)),
        ssl_ca_certs=tmp_path / "clients.pem",
        ssl_cert_reqs=2,
    )
    known, unknown, none = trusting(authority), trusting(authority), trusting(authority)
    known.load_cert_chain(write(tmp_path / "known.pem", clients.issue_cert("me@example.org")))
    unknown.load_cert_chain(write(tmp_path / "unknown.pem", trustme.CA().issue_cert("me@example.org")))
    assert httpx.get(f"{server.url}/livez", verify=known).status_code == 200
    for context in (unknown, none):
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/livez", verify=context)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ssl_certfile": "none.pem"}, "ssl_certfile is 'none.pem': no such file or directory"),
        ({"ssl_certfile": "text.pem"}, "ssl_certfile is 'text.pem': it must hold a certificate and its key in PEM"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "other.pem"}, "and ssl_keyfile 'other.pem': the key is not the"),
        ({"ssl_certfile": "secret.pem"}, "the key is encrypted; it must be one without a password"),
        ({"ssl_certfile": "server.pem", "ssl_ca_certs": "text.pem", "ssl_cert_reqs": 2}, "ssl_ca_certs is 'text.pem'"),
        ({"ssl_certfile": "server.pem", "ssl_cert_reqs": 1}, "ssl_cert_reqs is 1, which needs ssl_ca_certs too"),
        ({"ssl_keyfile": "other.pem"}, "ssl_keyfile is for TLS, which needs ssl_certfile too"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs is for TLS, which needs ssl_certfile too"),
    ],
)
def test_wrong_files_are_one_line(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = authority.issue_cert(HOST)
    write(Path("server.pem"), made)
    authority.issue_cert(HOST).private_key_pem.write_to_path("other.pem")
    Path("text.pem").write_text("nothing")
    Path("secret.pem").write_bytes(_encrypted(made) + made.cert_chain_pems[0].bytes())
    with pytest.raises(ConfigError) as error:
        make_context(ServerConfig(**settings))
    assert problem in str(error.value) and "\n" not in str(error.value)


def _encrypted(certificate: trustme.LeafCert) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


def test_without_a_certificate_the_server_speaks_http() -> None:
    assert make_context(ServerConfig()) is None
