"""Images through models of real shapes with random weights: the first answer, the second, and what others wait.

    python -m benchmarks.images smolvlm-256m qwen3-vl-2b

A megapixel and a photograph of twelve are shown to an engine: it is timed until the first token, again when the image
is known, and with as many tokens of text. Then four photographs come while another request decodes, whose longest gap
between two tokens' arrivals is compared with that of a time without any. Tables are written to results/images.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models

from benchmarks.machine import describe_machine
from jaxllm import LLM, SamplingParams
from jaxllm.engine.doors.streams import Stream
from jaxllm.engine.messages import EngineRequest

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SMOLVLM_TEXT = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280,
    "max_position_embeddings": 8192, "rope_theta": 100000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
QWEN3_TEXT = {
    "model_type": "qwen3_vl_text", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 5000000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smolvlm-256m": (
        {"model_type": "smolvlm", "image_token_id": 100, "scale_factor": 4, "text_config": SMOLVLM_TEXT,
         "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                           "num_attention_heads": 12, "image_size": 512, "patch_size": 16}},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, **HALF},
    ),
    "qwen3-vl-2b": (
        {"model_type": "qwen3_vl", "image_token_id": 100, "vision_start_token_id": 101, "vision_end_token_id": 102,
         "tie_word_embeddings": True, "text_config": QWEN3_TEXT,
         "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16,
                           "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]}},
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, **HALF},
    ),
}  # fmt: skip
SIZES = {"1 megapixel": (1024, 1024), "12 megapixels": (3000, 4000)}
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def write_model(shape: str, folder: Path) -> None:
    """A folder with a shape's configuration, and a tokenizer that knows images and numbers."""
    config, options = SHAPES[shape]
    (folder / "config.json").write_text(json.dumps({"architectures": [""], **config}))
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(100)}, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def picture(size: tuple[int, int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def prompt(image: np.ndarray) -> dict[str, Any]:
    return {"prompt_token_ids": [5, 100, 7], "multi_modal_data": {"image": image}}


def seconds(llm: LLM, asked: Any) -> tuple[float, int]:
    """Until the first token, and the prompt's tokens."""
    began = time.perf_counter()
    (output,) = llm.generate([asked], ONE, use_tqdm=False)
    return time.perf_counter() - began, len(output.prompt_token_ids)


def gaps(llm: LLM, tokens: int) -> list[float]:
    """Milliseconds between arrivals of a request that decodes."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = EngineRequest(request_id="other", prompt_token_ids=[3] * 10, sampling_params=params)
    with Stream(llm._streams, [request]) as stream:
        times = [time.perf_counter() for _ in stream]
    return [1000 * (b - a) for a, b in pairwise(times)]


def measure(shape: str, isq: str) -> list[str]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        sizes: dict[str, Any] = {"max_num_seqs": 8, "decode_buckets": [1, 8], "prefill_buckets": [16, 512]}
        llm = LLM(folder, load_format="dummy", isq=isq, max_model_len=8192, kv_cache_memory="1GiB", **sizes)
        with llm:
            seconds(llm, prompt(picture((512, 512), 0)))
            while llm.stats().compiles_pending:
                time.sleep(1)
            for name, size in SIZES.items():
                for seed in (1, 2):
                    image = picture(size, seed)
                    first, count = seconds(llm, prompt(image))
                again, _ = seconds(llm, prompt(image))
                text, _ = seconds(llm, {"prompt_token_ids": [9 + len(name)] * count})
                rows.append(f"| {shape} {isq}, {name} | {count - 2} | {first:.2f} | {again:.2f} | {text:.2f} | – | – |")
            alone = gaps(llm, 200)
            many = [prompt(picture(SIZES["12 megapixels"], 10 + number)) for number in range(4)]
            beside = threading.Thread(target=lambda: llm.generate(many, ONE, use_tqdm=False))
            beside.start()
            found = gaps(llm, 200)
            beside.join()
            medians = f"{statistics.median(alone):.0f} and {statistics.median(found):.0f}"
            rows.append(f"| {shape} {isq}, four of 12 beside a stream | – | – | – | – | {medians} | {max(found):.0f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--isq", default="q8_0")
    given = parser.parse_args()
    head = (
        "| | tokens | first token, s | the image again | as much text | gaps alone and beside, median ms | longest |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    table = "\n".join([head, *(row for shape in given.shapes for row in measure(shape, given.isq))])
    here = describe_machine()
    machine = f"{here['processor']}, {here['cores']} cores ({', '.join(here['vector_units'])}), {here['date']}"
    text = f"# Images\n\nWritten by `python -m benchmarks.images`.\n\n## {machine}\n\n{table}\n"
    (Path(__file__).parent / "results" / "images.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
