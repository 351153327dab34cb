"""Models of 2021 to 2023 with LayerNorm and MLPs without a gate: OPT, GPT-J, CodeGen, GPT-Neo, SantaCoder, Falcon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.gpt import GPT2_KEYS, GPT2_NORMS, GPT2_PRODUCTS, by_groups, gpt2_from_hf, layer_names, usual
from jaxllm.models.family import Family, hf_decoder, hf_head_dim, hf_rope, without_groups
from jaxllm.models.hf_fields import COUNT, EPSILON, FLAG, LAYERS, LENGTH, MAYBE_FLAG, OFF, SIZE, maybe
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.names import in_layers, linear
from jaxllm.weights.fields import TEXT, FieldKind, many, one_of, shown, whole
from jaxllm.weights.names import Pattern, Source

TABLES: dict[str, Pattern] = {"embed.weight": "transformer.wte.weight", "positions": "transformer.wpe.weight"}
ON = maybe(FieldKind("true", lambda value: value is True))


# OPT and BioGPT: GPT-2 with a table of positions whose first two rows are padding's (arXiv:2205.01068)
def opt_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The 350M model norms after its residual sums, and has embeddings of another size: it is refused."""
    c = usual(
        without_groups(c), {"max_position_embeddings": 2048, "hidden_act": "relu"},
        intermediate_size="ffn_dim", hidden_act="activation_function",
    )  # fmt: skip
    if (size := c.get("word_embed_proj_dim")) not in (None, c["hidden_size"]):
        raise CheckpointError(f"word_embed_proj_dim is {shown(size)}; accepted is hidden_size, {c['hidden_size']}")
    return _positioned(c, bias=c.get("enable_bias", True) is not False, norm_eps=1e-5)


def biogpt_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = usual(without_groups(c), {"max_position_embeddings": 1024, "hidden_act": "gelu"})
    scale = c["hidden_size"] ** 0.5 if c.get("scale_embedding", True) else 1.0
    return _positioned(c, bias=True, norm_eps=1e-5, embedding_scale=scale)


def _positioned(c: dict[str, Any], bias: bool, **differences: Any) -> DecoderConfig:
    return hf_decoder(
        c, layers=LayerKind(None), norm="layer", attention_bias=bias, mlp_bias=bias, gated_mlp=False,
        learned_positions=True, **differences,
    )  # fmt: skip


OPT_NAMES = {
    "positions": Source("model.embed_positions.weight", lambda rows: rows[2:]),
    **in_layers("model.layers.*", {
        "attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm", "mlp.up": "fc1", "mlp.down": "fc2",
        "attention.output": "self_attn.out_proj",
    }),
}  # fmt: skip

OPT = Family(
    name="OPT", models="OPT 125M, 1.3B to 66B, Galactica",
    architectures=("OPTForCausalLM",), model_types=("opt",),
    fields={
        "ffn_dim": SIZE, "word_embed_proj_dim": maybe(SIZE), "enable_bias": MAYBE_FLAG, "do_layer_norm_before": ON,
        "_remove_final_layer_norm": OFF, "layer_norm_elementwise_affine": ON,
    },
    from_hf=opt_from_hf, hf_names=OPT_NAMES | linear("norm", "model.final_layer_norm"),
)  # fmt: skip

BIOGPT = Family(
    name="BioGPT", models="BioGPT, BioGPT-Large",
    architectures=("BioGptForCausalLM",), model_types=("biogpt",), fields={"scale_embedding": MAYBE_FLAG},
    from_hf=biogpt_from_hf,
    hf_names=OPT_NAMES | linear("norm", "model.layer_norm") | linear("head", "output_projection"),
)  # fmt: skip


# GPT-J and CodeGen: attention and MLP read one norm, part of each head rotated in neighbouring pairs (EleutherAI, 2021)
def gptj_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = usual(without_groups(c), {"tie_word_embeddings": False, "max_position_embeddings": 2048}, **GPT2_KEYS)
    rope = RopeConfig(dim=c.get("rotary_dim", 64) or hf_head_dim(c), interleaved=True)
    return hf_decoder(
        c | {"intermediate_size": c.get("n_inner") or 4 * c["hidden_size"]}, layers=LayerKind(rope), norm="layer",
        norm_eps=c.get("layer_norm_epsilon", 1e-5), hidden_act=c.get("activation_function") or "gelu_new",
        parallel_residual=True, gated_mlp=False, mlp_bias=True, head_bias=True,
    )  # fmt: skip


