"""One SIGHUP to a running server has the keys read again and the audit log opened again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.serving.access.conftest import key, write_keys
from tests.serving.conftest import wait_for
from tests.serving.http.test_tls import Started, serve

pytestmark = pytest.mark.programs

__all__ = ["serve"]


def test_sighup(serve: Callable[..., Started], tmp_path: Path) -> None:
    keys, audit, moved = (tmp_path / name for name in ("keys.yaml", "audit.jsonl", "audit.jsonl.1"))
    server = serve(api_key_file=write_keys(keys, alice={}), audit_log=audit)

    def status(name: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers=key(name), timeout=20).status_code

    assert (status("alice"), status("bob")) == (200, 401)
    wait_for(lambda: audit.read_text().count("\n") == 2)
    write_keys(keys, bob={})
    audit.rename(moved)
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: status("bob") == 200)
    assert status("alice") == 401
    wait_for(lambda: audit.exists() and '"key": "bob"' in audit.read_text())
    assert '"key": "alice"' in moved.read_text()
