"""One model over several processes: `python -m tests.support.several_processes JSON` is one of them.

Process 0 writes what it answers, or answers until it is ended; both end with the group. A `fault` says what a process
does wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.sharding.ports import free_port

LATER = 60
"""Steps after which all is compiled, since all requests are alike."""
ROOT = Path(__file__).parents[2]
FIELDS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8,
    "kv_cache_memory": "4MiB", "decode_buckets": (4,), "prefill_buckets": (32,), "cpu_kernels": "off",
    "enforce_eager": True,
}  # fmt: skip
"""Eager, so that nothing is compiled that no request asks for."""
EXTRAS: dict[str, Any] = {
    "enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "speculative_config": {"num_speculative_tokens": 2},
}  # fmt: skip
"""What requests of every kind ask for beyond that."""
HALVES: dict[str, Any] = {"tensor_parallel_size": 2}
"""How the model is parted, where nothing else is said."""
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 17, [5, 6, 7, 5, 6, 7, 5, 6]]


def answers(llm: Any, adapter: str) -> dict[str, Any]:
    """What a model says to requests of every kind."""
    from jaxllm import LoRARequest, SamplingParams
    from jaxllm.requests.structured_outputs import StructuredOutputs

    asked: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "sampled": {"temperature": 0.9, "seed": 3, "top_p": 0.95, "top_k": 40},
        "adjusted": {
            "temperature": 0.8, "seed": 4, "presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
            "logit_bias": {4: 2.0}, "min_p": 0.01,
        },
        "scored": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        "choice": {"temperature": 0.5, "seed": 5, "structured_outputs": StructuredOutputs(choice=["yes", "no way"])},
        "adapted": {"temperature": 0},
    }  # fmt: skip
    if not adapter:
        del asked["adapted"]
    said: dict[str, Any] = {}
    for name, params in asked.items():
        ends = {} if name == "choice" else {"ignore_eos": True}
        lora = [LoRARequest("one", 1, adapter), None, None, LoRARequest("one", 1, adapter)]
        outputs = llm.generate(
            PROMPTS,
            SamplingParams(max_tokens=12, **ends, **params),
            use_tqdm=False,
            **({"lora_request": lora} if name == "adapted" else {}),
        )
        said[name] = [list(output.outputs[0].token_ids) for output in outputs]
        if name == "scored":
            pairs = [zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True) for o in outputs]
            said["logprobs"] = [[found[token].logprob for token, found in pair] for pair in pairs]
    said["embedded"] = [output.outputs.embedding for output in llm.embed(PROMPTS)]
    return said


def variables() -> dict[str, str]:
    """The environment of a process that has one CPU device, and compiles quickly."""
    one = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    return (
        os.environ | one | {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
    )


@contextmanager
def running(*commands: tuple[list[str], dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """These processes, with what they print; all are gone at the end."""
    processes = []
    try:
        for command, environment in commands:
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def programs(
    model: Path,
    *,
    count: int = 2,
    out: str = "",
    adapter: str = "",
    fault: str = "",
    first: str = "",
    parts: dict[str, int] = HALVES,
    **fields: Any,
) -> Any:
    """The processes of a group, see `running`; all but the first have the fault, and that has what `_do_at` is told."""
    port = free_port()
    fields = fields | parts
    commands = []
    for number in range(count):
        place = {"num_processes": count, "process_id": number, "coordinator_address": f"127.0.0.1:{port}"}
        told = {"model": str(model), "out": out, "adapter": adapter, "fault": fault if number else first}
        command = [sys.executable, "-m", __name__, json.dumps(told | {"fields": FIELDS | fields | place})]
        commands.append((command, variables()))
    return running(*commands)


def _do_wrong(fault: str) -> None:
    """What a process does some steps after its start."""
    from jaxllm.engine.core.device import Device

    run, steps = Device.run, [0]

    def faulty(device: Device, key: Any, *vectors: Any) -> Any:
        steps[0] += 1
        if steps[0] == LATER and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if steps[0] == LATER and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if steps[0] == LATER and fault == "raise":
            raise RuntimeError("out of luck")
        output = run(device, key, *vectors)
        if steps[0] >= LATER and fault == "diverge" and hasattr(output, "tokens"):
            output = output._replace(tokens=np.asarray(output.tokens) + 1)
        return output

    Device.run = faulty  # type: ignore[method-assign]


def _do_at(place: str, what: str) -> None:
    """Kill or stop this process, or let no thread of Python run for ten seconds, at a place of its start."""
    from jaxllm.engine.scale.lockstep import meeting
    from jaxllm.engine.start import agreement, build

    module: Any = meeting._Meeting if place == "_take" else agreement if place == "join_processes" else build
    real = getattr(module, place)

    def wrong(*args: Any) -> Any:
        found = real(*args) if what == "hold" else None
        print("now", flush=True)
        if what == "hold":
            ctypes.PyDLL(None).sleep(10)
        else:
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        return found

    setattr(module, place, wrong)


def main(told: dict[str, Any]) -> None:
    from jaxllm import LLM

    if " at " in told["fault"]:
        _do_at(*reversed(told["fault"].split(" at ")))
    elif told["fault"]:
        _do_wrong(told["fault"])
    with LLM(told["model"], **told["fields"]) as llm:
        if told["out"]:
            Path(told["out"]).write_text(json.dumps(answers(llm, told["adapter"])))
            return
        from jaxllm import SamplingParams

        params = SamplingParams(max_tokens=12, ignore_eos=True)
        llm.generate(PROMPTS, params, use_tqdm=False)
        print("all is compiled", flush=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            llm.generate(PROMPTS, params, use_tqdm=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
