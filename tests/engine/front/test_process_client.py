"""The pipe between a front door and an engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.errors import EngineDeadError, InvalidRequestError
from tests.reference.tiny import write_checkpoint

FIELDS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 96, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "kv_cache_memory": "16MiB", "block_size": 8, "engine_process": True,
}  # fmt: skip
PATIENCE = 60.0
FOUR_TOKENS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny"))
    defaults = {"temperature": 1, "top_k": 64, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


def test_the_models_own_sampling_crosses_the_pipe(directory: Path) -> None:
    engine = AsyncLLM(model=str(directory), **FIELDS)

    async def run() -> int:
        async with asyncio.timeout(PATIENCE):
            outputs = [output async for output in engine.generate([1, 2, 3])]
        return len(outputs[-1].outputs[0].token_ids)

    try:
        assert asyncio.run(run()) >= 1
        assert engine.info.default_sampling.fields() == {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    finally:
        engine.shutdown()


def test_a_message_that_cannot_be_read_ends_the_engine_loudly_and_it_starts_again(directory: Path) -> None:
    engine = AsyncLLM(model=str(directory), **FIELDS)

    async def run() -> int:
        stream = engine.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
        await anext(stream)
        engine._streams.client._pipe.send_bytes(b"no message")  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="ValidationError"):
            async with asyncio.timeout(PATIENCE):
                async for _ in stream:
                    pass
        deadline = time.monotonic() + PATIENCE
        while engine.is_dead:
            assert time.monotonic() < deadline, "it did not start again"
            await asyncio.sleep(0.05)
        return len([delta async for _, delta in engine.stream([1, 2, 3], FOUR_TOKENS)])

    try:
        assert asyncio.run(run()) == 4
    finally:
        engine.shutdown()


def test_a_request_that_the_engine_could_not_read_is_refused_alone(directory: Path) -> None:
    engine = AsyncLLM(model=str(directory), **FIELDS)

    async def run() -> int:
        with pytest.raises(InvalidRequestError, match="priority"):
            await anext(engine.stream([1, 2, 3], FOUR_TOKENS, priority="high"))  # type: ignore[arg-type]
        return len([delta async for _, delta in engine.stream([1, 2, 3], FOUR_TOKENS)])

    try:
        assert asyncio.run(run()) == 4
    finally:
        engine.shutdown()
