"""The simulation of many replicas: every request is answered once, and caches hold what they must hold."""

from __future__ import annotations

import pytest

from benchmarks import fleet


def test_one_replica_computes_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TURN_PAGES", (2, 2))
    monkeypatch.setattr(fleet, "ANSWER_PAGES", (3, 3))
    slowly = ["--replicas", "1", "--requests", "60", "--seconds", "1e6", "--systems", "1"]
    ran = fleet.Fleet(fleet.parse(slowly), fleet.prefix_first)
    ran.run()
    (server,) = ran.servers
    assert server.requests == len(ran.first_tokens) == 60
    assert server.prompt - server.cached == fleet.SYSTEM_PAGES + 2 * 60, "the system prompt and what people said"
    assert server.pool.num_cached == fleet.SYSTEM_PAGES + (2 + 3) * 60


def test_prefixes_are_found_more_often_where_they_decide_and_no_replica_does_it_all() -> None:
    arguments = fleet.parse(["--replicas", "4", "--requests", "800", "--seconds", "100", "--systems", "20"])
    found = {rule: fleet.measure(arguments, rule) for rule in fleet.RULES}
    assert {one["requests"] for one in found.values()} == {800}
    others = [one["cached_share"] for rule, one in found.items() if rule != "prefix"]
    assert found["prefix"]["cached_share"] > max(others) + 0.1
    assert all(one["busiest"] < 2 for one in found.values())


def test_few_places_make_requests_wait() -> None:
    arguments = fleet.parse(["--replicas", "2", "--requests", "300", "--seconds", "20", "--max-num-seqs", "2"])
    found = fleet.measure(arguments, "least")
    assert found["requests"] == 300 and found["waited_share"] > 0.5
    assert found["first_token_seconds"][1] > found["wait_seconds_p99"] > 1
