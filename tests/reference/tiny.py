"""Tiny random models of each family: config.json content, and weights drawn from a seed.

Each variant isolates what its family can get wrong; goldens/NAME.npz has what transformers computes on it.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

_LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}

_VARIANTS: dict[str, dict[str, Any]] = {
    # head_dim is not hidden_size / num_attention_heads; the vocabulary is odd
    "llama_gqa": _LLAMA | {"head_dim": 32},
    "llama_mqa_tied": _LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    # the prompt runs past the original context; several end-of-sequence ids
    "llama3_rope": _LLAMA
    | {"head_dim": 32, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_SCALING, "eos_token_id": [2, 3, 5]},
    "llama_bias": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    # divides over 2, 4 and 8 devices; no num_key_value_heads; rope in the newer spelling
    "llama_mha8": {
        **{k: v for k, v in _LLAMA.items() if k not in ("rope_theta", "rope_scaling", "num_key_value_heads")},
        "num_attention_heads": 8,
        "head_dim": 16,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
    },
    # divides over 3 devices
    "llama_tp3": _LLAMA | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
    # a norm on every query and key head
    "qwen3": _LLAMA
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0},
    # seven layers, five local to one global; the scale is not head_dim^-0.5
    "gemma3_small": _GEMMA3 | {"sliding_window_pattern": 6, "query_pre_attn_scalar": 20},
    # rope in the newer spelling, one entry per layer type; an explicit layer pattern
    "gemma3_mqa": {
        **{k: v for k, v in _GEMMA3.items() if not k.startswith("rope_")},
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    # linear scaling applies to the global layers only
    "gemma3_linear_rope": _GEMMA3
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}

TINY_MODELS = tuple(_VARIANTS)
PROMPT_LENGTHS = {name: 96 if "rope" in name else 80 if "gemma3" in name else 64 for name in TINY_MODELS}


def tiny_config(name: str) -> dict[str, Any]:
    """The variant's config.json content, a fresh copy."""
    return json.loads(json.dumps(_VARIANTS[name]))


def tiny_weights(name: str) -> dict[str, np.ndarray]:
    """float32 weights by HF tensor name, matrices `[out, in]`; the same on every machine for the same name.

    Norm weights and biases are random too, so that leaving one out shows in the logits, which are of order 1.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    gemma = _VARIANTS[name]["model_type"] == "gemma3_text"
    weights = {}
    for tensor, shape in _shapes(_VARIANTS[name]).items():
        draw = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in tensor:
            weights[tensor] = 0.3 * draw + np.float32(0 if gemma else 1)  # Gemma multiplies by 1 + weight
        elif len(shape) == 1:
            weights[tensor] = 0.3 * draw
        else:
            gain = 1.5 if tensor.endswith(("q_proj.weight", "k_proj.weight")) else 1.0  # attention that is not flat
            weights[tensor] = draw * np.float32(gain / np.sqrt(shape[1]))
    return weights


def tiny_prompt(name: str) -> list[int]:
    """The variant's prompt: random token ids, longer than any sliding window."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{name} prompt".encode())))
    return rng.integers(_VARIANTS[name]["vocab_size"], size=PROMPT_LENGTHS[name]).tolist()


def write_checkpoint(name: str, directory: Path) -> Path:
    """Write config.json and model.safetensors (float32) into `directory`, made where missing; returns it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(name), indent=2))
    save_file(tiny_weights(name), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    gemma = config["model_type"] == "gemma3_text"
    E, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    H = config["num_attention_heads"]
    K = config.get("num_key_value_heads", H)
    D = config.get("head_dim", E // H)
    matrices = {
        "self_attn.q_proj": (H * D, E),
        "self_attn.k_proj": (K * D, E),
        "self_attn.v_proj": (K * D, E),
        "self_attn.o_proj": (E, H * D),
        "mlp.gate_proj": (F, E),
        "mlp.up_proj": (F, E),
        "mlp.down_proj": (E, F),
    }
    norms = {"input_layernorm": E, "post_attention_layernorm": E}
    if gemma:
        norms |= {"pre_feedforward_layernorm": E, "post_feedforward_layernorm": E}
    if gemma or config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": D, "self_attn.k_norm": D}

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for module, shape in matrices.items():
            shapes[f"{prefix}{module}.weight"] = shape
            if config.get("mlp_bias" if module.startswith("mlp") else "attention_bias"):
                shapes[f"{prefix}{module}.bias"] = shape[:1]
        shapes |= {f"{prefix}{module}.weight": (size,) for module, size in norms.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, E)
    return shapes
