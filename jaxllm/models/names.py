"""The usual names of tensors in Hugging Face's checkpoints and in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.weights.names import AnyOf, NameMap, Pattern, Source, Transform, expand, unpermute_rope


def linear(path: str, *names: str, fused: str | None = None) -> dict[str, Pattern]:
    """Weight and bias of one product or norm: from `names` in turn, or from the tensor that has them `fused`."""
    return {
        f"{path}.{kind}": AnyOf(tuple(f"{name}.{kind}" for name in names), *([f"{fused}.{kind}"] if fused else []))
        for kind in ("weight", "bias")
    }


def in_layers(
    block: str, names: Mapping[str, str | tuple[str, ...]], transform: Transform | None = None
) -> dict[str, Pattern]:
    """Weights (through `transform`) and biases of each layer's products and norms, named after their `block`."""
    found: dict[str, Pattern] = {}
    for path, own in names.items():
        parts = [f"{block}.{name}" for name in ((own,) if isinstance(own, str) else own)]
        found |= linear(f"layers.*.{path}", *parts)
        if transform is not None:
            found[f"layers.*.{path}.weight"] = tuple(Source(f"{part}.weight", transform) for part in parts)
    return found


# Hugging Face


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The tensors of most families. Entries that a model has no parameter for are never looked at."""
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    names = {
        "embed.weight": "model.embed_tokens.weight",
        **linear("norm", "model.norm"),
        **linear("head", "lm_head"),
        **linear("layers.*.attention.qkv", *(f"{attention}.{p}_proj" for p in "qkv"), fused=f"{attention}.qkv_proj"),
        **linear("layers.*.mlp.gate_up", f"{mlp}.gate_proj", f"{mlp}.up_proj", fused=f"{mlp}.gate_up_proj"),
        **in_layers("model.layers.*", {
            "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
            "attention.output": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
        }),
    }  # fmt: skip
    return names | hf_expert_names(config) if config.moe else names


def hf_expert_names(
    config: DecoderConfig, block: str = "model.layers.*.mlp", *, gate: str = "gate_proj", up: str = "up_proj",
    down: str = "down_proj", shared: str = "shared_experts",
) -> dict[str, Pattern]:  # fmt: skip
    """Tensors of the sparse MLP `block`: experts one by one, or stacked as transformers 5 keeps them, or as MXFP4."""
    if config.moe is None:
        return {}
    count = config.moe.num_experts

    def each(name: str) -> Source:
        return Source(f"{block}.experts.{{}}.{name}.weight", stack=count)

    stack = f"{block}.experts"
    return {
        "layers.*.mlp.router.weight": f"{block}.gate.weight",
        "layers.*.mlp.router.correction_bias": f"{block}.gate.e_score_correction_bias",
        "layers.*.mlp.experts.gate_up.weight": AnyOf(
            (each(gate), each(up)), f"{stack}.gate_up_proj", f"{stack}.gate_up_proj_blocks"
        ),
        "layers.*.mlp.experts.down.weight": AnyOf(each(down), f"{stack}.down_proj", f"{stack}.down_proj_blocks"),
        **linear("layers.*.mlp.shared.gate_up", f"{block}.{shared}.gate_proj", f"{block}.{shared}.up_proj"),
        **linear("layers.*.mlp.shared.down", f"{block}.{shared}.down_proj"),
        "layers.*.mlp.shared_gate.weight": f"{block}.shared_expert_gate.weight",
    }


def hf_mtp_names(config: DecoderConfig, number: int, own: Mapping[str, Pattern] | None = None) -> NameMap:
    """The module that predicts further tokens, in families that keep it as one more layer, with this number.

    `own` is what the family calls its layers' tensors. What else the module has is under the same prefix. Further
    modules, where a checkpoint has several, are not read.
    """
    beside = {"token_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}
    names = {f"{path}.weight": f"model.layers.*.{name}.weight" for path, name in beside.items()}
    return expand({**hf_names(config), **(own or {}), **names}, 1, first=number)


_WORD_EMBEDDINGS = ("embed_tokens.weight", "embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
"""The names after a model's prefix; the later ones are encoders'."""


def hf_renaming(tensors: Iterable[str]) -> Callable[[str], str]:
    """The function from names `model.…` and `lm_head.…` to their spelling in a checkpoint.

    Embedding models leave `model.` out, and multimodal wrappers put the name of their language model in front. Modules
    that predict further tokens may have a copy of the embedding under a longer name.
    """
    names = [name for name in tensors if "vision" not in name]

    def before(default: str, *suffixes: str) -> str:
        found = (min((name for name in names if name.endswith(end)), key=len, default=None) for end in suffixes)
        return next((name.removesuffix(end) for name, end in zip(found, suffixes, strict=True) if name), default)

    model, head = before("model.", *_WORD_EMBEDDINGS), before("", "lm_head.weight")

    def rename(name: str) -> str:
        return model + name.removeprefix("model.") if name.startswith("model.") else head + name

    return rename


# GGUF, by src/llama-arch.cpp of llama.cpp


def _join_kv_b(k_b: np.ndarray, v_b: np.ndarray) -> np.ndarray:
    """`[H, L, nope]` and `[H, v, L]` -> `[H * (nope + v), L]`, a head's key rows before its value rows."""
    if k_b.ndim != 3 or v_b.ndim != 3 or (k_b.shape[0], k_b.shape[1]) != (v_b.shape[0], v_b.shape[2]):
        raise CheckpointError(
            f"tensors attn_k_b and attn_v_b are of shapes {k_b.shape} and {v_b.shape}; accepted are (heads, latent, "
            "key) and (heads, value, latent)"
        )
    rows = np.concatenate([np.asarray(k_b, np.float32).swapaxes(1, 2), np.asarray(v_b, np.float32)], axis=1)
    return rows.reshape(-1, rows.shape[-1])


