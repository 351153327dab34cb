"""Each process of a server is killed, stopped, starved and flooded in turn, while clients ask.

No answer may be wrong, nothing that a client was told of may be lost, and nothing may be left behind.
`CHAOS_SEED` chooses another order, which the run says; `CHAOS_SECONDS` is how long the long run takes. With `-s` it
prints what benchmarks/results/server.md shows.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.chaos.blows import BLOWS, Chaos
from tests.chaos.load import PROMPTS, Load
from tests.chaos.victim import PATIENCE, Victim, wait_until_still
from tests.serving.conftest import wait_for
from tests.serving.mixed_requests import write_model
from tests.serving.real_server import assert_idle

pytestmark = pytest.mark.programs

SEED = int(os.environ.get("CHAOS_SEED", "7"))
LONG_SECONDS = float(os.environ.get("CHAOS_SECONDS", "1200"))
MOST_RECOVERY = 60.0
"""Seconds, on a machine that does other things as well."""
SOME_MORE = 2
"""Open files and threads that may come and go."""
LINES = 40


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    victim = Victim(write_model(tmp_path / "model"), tmp_path)
    yield victim
    victim.end()


def run(victim: Victim, folder: Path, seconds: float, num_lines: int, struck: float) -> Chaos:
    """Strike once with each, then on until the time is up; then look for what must not be. For `struck` see Chaos."""
    load = Load(victim, SEED)
    load.learn()
    dice = random.Random(SEED)
    chaos = Chaos(victim, load, folder / "data", struck)
    client = openai.OpenAI(base_url=f"{victim.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)
    batch = submit(client, load, num_lines)
    load.start()
    until = time.monotonic() + seconds
    first = dice.sample(BLOWS, len(BLOWS))
    for blow in first:
        chaos.strike(blow, dice)
    while time.monotonic() < until:
        chaos.strike(dice.choice(BLOWS), dice)
    load.stop()
    assert not load.wrong, f"seed {SEED}: {load.wrong}"
    assert load.counts["right"] > len(PROMPTS), load.counts
    check_stored(client, load)
    check_batch(client, load, batch, num_lines, victim)
    check_leaks(victim, load, chaos, dice)
    assert not re.search(r"Traceback|lost|leak", victim.log.read_text()), victim.log.read_text()
    worst = max(max(seconds, default=0.0) for seconds in chaos.recoveries.values())
    print(f"\nseed {SEED}, {dict(load.counts)}\n{chaos.table()}")
    assert worst < MOST_RECOVERY
    return chaos


def submit(client: openai.OpenAI, load: Load, num_lines: int) -> str:
    content = "".join(json.dumps(line) + "\n" for line in load.lines(num_lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def check_stored(client: openai.OpenAI, load: Load) -> None:
    """Every response and every item that a client was told of is there, once."""
    for name, text in load.responses.items():
        assert client.responses.retrieve(name).output_text == text
    items = [item for item in client.conversations.items.list(load.conversation, limit=100)]
    texts = [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]
    assert len(texts) == len(set(texts)) and load.said <= set(texts)


def check_batch(client: openai.OpenAI, load: Load, batch: str, num_lines: int, victim: Victim) -> None:
    """Every line has one result, and it is right."""
    wait_for(lambda: client.batches.retrieve(batch).status == "completed", PATIENCE)
    done = client.batches.retrieve(batch)
    seen: list[int] = []
    for line in results(client, done.output_file_id):
        number = int(line["custom_id"])
        seen.append(number)
        assert load.is_right(number, line["response"]["body"]["choices"][0]["token_ids"]), line
    for line in results(client, done.error_file_id):
        seen.append(int(line["custom_id"]))
        assert may_fail(line), line
    assert sorted(seen) == list(range(num_lines))


def may_fail(line: dict[str, Any]) -> bool:
    """A line that was under way in too many crashes is not tried for ever."""
    text = str(line)
    return "crash" in text or "died 2 times" in text


def results(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(line) for line in client.files.content(file).text.splitlines()]


def check_leaks(victim: Victim, load: Load, chaos: Chaos, dice: random.Random) -> None:
    """What the front process holds is the same before and after blows that it survives."""

    def at_rest() -> dict[str, int]:
        wait_for(load.probe, PATIENCE)
        load.once(dice)
        assert_idle(victim.url)
        return wait_until_still(victim)

    for blow in (("engine", "flood"), ("template", "flood")):  # whatever is only made under load is there then
        chaos.strike(blow, dice)
    before = at_rest()
    for blow in (
        ("engine", "kill"),
        ("template", "kill"),
        ("template", "flood"),
        ("engine", "flood"),
        ("front", "flood"),
    ):
        chaos.strike(blow, dice)
    after = at_rest()
    assert all(after[what] <= before[what] + SOME_MORE for what in before), (before, after)
    victim.stop()


def test_a_short_run(victim: Victim, tmp_path: Path) -> None:
    chaos = run(victim, tmp_path, 0, LINES, 0.4)
    assert all(chaos.recoveries[blow] for blow in BLOWS)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_minutes(victim: Victim, tmp_path: Path) -> None:
    run(victim, tmp_path, LONG_SECONDS, 20 * LINES, 1.0)
