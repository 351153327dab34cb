"""Turn a GGUF file into a bfloat16 safetensors directory with its tokenizer, for engines that do not read GGUF."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("directory", type=Path, help="where to write")
    arguments = parser.parse_args()

    source = {"pretrained_model_name_or_path": arguments.file.parent, "gguf_file": arguments.file.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(arguments.directory)
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=quantization, dtype=torch.bfloat16)
    model.save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
