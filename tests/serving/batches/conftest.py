from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.batches.running import Running
from tests.serving.fake_engine import FakeEngine


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    servers: list[Running] = []

    def make(engine: FakeEngine | None = None, **settings: Any) -> Running:
        servers.append(Running(engine or FakeEngine(), tmp_path / "data", **settings))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
