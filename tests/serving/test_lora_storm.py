"""Adapters are loaded, used and unloaded hundreds of times, beside a request without one, and memory stays flat."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from jaxllm import AsyncLLM
from tests.reference.peft_adapters import ADAPTERS, load_adapter_golden, write_adapter
from tests.reference.tiny import write_checkpoint
from tests.test_adapters import ADAPTED

pytestmark = pytest.mark.programs

NAMES = ("plain", "one_layer", "regex")
RANK = 256
"""Of the tables: an adapter's rows are 3 MB, so that a few that stay behind are seen."""
WARM = 24
SLACK = 45 * 2**20
"""What a process may grow by for other reasons: about fifteen adapters."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    model = write_checkpoint(ADAPTERS["plain"].base, tmp_path_factory.mktemp("model"))
    engine = AsyncLLM(model=str(model), **ADAPTED | {"max_lora_rank": RANK, "max_cpu_loras": 2})
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("rounds", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_memory_stays_flat(rounds: int, engine: AsyncLLM, listen: Callable[..., str], tmp_path: Path) -> None:
    folders = [str(write_adapter(name, tmp_path / name)) for name in NAMES]
    ids = load_adapter_golden("plain").prompt_token_ids
    base = listen(engine, enable_lora=True)
    with httpx.Client(base_url=base, timeout=60) as client, ThreadPoolExecutor(1) as pool:

        def answer(model: str) -> list[float]:
            body = {"model": model, "prompt": ids, "max_tokens": 4, "temperature": 0, "logprobs": 0, "ignore_eos": True}
            found = client.post("/v1/completions", json=body)
            found.raise_for_status()
            return list(found.json()["choices"][0]["logprobs"]["token_logprobs"])

        def turn(number: int) -> tuple[list[float], list[float]]:
            name = f"adapter-{number}"
            beside = pool.submit(answer, "fake")
            loaded = {"lora_name": name, "lora_path": folders[number % len(folders)]}
            client.post("/v1/load_lora_adapter", json=loaded).raise_for_status()
            said = answer(name)
            client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
            assert client.post("/v1/completions", json={"model": name, "prompt": ids}).status_code == 404
            return said, beside.result()

        first = [turn(number) for number in range(WARM)]
        held = _resident()
        later = [turn(number) for number in range(WARM, WARM + rounds)]
    grown = _resident() - held
    assert grown < SLACK, f"{rounds} adapters left {grown / 2**20:.0f} MiB behind"
    (one, plain), (two, _), (three, _) = first[:3]
    assert min(_apart(*pair) for pair in ((one, two), (two, three), (three, one), (one, plain))) > 0.01
    for number, (said, beside) in enumerate([*first, *later]):
        assert _apart(said, first[number % len(NAMES)][0]) < 1e-3 and _apart(beside, plain) < 1e-3
    assert client_names(base) == ["fake"]


def _apart(one: list[float], other: list[float]) -> float:
    return float(np.abs(np.subtract(one, other)).max())


def client_names(base: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{base}/v1/models").json()["data"]]


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)