def codegen_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Queries, values and keys of a quarter of the heads lie one after the other, and then those of the next."""

    def by_part(rows: np.ndarray) -> np.ndarray:
        quarters = rows.reshape(4, 3, -1, *rows.shape[1:])
        return quarters[:, [0, 2, 1]].swapaxes(0, 1).reshape(rows.shape)

    fused = Source("transformer.h.*.attn.qkv_proj.weight", by_part, by_rows=True)
    return GPTJ_NAMES | {"layers.*.attention.qkv.weight": fused}


GPTJ_NAMES: dict[str, Pattern] = {
    "embed.weight": "transformer.wte.weight",
    **linear("norm", "transformer.ln_f"),
    **in_layers("transformer.h.*", {
        "attention_norm": "ln_1", "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.output": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out",
    }),
}  # fmt: skip

GPTJ = Family(
    name="GPT-J", models="GPT-J 6B",
    architectures=("GPTJForCausalLM",), model_types=("gptj",), from_hf=gptj_from_hf, hf_names=GPTJ_NAMES,
)  # fmt: skip

CODEGEN = Family(
    name="CodeGen", models="CodeGen 350M to 16B, CodeGen2",
    architectures=("CodeGenForCausalLM",), model_types=("codegen",), ignored=("*.causal_mask",),
    from_hf=gptj_from_hf, hf_names=codegen_hf_names,
)  # fmt: skip


# GPT-Neo: GPT-2 with a window on every other layer, and logits of attention that are not scaled (EleutherAI, 2021)
def gpt_neo_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_types` has lists of layers, each with how often it comes."""
    c = usual(
        without_groups(c), {"max_position_embeddings": 2048}, num_attention_heads="num_heads",
        num_hidden_layers="num_layers",
    )  # fmt: skip
    number = c["num_hidden_layers"]
    types = c.get("attention_types") or [[["global", "local"], -(-number // 2)]]
    kinds = [kind for layers, times in types for _ in range(times) for kind in layers]
    if len(kinds) != number:
        raise CheckpointError(f"attention_types is of {len(kinds)} layers; accepted is one of {number}")
    layers = [LayerKind(None, c.get("window_size", 256) if kind == "local" else None) for kind in kinds]
    return hf_decoder(
        c | {"intermediate_size": c.get("intermediate_size") or 4 * c["hidden_size"]}, layers=layers, norm="layer",
        norm_eps=c.get("layer_norm_epsilon", 1e-5), hidden_act=c.get("activation_function") or "gelu_new",
        attention_scale=1.0, output_bias=True, mlp_bias=True, gated_mlp=False, learned_positions=True,
    )  # fmt: skip


def _attention_types(value: object) -> bool:
    kinds = many(one_of("global", "local"), 2**10)
    pairs = value if isinstance(value, list) and len(value) <= 2**10 else [None]
    return all(isinstance(p, list) and len(p) == 2 and kinds.fits(p[0]) and LAYERS.fits(p[1]) for p in pairs)


GPT_NEO = Family(
    name="GPT-Neo", models="GPT-Neo 125M, 1.3B, 2.7B",
    architectures=("GPTNeoForCausalLM",), model_types=("gpt_neo",),
    fields={
        "num_layers": LAYERS, "intermediate_size": maybe(SIZE), "window_size": LENGTH,
        "attention_types": maybe(FieldKind("pairs of a list of global and local, and a number", _attention_types)),
    },
    ignored=("*.attn.attention.bias",), from_hf=gpt_neo_from_hf,
    hf_names={
        **TABLES, **linear("norm", "transformer.ln_f"),
        **in_layers("transformer.h.*", {
            "attention_norm": "ln_1", "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
            "attention.qkv": tuple(f"attn.attention.{part}_proj" for part in "qkv"),
            "attention.output": "attn.attention.out_proj",
        }),
    },
)  # fmt: skip


# GPT-BigCode: GPT-2 with one head of keys and values for all queries (arXiv:2305.06161)
def bigcode_from_hf(c: dict[str, Any]) -> DecoderConfig:
    act = c.get("activation_function") or "gelu_pytorch_tanh"
    config = gpt2_from_hf(c | {"activation_function": act, "scale_attn_by_inverse_layer_idx": None})
    return replace(config, num_kv_heads=1 if c.get("multi_query", True) else config.num_heads)


def bigcode_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    names, attention = (GPT2_NORMS | GPT2_PRODUCTS).items(), "transformer.h.*.attn.c_attn"
    own = [linear(path, f"transformer.{name}") for path, name in names]
    fused = by_groups(config, attention) if config.num_kv_heads > 1 else {}
    return TABLES | {path: name for names in own for path, name in names.items()} | fused


GPT_BIGCODE = Family(
    name="GPT-BigCode", models="StarCoder, StarCoderBase, SantaCoder",
    architectures=("GPTBigCodeForCausalLM",), model_types=("gpt_bigcode",), fields={"multi_query": FLAG},
    from_hf=bigcode_from_hf, hf_names=bigcode_hf_names,
)  # fmt: skip


# Falcon: attention beside the MLP, queries in groups whose keys and values follow them (arXiv:2311.16867)
def falcon_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The 7B model has one head of keys and values; later ones have several, and mostly a norm for each of the two."""
    c = usual(c, {"max_position_embeddings": 2048}) | {"hidden_act": c.get("activation") or "gelu"}
    later, heads = bool(c.get("new_decoder_architecture")), c["num_attention_heads"]
    kv_heads = (c.get("num_kv_heads") or heads) if later else 1 if c.get("multi_query", True) else heads
    size, bias = c.get("ffn_hidden_size") or 4 * c["hidden_size"], c.get("bias")
    return hf_decoder(
        without_groups(c) | {"intermediate_size": size, "num_key_value_heads": kv_heads},
        layers=LayerKind(hf_rope(without_groups(c))), norm="layer", norm_eps=c.get("layer_norm_epsilon") or 1e-5,
        attention_bias=bias, mlp_bias=bias, gated_mlp=False, parallel_residual=later or c.get("parallel_attn", True),
        parallel_norms=later and c.get("num_ln_in_parallel_attn") != 1,
    )  # fmt: skip


LATER_NORMS = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def falcon_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    return {
        "embed.weight": "transformer.word_embeddings.weight",
        **linear("norm", "transformer.ln_f"),
        **layer_names(config, "transformer.h.*", "self_attention"),
        **in_layers("transformer.h.*", LATER_NORMS if config.parallel_norms else {}),
    }


FALCON = Family(
    name="Falcon", models="Falcon 7B, 40B, 180B, Falcon2 11B",
    architectures=("FalconForCausalLM",), model_types=("falcon",),
    fields={
        "num_kv_heads": maybe(COUNT), "ffn_hidden_size": maybe(SIZE), "alibi": OFF,
        **dict.fromkeys(("new_decoder_architecture", "multi_query", "parallel_attn"), MAYBE_FLAG),
        "num_ln_in_parallel_attn": maybe(whole(1, 2)), "activation": maybe(TEXT), "layer_norm_epsilon": maybe(EPSILON),
    },
    from_hf=falcon_from_hf, hf_names=falcon_hf_names,
)  # fmt: skip


# Persimmon: norms on queries and keys, half of each head rotated, a squared ReLU (Adept, 2023)
def persimmon_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"hidden_act": "relu2", "max_position_embeddings": 16_384} | without_groups(c)
    return hf_decoder(
        c, layers=LayerKind(hf_rope(c, partial=0.5)), norm="layer", norm_eps=c.get("layer_norm_eps", 1e-5),
        qk_norm="layer" if c.get("qk_layernorm", True) else None, attention_bias=True, mlp_bias=True, gated_mlp=False,
    )  # fmt: skip


def persimmon_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    norms = {"attention.q_norm": "self_attn.q_layernorm", "attention.k_norm": "self_attn.k_layernorm"}
    own = linear("norm", "model.final_layernorm") | in_layers("model.layers.*", norms)
    return layer_names(config, "model.layers.*", "self_attn") | own


PERSIMMON = Family(
    name="Persimmon", models="Persimmon-8B, Fuyu-8B (text)",
    architectures=("PersimmonForCausalLM", "FuyuForCausalLM"), model_types=("persimmon",), wrappers=("fuyu",),
    ignored=("*vision_embed_tokens.*",), from_hf=persimmon_from_hf, hf_names=persimmon_hf_names,
)  # fmt: skip
