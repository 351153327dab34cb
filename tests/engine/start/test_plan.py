"""How many pages a plan makes of the memory there is."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxllm import EngineConfig, compat
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.engine.start.plan import EnginePlan
from jaxllm.engine.start.platform import Platform
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights

GIB = 2**30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    long = tiny_config("llama_gqa") | {"max_position_embeddings": 4096}
    return save_checkpoint(long, tiny_weights("llama_gqa"), tmp_path_factory.mktemp("tiny"))


def plan(directory: Path, free: int = 64 * GIB, **fields: object) -> EnginePlan:
    config = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4096} | fields
    return plan_engine(EngineConfig(model=str(directory), **config), Platform("cpu", 1, None, free))


def test_memory_that_differs_by_little_makes_the_same_plan(directory: Path) -> None:
    """Its sizes are shapes of what is compiled."""
    first = plan(directory, kv_cache_memory=50_000_000)
    assert plan(directory, kv_cache_memory=50_100_000) == first
    assert plan(directory, kv_cache_memory=60_000_000).num_pages > first.num_pages


def test_little_memory_is_left_out(directory: Path) -> None:
    page = plan(directory).kv_bytes_per_token * 8
    for pages in (40, 63, 64, 127, 255, 1000, 4095, 6047):
        used = plan(directory, kv_cache_memory=pages * page, max_model_len=64).num_pages / pages
        assert 1 - 1 / 32 < used <= 1, pages


def test_the_log_says_what_takes_memory_and_what_changes_it(directory: Path) -> None:
    _, memory, _ = plan(directory, kv_cache_memory=50_000_000).summary().splitlines()
    assert "weights " in memory and "isq" in memory
    assert "KV cache up to 47" in memory and "kv_cache_memory" in memory
    assert "max_num_batched_tokens" in memory
    assert "the program itself 600 MiB or more of host memory" in memory


@pytest.mark.parametrize("seqs", [1, 3])
def test_rounding_takes_away_no_context_that_fits(directory: Path, seqs: int) -> None:
    page = plan(directory).kv_bytes_per_token * 8
    for length in (504, 1000):
        exactly = (length // 8 + 1) * page
        made = plan(directory, kv_cache_memory=exactly, max_model_len=length, max_num_seqs=seqs)
        assert made.max_model_len == length and not made.notes
        all_of_them = plan(directory, kv_cache_memory=GIB, max_model_len=length, max_num_seqs=seqs)
        assert all_of_them.kv_tokens == seqs * length


@pytest.mark.parametrize("free", [200_000_000, 333_333_333, 5 * GIB, 64 * GIB])
@pytest.mark.parametrize("seqs", [1, 16, 4096])
def test_an_engine_that_is_told_its_memory_plans_the_same_again(directory: Path, free: int, seqs: int) -> None:
    """As one that is started again is, when less is free."""
    first = plan(directory, free, max_num_seqs=seqs)
    again = plan(directory, free // 2, max_num_seqs=seqs, kv_cache_memory=first.kv_bytes)
    assert dataclasses.replace(again, room_bytes=first.room_bytes) == first


def gpu(directory: Path, limit: int, total: int, **fields: object) -> EnginePlan:
    config = EngineConfig(model=str(directory), dtype="float32", attention_backend="reference", **fields)
    return plan_engine(config, Platform("gpu", 1, limit, 64 * GIB, total))


def test_a_share_of_an_accelerators_memory_is_of_all_it_has(directory: Path) -> None:
    """XLA takes three quarters of it by default: a share of that would be a share of a share."""
    for limit, total, expected in ((0.95 * GIB, GIB, 0.9 * GIB), (0.75 * GIB, GIB, 0.75 * GIB)):
        plan = gpu(directory, int(limit), total, gpu_memory_utilization=0.9)
        used = plan.num_pages * plan.page_size * plan.kv_bytes_per_token + plan.weight_bytes + plan.workspace_bytes
        assert 1 - 1 / 32 < used / expected <= 1


@pytest.mark.parametrize(
    ("environment", "running", "share"),
    [({}, False, "0.95"), ({}, True, None), ({"XLA_CLIENT_MEM_FRACTION": ".5"}, False, ".5"),
     ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, False, None)],
)  # fmt: skip
def test_xla_is_told_how_much_it_may_take(monkeypatch, environment, running, share) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compat.xla_bridge, "backends_are_initialized", lambda: running)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # nothing of it stays
    compat.share_device_memory(0.9)
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == share
    taken = float(share or environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 8 * GIB})
    assert compat.device_memory(device) == (8 * GIB, int(8 * GIB / taken))
