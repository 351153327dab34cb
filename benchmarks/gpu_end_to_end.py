"""The slices of `gpu.py` that run whole requests: in process, and through a server."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_slice import LLAMA_8B, TINY, Slice, model_config, model_folder

QWEN3_06B = LLAMA_8B.with_name("Qwen3-0.6B.json")
START_SECONDS = 300
PROMPTS_A_STREAM = 4
VOCABULARY = TINY["vocab_size"] - 1
"""Prompts are random ids up to this one."""
SERVER_NEEDS = (
    "aiosqlite", "cyclopts", "einops", "fastapi", "httptools", "httpx", "httpx2", "jaxtyping", "jinja2", "llguidance",
    "mcp", "msgspec", "prometheus_client", "pydantic", "python_multipart", "rich", "sqlalchemy", "uvicorn", "yaml",
)  # fmt: skip
"""Modules of other packages that `jaxllm serve` and `jaxllm bench serve` import, if they come from those packages."""


def nano_vllm_load(tiny: bool = False) -> tuple[list[list[int]], list[int]]:
    """The prompts and output lengths that nano-vllm's bench.py draws: 142,827 tokens in, 133,966 out."""
    source = random.Random(0)
    count, least, most, last = (8, 4, 16, VOCABULARY) if tiny else (256, 100, 1024, 10_000)
    prompts = [[source.randint(0, last) for _ in range(source.randint(least, most))] for _ in range(count)]
    return prompts, [source.randint(least, most) for _ in range(count)]


def load(given: argparse.Namespace) -> tuple[tuple[int, ...], int, int]:
    """Streams, tokens of a prompt and tokens of an answer, of `serve` and of the same in process."""
    return ((1, 2), 8, 4) if given.tiny else ((1, 16, 64), 1024, 128)


def measure_engine(run: Slice) -> None:
    """nano-vllm's prompts with Qwen3-0.6B's shape, sampled as there; then the load of `serve` without a server."""
    if run.wants(what="nano-vllm"):
        prompts, lengths = nano_vllm_load(run.given.tiny)
        with started(run.given, QWEN3_06B, 64 if run.given.tiny else 4096) as llm:
            run.report(what="nano-vllm", **generate(llm, prompts, lengths, 0.6))
    streams, input_len, output_len = load(run.given)
    cells = [count for count in streams if run.wants(what="in process", streams=count)]
    if not cells:
        return
    source = random.Random(0)
    with started(run.given, LLAMA_8B, input_len + output_len) as llm:
        for count in cells:
            prompts = [[source.randint(0, VOCABULARY) for _ in range(input_len)] for _ in range(count)]
            run.report(what="in process", streams=count, **generate(llm, prompts, [output_len] * count, 0))


@contextmanager
def started(given: argparse.Namespace, model: Path, longest: int) -> Iterator[Any]:
    """An LLM of that shape in this process, with everything compiled; its memory is free afterwards."""
    from jaxllm.llm import LLM

    began = time.perf_counter()
    llm = LLM(model=str(model_folder(given, "in-process", model)), **settings(given, longest))
    try:
        while llm.stats().compiles_pending:
            time.sleep(0.1)
        print(f"started and compiled in {time.perf_counter() - began:.0f} s", flush=True)
        yield llm
    finally:
        llm.shutdown()
        del llm
        gc.collect()


def settings(given: argparse.Namespace, longest: int) -> dict[str, Any]:
    """Of the engine: its defaults but for what a dummy model without a tokenizer needs."""
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": longest, "isq": given.isq}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_memory": 2**22, "cpu_kernels": "off"}
    sizes |= {"decode_buckets": frozenset({4}), "prefill_buckets": frozenset({32})}
    return common | {"compile_cache_dir": given.out / "compile"} | (sizes if given.tiny else {})


def generate(llm: Any, prompts: list[list[int]], lengths: list[int], temperature: float) -> dict[str, Any]:
    """What it took to answer all prompts at once, each with its number of tokens."""
    from jaxllm.requests.sampling import SamplingParams

    def ask(prompts: list[list[int]], lengths: list[int]) -> list[Any]:
        params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in lengths]
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    ask([prompt[::-1] for prompt in prompts[:8]], [4] * len(prompts[:8]))
    before, began = llm.stats(), time.perf_counter()
    answers = ask(prompts, lengths)
    seconds, after = time.perf_counter() - began, llm.stats()
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    steps = after.num_steps - before.num_steps
    host = after.step_host_seconds - before.step_host_seconds
    return {
        "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts)), "output_tokens": made, "seconds": seconds,
        "toks": made / seconds, "steps": steps, "host_ms_a_step": host / steps * 1e3,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "unforeseen_compiles": after.compiles_unforeseen - before.compiles_unforeseen,
    }  # fmt: skip


def measure_serve(run: Slice) -> None:
    """A server with a dummy 8B, and `jaxllm bench serve` for each number of streams."""
    if missing := [name for name in SERVER_NEEDS if not installed(name)]:
        return print(f"serve: not measured; not installed: {', '.join(missing)} (pip install .)")
    streams, input_len, output_len = load(run.given)
    cells = [count for count in streams if run.wants(what="serve", streams=count)]
    if not cells:
        return None
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    from jaxllm.cli.bench.server import server
    from jaxllm.config import ServeConfig

    folder = model_folder(run.given, "served")
    size = model_config(run.given)["vocab_size"]
    write_tokenizer(folder / "tokenizer.json", size)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": size - 1}))
    config = ServeConfig(
        model=str(folder),
        data_dir=folder / "data",
        **settings(run.given, input_len + output_len) | {"skip_tokenizer_init": False},
    )
    with server(config, START_SECONDS) as url:
        wait_until_compiled(url)
        for count in cells:
            command = [
                "bench", "serve", "--url", url, "--num-prompts", PROMPTS_A_STREAM * count, "--input-len", input_len,
                "--output-len", output_len, "--max-concurrency", count, "--vocab-size", VOCABULARY, "--json",
                folder / "result.json",
            ]  # fmt: skip
            program = [sys.executable, "-m", "jaxllm.cli.main", *map(str, command)]
            done = subprocess.run(program, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"serve: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
            (result,) = json.loads((folder / "result.json").read_text())["results"]
            run.report(what="serve", streams=count, **result)
    return None


def write_tokenizer(file: Path, size: int) -> None:
    """A byte-level one with some text for every token: without text a server has nothing to stream."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [f"t{number}" for number in range(len(alphabet), size)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(file))


def installed(name: str) -> bool:
    """Whether the module comes from its own package, and not from our stand-ins."""
    spec = find_spec(name)
    return spec is not None and "standins" not in (spec.origin or "")


def wait_until_compiled(url: str) -> None:
    """A server answers as soon as it can, and compiles the rest behind that."""
    pending = re.compile(r"^jaxllm:compiles_pending\S* (\S+)", re.MULTILINE)
    while True:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            if not float(pending.findall(answer.read().decode())[0]):
                return
        time.sleep(0.5)
