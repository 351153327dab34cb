"""SmolLM2 over three virtual devices, in the engine's own process, says what it says on one."""

import json
import os
import subprocess
import sys

from tests.reference import load_model_goldens

TOKENS = 24
PROMPTS = 3
SCRIPT = f"""
import asyncio, json, sys
from jaxllm import AsyncLLM, SamplingParams

async def main():
    engine = AsyncLLM(
        model="smollm2-135m", dtype="float32", tensor_parallel_size=3, engine_process=True, enforce_eager=True,
        max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory="256MiB",
        decode_buckets=(4,), prefill_buckets=(64,),
    )
    params = SamplingParams(temperature=0, max_tokens={TOKENS}, ignore_eos=True)
    async def run(ids):
        return [output.outputs[0].token_ids async for output in engine.generate(ids, params)][-1]
    try:
        print(json.dumps(await asyncio.gather(*(run(ids) for ids in json.loads(sys.argv[1])))))
    finally:
        engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_three_devices_give_the_golden_tokens(tmp_path):
    goldens = sorted(load_model_goldens("smollm2-135m").values(), key=lambda g: len(g.prompt_token_ids))[:PROMPTS]
    script = tmp_path / "three.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, script, json.dumps([g.prompt_token_ids for g in goldens])],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "3"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        check=True,
    )
    for golden, tokens in zip(goldens, json.loads(result.stdout), strict=True):
        sure = golden.sure_greedy_token_ids[:TOKENS]
        assert tokens[: len(sure)] == sure, golden.name
