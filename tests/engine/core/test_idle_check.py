"""A page pool that is broken on purpose: the engine says so when it is idle, and goes on."""

from __future__ import annotations

import logging

import pytest

from jaxllm.engine.core.loop import FULL_CHECK_SECONDS, IdleCheck
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.registry import Features
from jaxllm.engine.features.states import StatesFeature
from tests.engine.core.test_core import Engine, tokens_of

PAGES = 39
"""Of the engine's pool, but page 0."""


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    caplog.clear()
    return found


def run(engine: Engine, name: str) -> list[int]:
    """What an engine says whose pool may have lost pages."""
    engine.add(name, [2, 2, 1], max_tokens=6)
    said = []
    while engine.core.has_work:
        said += engine.core.turn()
    return tokens_of(said)


def test_a_page_that_is_lost_is_said_once_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    answer = run(engine, "a")
    assert errors(caplog) == []
    engine.pool.allocate(2)  # by nobody
    assert run(engine, "b") == answer
    [error] = errors(caplog)
    assert "reference counts do not match the pages held" in error and f"2 of its {PAGES} pages are held" in error
    assert run(engine, "c") == answer and errors(caplog) == []
    engine.pool.allocate(1)
    run(engine, "d")
    [error] = errors(caplog)
    assert f"3 of its {PAGES} pages are held" in error


def test_nothing_is_said_while_a_request_is_left(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.pool.allocate(1)
    engine.add("a", [2, 2, 1], max_tokens=6)
    engine.core.turn()
    engine.core.turn()
    assert engine.core.has_work and errors(caplog) == []


def test_an_index_that_is_wrong_is_found_within_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("jaxllm.engine.core.loop.time.monotonic", lambda: clock[0])
    pool = PagePool(PAGES + 1, 4)
    check = IdleCheck(pool, Features())
    check.run()
    pool._page_of[None, (1, 2, 3, 4)] = 7
    check.run()
    assert errors(caplog) == []
    clock[0] += FULL_CHECK_SECONDS
    check.run()
    [error] = errors(caplog)
    assert "prefix index is inconsistent" in error and f"0 of its {PAGES} pages" in error


def test_a_row_of_states_that_is_lost_is_found(caplog: pytest.LogCaptureFixture) -> None:
    states = StatesFeature(5, 2)
    states.cache.reserve()
    IdleCheck(PagePool(PAGES + 1, 4), Features([states])).run()
    [error] = errors(caplog)
    assert "a row of states was lost" in error
