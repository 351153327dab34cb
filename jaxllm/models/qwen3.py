"""Qwen3ForCausalLM: Llama with a norm on every query and key head (Qwen Team 2025, arXiv:2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxllm.errors import CheckpointError
from jaxllm.models import llama
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import NameMap, expand

NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(llama.LlamaConfig):
    """As Llama's, with `qk_norm` always on."""

    gguf_prefix: ClassVar[str] = "qwen3"
    qk_norm: bool = True

    @classmethod
    def from_hf(cls, c: dict[str, Any], checkpoint: Checkpoint) -> Qwen3Config:
        if c.get("use_sliding_window"):
            raise CheckpointError(f"{checkpoint.path}: use_sliding_window is true; Qwen3 is supported without windows")
        return super().from_hf({"head_dim": 128} | c, checkpoint)  # type: ignore[return-value]


class Qwen3(llama.Llama):
    """Qwen3ForCausalLM."""


def hf_names(config: Qwen3Config) -> NameMap:
    """Tensors of a Hugging Face checkpoint."""
    norms = {f"layers.*.attention.{n}.weight": f"model.layers.*.self_attn.{n}.weight" for n in NORMS}
    return expand(llama.HF_NAMES | norms, config.num_layers)


def gguf_names(config: Qwen3Config) -> NameMap:
    """Tensors of a GGUF file; Q and K rows are stored as Hugging Face stores them."""
    norms = {f"layers.*.attention.{n}.weight": f"blk.*.attn_{n}.weight" for n in NORMS}
    return expand(llama.GGUF_NAMES | norms, config.num_layers)
