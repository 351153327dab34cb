"""What probes are told of an engine that works."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine


def test_health_tells_how_long_ago_the_last_step_was(listen: Callable[..., str]) -> None:
    engine = FakeEngine(delay=0.3)
    url = listen(engine)

    def ages() -> dict[str, float]:
        found: dict[str, float] = httpx.get(f"{url}/health").json().get("step_ages", {})
        return found

    assert ages() == {}
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=20) as response:
        arriving = response.iter_bytes()
        next(arriving)
        engine.delay = 3600.0  # the next step never ends
        first = ages()["fake"]
        wait_for(lambda: ages()["fake"] > first + 0.5)
    wait_for(lambda: ages() == {})
