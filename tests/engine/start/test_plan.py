"""How many pages a plan makes of the memory there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxllm import EngineConfig
from jaxllm.engine.start.plan import EnginePlan, Platform, plan_engine
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
    assert dataclasses.asdict(again) == dataclasses.asdict(first)
