"""Compute goldens/MODEL.json with transformers at float32 on a GGUF file's dequantized weights; needs torch (see README.md).

    python -m tests.reference.make_model_goldens smollm2-135m SmolLM2-135M-Instruct.Q4_1.gguf
    python -m tests.reference.make_model_goldens gemma3-270m gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.reference import GOLDENS
from tests.reference.prompts import CHAT_ANSWER, CHAT_QUESTION, PROMPTS

NEW_TOKENS = 48
NEAR_TIE = 1e-3
TOP = 5


def make(name: str, file: Path) -> None:
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, attn_implementation="eager"
    )

    prompts = dict(PROMPTS)
    if tokenizer.chat_template:
        question = [{"role": "user", "content": CHAT_QUESTION}]
        prompts["chat"] = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    entries = [golden(model, tokenizer, prompt_name, prompt) for prompt_name, prompt in prompts.items()]
    for entry in entries:
        print(f"{entry['name']}: {len(entry['prompt_token_ids'])} tokens, near tie {entry['near_tie']}, "
              f"{entry['greedy_text']!r}")
        assert entry["name"] != "chat" or CHAT_ANSWER in entry["greedy_text"]

    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    head = f'"model": "{name}", "file": "{file.name}", "sha256": "{sha256}", "made_by": "{made_by}"'
    (GOLDENS / f"{name}.json").write_text(f'{{{head}, "prompts": [\n{lines}\n]}}\n')


@torch.inference_mode()
def golden(model, tokenizer, name: str, prompt: str) -> dict:
    """The JSON form of one ModelGolden. Greedy decoding recomputes the whole sequence at every step: no cache to trust."""
    ids = tokenizer(prompt)["input_ids"]
    greedy: list[int] = []
    near_tie = None
    for step in range(NEW_TOKENS):
        logits = model(torch.tensor([ids + greedy]), use_cache=False, logits_to_keep=1).logits[0, -1]
        best = logits.topk(2)
        if near_tie is None and best.values[0] - best.values[1] < NEAR_TIE:
            near_tie = step
        greedy.append(int(best.indices[0]))

    entry = {"name": name, "prompt": prompt, "prompt_token_ids": ids, "greedy_token_ids": greedy,
             "greedy_text": tokenizer.decode(greedy, skip_special_tokens=True), "near_tie": near_tie,
             "logprobs": None, "top_ids": None, "top_logprobs": None}
    if name != "long":
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        actual = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        top = logprobs.topk(TOP)
        entry |= {"logprobs": rounded(actual), "top_ids": top.indices.tolist(), "top_logprobs": rounded(top.values)}
    return entry


def rounded(values: torch.Tensor) -> list:
    return [rounded(v) if v.ndim else round(float(v), 5) for v in values]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="name of the golden: smollm2-135m or gemma3-270m")
    parser.add_argument("file", type=Path, help="the GGUF file")
    arguments = parser.parse_args()
    make(arguments.model, arguments.file)
