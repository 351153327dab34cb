"""Turn a GGUF file into a bfloat16 safetensors directory, for engines that do not read GGUF.

Without a tokenizer: the benchmark's prompts are token ids, and transformers guesses a GGUF tokenizer's splitting rule.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("directory", type=Path, help="where to write")
    arguments = parser.parse_args()

    source = {"pretrained_model_name_or_path": arguments.file.parent, "gguf_file": arguments.file.name}
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=quantization, dtype=torch.bfloat16)
    model.save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
