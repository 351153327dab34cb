"""Fills in `parameters` of configs/*.json with what transformers counts on torch's meta device, tied weights once.

Run it where torch is installed: `python -m tests.reference.count_parameters [MODEL …]`. Of a multimodal model it counts
the language model. Router corrections, factors of layers and constants of activations are buffers in transformers and
parameters in checkpoints, so they count.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
CORRECTIONS = ("e_score_correction_bias", "expert_bias", "layer_scalar", "act_fn.beta", "act_fn.eps")
ENCODERS = ("bert", "xlm-roberta", "roberta", "modernbert", "nomic_bert")
"""Whose pooler is a part of the classification head, and not counted."""
WITHOUT_PARAMETERS = ("quantization_config", "rope_scaling")
"""Keys that count for nothing here, some in spellings that transformers no longer reads."""


def count(config: dict[str, Any]) -> int:
    """Parameters of the language model that `config` (config.json's content) describes."""
    import torch
    import transformers

    if config["model_type"] == "baichuan":  # which is Llama, and has no class
        config = config | {"model_type": "llama"}
    full = transformers.AutoConfig.for_model(**config).get_text_config()
    if full.model_type in ENCODERS:
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(full)
        return sum(p.numel() for name, p in model.named_parameters() if "pooler" not in name)
    # By its name, since AutoModelForCausalLM does not know those that are only published in a wrapper.
    name = type(full).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    model_class = getattr(transformers, name, None) or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(full)]
    with torch.device("meta"):
        model = model_class(full)
    model.tie_weights()
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTIONS)]
    return sum(p.numel() for p in model.parameters()) + sum(buffer.numel() for buffer in corrections)


def main(names: list[str]) -> None:
    for path in sorted(CONFIGS.glob("*.json")):
        if names and path.stem not in names:
            continue
        text = path.read_text()
        config = {k: v for k, v in json.loads(text)["config"].items() if k not in WITHOUT_PARAMETERS}
        number = count(config)
        path.write_text(re.sub(r'"parameters": \d+', f'"parameters": {number}', text))
        print(f"{path.stem}: {number:,}")


if __name__ == "__main__":
    main(sys.argv[1:])
