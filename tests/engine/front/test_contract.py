"""What an AsyncLLM promises, held against the real one and against the one that the server's tests stand on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import AsyncLLM, SamplingParams
from tests.reference.tiny import write_checkpoint

FIELDS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "kv_cache_memory": "16MiB", "block_size": 16,
}  # fmt: skip
PATIENCE = 60.0
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny"))
    engine = AsyncLLM(model=str(path), **FIELDS)
    yield engine
    engine.shutdown()


def run(scenario: Any) -> Any:
    async def in_time() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await scenario

    return asyncio.run(in_time())


@pytest.mark.parametrize("n", [1, 2])
def test_aborting_a_request_leaves_those_alone_whose_name_begins_like_it(engine: AsyncLLM, n: int) -> None:
    async def scenario() -> list[str | None]:
        ended = [engine.stream([1, 2, 3], LONG, request_id=name) for name in ("a", "a-b", "a-c")]
        ended[0] = engine.stream([1, 2, 3], SamplingParams(n=n, temperature=0, max_tokens=200), request_id="a")
        for stream in ended:
            await anext(stream)
        await engine.abort("a")

        async def reason(stream: Any) -> str | None:
            return [delta.finish_reason async for _, delta in stream][-1]

        return await asyncio.gather(*map(reason, ended))

    assert run(scenario()) == ["abort", "length", "length"]
