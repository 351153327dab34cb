"""Compute goldens/MODEL.json with transformers on a GGUF file dequantized to float32; needs torch (see README.md).

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
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.reference import GOLDENS
from tests.reference.prompts import CHAT_ANSWER, CHAT_QUESTION, PROMPTS

NEW_TOKENS = 48
NEAR_TIE = 1e-3
TOP = 5

# transformers' GGUF reader gives every byte-level tokenizer GPT-2's split; these are the models' published ones.
PRE_TOKENIZERS = {"smollm2-135m": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])}


def make(name: str, file: Path) -> None:
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if name in PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, attn_implementation="eager"
    )

    prompts = dict(PROMPTS)
    if tokenizer.chat_template:
        question = [{"role": "user", "content": CHAT_QUESTION}]
        prompts["chat"] = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    entries = [golden(model, tokenizer, prompt_name, prompt) for prompt_name, prompt in prompts.items()]
    for entry in entries:
        print(
            f"{entry['name']}: {len(entry['prompt_token_ids'])} tokens, near tie {entry['near_tie']}, "
            f"{entry['greedy_text']!r}"
        )
        assert entry["name"] != "chat" or CHAT_ANSWER in entry["greedy_text"]

    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    head = f'"model": "{name}", "file": "{file.name}", "sha256": "{sha256}", "made_by": "{made_by}"'
    (GOLDENS / f"{name}.json").write_text(f'{{{head}, "prompts": [\n{lines}\n]}}\n')


@torch.inference_mode()
def golden(model, tokenizer, name: str, prompt: str) -> dict:
    """The JSON form of one ModelGolden."""
    ids = tokenizer(prompt)["input_ids"]
    greedy: list[int] = []
    cache = None
    for _ in range(NEW_TOKENS):
        step = model(torch.tensor([ids if cache is None else greedy[-1:]]), past_key_values=cache, logits_to_keep=1)
        cache = step.past_key_values
        greedy.append(int(step.logits[0, -1].argmax()))

    # The cache is not trusted: one pass over everything must choose the same tokens.
    logits = model(torch.tensor([ids + greedy[:-1]]), use_cache=False).logits[0]
    best = logits[-NEW_TOKENS:].topk(2)
    near_ties = (best.values[:, 0] - best.values[:, 1] < NEAR_TIE).nonzero()
    near_tie = int(near_ties[0]) if len(near_ties) else None
    assert best.indices[:near_tie, 0].tolist() == greedy[:near_tie], f"{name}: cached decoding differs"

    entry = {
        "name": name,
        "prompt": prompt,
        "prompt_token_ids": ids,
        "greedy_token_ids": greedy,
        "greedy_text": tokenizer.decode(greedy, skip_special_tokens=True),
        "near_tie": near_tie,
        "logprobs": None,
        "top_ids": None,
        "top_logprobs": None,
    }
    if name != "long":
        logprobs = logits[: len(ids)].log_softmax(-1)
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
