"""What adapters cost: decodes with and without, in turns, in one process.

Three engines of one model: without adapters, with adapters switched on and none used, and with an adapter of its own
for every stream. Each round asks each of them for the same work; ratios are of tokens a second, to the first of them.

    python benchmarks/adapters.py [--model NAME] [--isq KIND] [--modules q_proj,v_proj] [--streams 8] [--rank 16]
        [--rounds 5] [--json FILE]

`--model llama-3.2-1b` is one of that shape with random weights, for which no files are needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from jaxllm.weights.adapters import save_adapter
from jaxllm.weights.source import resolve_model

PROMPT, TOKENS = 128, 128
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    },
}  # fmt: skip
"""Models with random weights."""
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapters(
    folder: Path, model: str, count: int, rank: int, modules: Sequence[str], load_format: Any
) -> list[LoRARequest]:
    """Random adapters for the matrices `modules` of every layer; all of them are PEFT's "all-linear"."""
    checkpoint = open_checkpoint(resolve_model(model), load_format)
    config = model_spec(checkpoint).config
    checkpoint.close()
    size, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden = config.intermediate_size
    shapes = {
        "self_attn.q_proj": (heads, size), "self_attn.k_proj": (kv, size), "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, heads), "mlp.gate_proj": (hidden, size), "mlp.up_proj": (hidden, size),
        "mlp.down_proj": (size, hidden),
    }  # fmt: skip
    found = []
    for number in range(count):
        dice, tensors = np.random.default_rng(number), {}
        for layer in range(config.num_layers):
            for module, (outputs, inputs) in shapes.items():
                if module.split(".")[1] not in modules:
                    continue
                name = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = dice.normal(size=(rank, inputs)).astype(np.float32) / inputs**0.5
                tensors[f"{name}.lora_B.weight"] = 0.01 * dice.normal(size=(outputs, rank)).astype(np.float32)
        place = folder / str(number)
        place.mkdir()
        save_adapter(place, tensors, {"r": rank, "lora_alpha": rank, "target_modules": list(modules)})
        found.append(LoRARequest(f"adapter-{number}", number + 1, place))
    return found


def start(model: str, streams: int, **fields: Any) -> LLM:
    llm = LLM(model, max_num_seqs=streams, max_model_len=512, enable_prefix_caching=False, **fields)
    while llm.stats().compiles_pending:
        time.sleep(0.2)
    return llm


def decode_rate(llm: LLM, streams: int, lora: Sequence[LoRARequest | None]) -> float:
    """Tokens a second of all streams together: all but their first ones, over the time that they took on top."""
    vocabulary = llm.info.vocab_size
    prompts = [[(97 * stream + token) % vocabulary for token in range(PROMPT)] for stream in range(streams)]
    seconds = []
    for tokens in (1, TOKENS):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=list(lora))
        seconds.append(time.perf_counter() - begin)
    return streams * (TOKENS - 1) / (seconds[1] - seconds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--isq", help="quantize the model's weights")
    parser.add_argument("--modules", default=",".join(LINEARS), help="which matrices adapters are for (default: all)")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    streams = arguments.streams
    modules = arguments.modules.split(",")
    with tempfile.TemporaryDirectory() as folder:
        model, fields = arguments.model, {"isq": arguments.isq, "load_format": "auto"}
        if model in SHAPES:
            model = str(Path(folder) / "model")
            Path(model).mkdir()
            (Path(model) / "config.json").write_text(json.dumps(SHAPES[arguments.model]))
            fields |= {"load_format": "dummy", "skip_tokenizer_init": True}
        adapters = write_adapters(Path(folder), model, streams, arguments.rank, modules, fields["load_format"])
        places = {"enable_lora": True, "max_loras": streams, "max_lora_rank": arguments.rank}
        plain, adapted = start(model, streams, **fields), start(model, streams, **fields, **places)
        none: list[LoRARequest | None] = [None] * streams
        cases = {
            "without adapters": (plain, none),
            "switched on, unused": (adapted, none),
            "one adapter for all": (adapted, [adapters[0]] * streams),
            "an adapter a stream": (adapted, list(adapters)),
        }
        for llm, lora in cases.values():
            decode_rate(llm, streams, lora)
        rates: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.rounds):
            for name, (llm, lora) in cases.items():
                rates[name].append(decode_rate(llm, streams, lora))
        plain.shutdown()
        adapted.shutdown()
    machine = describe_machine()
    kept = arguments.isq or "as stored"
    print(f"{arguments.model}, weights {kept}, {streams} streams, rank {arguments.rank} for {', '.join(modules)}")
    print(f"{machine['cores']} cores {machine['processor']}")
    first = rates["without adapters"]
    for name, found in rates.items():
        ratio = statistics.median(a / b for a, b in zip(found, first, strict=True))
        print(f"{name:22} {statistics.median(found):8,.0f} tok/s   {ratio:.2f}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine, **vars(arguments), "json": None, "rates": rates}, default=str)
        )


if __name__ == "__main__":
    main()
