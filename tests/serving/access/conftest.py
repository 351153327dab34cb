"""A server with a file of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from jaxllm.serving.access.keys import hash_of
from tests.serving.fake_engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def write_keys(path: Path, **keys: dict[str, Any]) -> Path:
    """A file of keys: `alice` is let in by "key-of-alice"."""
    entries = {name: {"hash": hash_of(f"key-of-{name}")} | fields for name, fields in keys.items()}
    path.write_text(yaml.safe_dump(entries))
    return path


def key(name: str) -> dict[str, str]:
    """Headers of a request with the key of that name."""
    return {"Authorization": f"Bearer key-of-{name}"}


class Keyed:
    """A client of a server with a file of keys, whose requests come in somebody's name."""

    def __init__(self, client: TestClient, path: Path):
        self.client = client
        self.path = path

    def get(self, name: str, path: str, **arguments: Any) -> Any:
        return self.client.get(path, headers=key(name), **arguments)

    def post(self, name: str, path: str, body: Any = None, **arguments: Any) -> Any:
        return self.client.post(path, headers=key(name), json={} if body is None else body, **arguments)

    def delete(self, name: str, path: str) -> Any:
        return self.client.delete(path, headers=key(name))

    @property
    def state(self) -> Any:
        return self.client.app.state.server  # type: ignore[attr-defined]


@pytest.fixture
def keyed(make_client: Callable[..., TestClient], tmp_path: Path) -> Iterator[Callable[..., Keyed]]:
    def make(keys: dict[str, dict[str, Any]], engine: FakeEngine | None = None, **settings: Any) -> Keyed:
        path = write_keys(tmp_path / "keys.yaml", **keys)
        return Keyed(make_client(engine or FakeEngine(), api_key_file=path, **settings), path)

    yield make