GGUF_NAMES: dict[str, Pattern] = {  # the tensors of all architectures
    "embed.weight": "token_embd.weight",
    **linear("norm", "output_norm"),
    **linear("head", "output"),
    **in_layers("blk.*", {
        "attention_norm": "attn_norm", "attention_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm",
        "attention.output": "attn_output", "attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm",
        "attention.q": "attn_q", "attention.q_a": "attn_q_a", "attention.q_a_norm": "attn_q_a_norm",
        "attention.q_b": "attn_q_b", "attention.kv_a": "attn_kv_a_mqa", "attention.kv_a_norm": "attn_kv_a_norm",
        "mlp.up": "ffn_up", "mlp.down": "ffn_down", "mlp.experts.up": "ffn_up_exps",
        "mlp.experts.down": "ffn_down_exps", "mlp.shared.gate_up": ("ffn_gate_shexp", "ffn_up_shexp"),
        "mlp.shared.up": "ffn_up_shexp", "mlp.shared.down": "ffn_down_shexp",
    }),
    **linear("layers.*.mlp_norm", "blk.*.ffn_norm", fused="blk.*.post_attention_norm"),  # after what it comes after
    **linear("layers.*.attention.qkv", *(f"blk.*.attn_{p}" for p in "qkv"), fused="blk.*.attn_qkv"),
    "layers.*.attention.kv_b.weight": AnyOf(
        "blk.*.attn_kv_b.weight", Source("blk.*.attn_k_b.weight", _join_kv_b, also=("blk.*.attn_v_b.weight",))
    ),
    **linear("layers.*.mlp.gate_up", "blk.*.ffn_gate", "blk.*.ffn_up", fused="blk.*.ffn_up"),
    "layers.*.mlp.router.weight": "blk.*.ffn_gate_inp.weight",
    "layers.*.mlp.router.correction_bias": "blk.*.exp_probs_b.bias",
    **linear(
        "layers.*.mlp.experts.gate_up", "blk.*.ffn_gate_exps", "blk.*.ffn_up_exps", fused="blk.*.ffn_gate_up_exps"
    ),
    "layers.*.mlp.shared_gate.weight": Source("blk.*.ffn_gate_inp_shexp.weight", lambda row: row.reshape(1, -1)),
}  # fmt: skip

ENCODER_NAMES: dict[str, Pattern] = {  # the tensors of encoders, whose norms come after the residual sums
    "places.positions": "position_embd.weight",
    "places.types": "token_types.weight",
    **linear("embedding_norm", "token_embd_norm"),
    **in_layers("blk.*", {"attention_post_norm": "attn_output_norm", "mlp_post_norm": "layer_output_norm"}),
    **linear("classifier.dense", "cls"),
    **linear("classifier.output", "cls.output"),
}


def permuted_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Q and K of the architectures whose rows llama.cpp stores for interleaved rotation (llama, mistral3, smollm3)."""
    undo = unpermute_rope(config.head_dim)
    return {
        f"layers.*.attention.qkv.{kind}": (
            *(Source(f"blk.*.attn_{p}.{kind}", undo, by_rows=True) for p in "qk"),
            f"blk.*.attn_v.{kind}",
        )
        for kind in ("weight", "bias")
    }
