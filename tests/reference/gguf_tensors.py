"""What llama.cpp's conversion package does to tensors: stacks, splits, permutes them, or adds some.

They keep the names of a Hugging Face checkpoint, as far as they are still the same tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


def of_language_model(weights: Tensors) -> Tensors:
    """Without a wrapper's other tensors, and with the names that its language model has by itself."""
    tensors = {}
    for name, weight in weights.items():
        if re.search("vision_tower|multi_modal_projector|embed_vision|visual", name):
            continue
        name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
        name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
        whole = name.startswith(("model.", "lm_head.", "backbone.", "transformer.", "gpt_neox.", "embed_out."))
        tensors[name if whole else f"model.{name}"] = weight
    return tensors


def with_stacked_experts(tensors: Tensors) -> Tensors:
    """One tensor for each of the experts' three matrices, experts first."""
    tensors = {name.replace("e_score_correction_bias", "e_score_correction.bias"): w for name, w in tensors.items()}

    def stacked(found: re.Match[str]) -> str:
        return _stacked_name(found["block"], found["matrix"])

    return _stack(tensors, r"(?P<block>.+)\.experts\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight", stacked)


def _stack(tensors: Tensors, pattern: str, stacked: Callable[[re.Match[str]], str]) -> Tensors:
    """Tensors whose names match `pattern` on top of each other in the order of `number`, under the name `stacked`."""
    stacks: dict[str, Tensors] = {}
    others = {}
    for name, weight in tensors.items():
        if found := re.fullmatch(pattern, name):
            stacks.setdefault(stacked(found), {})[found["number"]] = weight
        else:
            others[name] = weight
    return others | {name: np.stack([parts[str(i)] for i in range(len(parts))]) for name, parts in stacks.items()}


def _stacked_name(block: str, matrix: str) -> str:
    if block.endswith("block_sparse_moe"):  # Mixtral
        return block.replace("model.", "").replace("block_sparse_moe", f"feed_forward.experts.{matrix}.weight")
    if block.endswith("feed_forward"):  # LFM2
        return f"{block.removeprefix('model.')}.experts.{matrix}.weight"
    return f"{block}.experts.{matrix}.weight"


def unchanged(c: Config, tensors: Tensors) -> Tensors:
    return tensors


def permuted(c: Config, tensors: Tensors) -> Tensors:
    """Rows of Q and K for interleaved rotation: row i of a head's first half, then row i of its second."""
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}

    def pairs(weight: np.ndarray, count: int) -> np.ndarray:
        halves = weight.reshape(count, 2, -1, *weight.shape[1:])
        return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)

    return {
        name: pairs(weight, heads[projection]) if (projection := name.split(".")[-2]) in heads else weight
        for name, weight in tensors.items()
    }


def norms_plus_one(c: Config, tensors: Tensors) -> Tensors:
    return {name: weight + 1 if name.endswith("norm.weight") else weight for name, weight in tensors.items()}


def with_stacked_norms(c: Config, tensors: Tensors) -> Tensors:
    """StableLM's norms of every head in one tensor."""
    pattern = r"(?P<norm>.+_layernorm)\.norms\.(?P<number>\d+)\.weight"
    return _stack(tensors, pattern, lambda found: f"{found['norm']}.weight")


def with_split_kv_b(c: Config, tensors: Tensors) -> Tensors:
    """Each head's keys and values from the latent in two tensors, those of the keys transposed for absorption."""
    split = {}
    for name, weight in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            heads = weight.reshape(c["num_attention_heads"], c["qk_nope_head_dim"] + c["v_head_dim"], -1)
            split[name.replace("kv_b", "k_b")] = heads[:, : c["qk_nope_head_dim"]].transpose(0, 2, 1)
            split[name.replace("kv_b", "v_b")] = heads[:, c["qk_nope_head_dim"] :]
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # stacked by Mistral 4's own checkpoints
            split[f"{name}.weight"] = weight
        else:
            split[name] = weight
    return split


def with_flat_convolutions(c: Config, tensors: Tensors) -> Tensors:
    """The taps of each channel as a row of a matrix."""
    tensors = {name.replace("expert_bias", "expert_bias.bias"): weight for name, weight in tensors.items()}
    return {name: weight[:, 0] if name.endswith("conv.conv.weight") else weight for name, weight in tensors.items()}


def with_flat_states(c: Config, tensors: Tensors) -> Tensors:
    """What state-space layers fade by, and the shapes that llama.cpp has their vectors in."""
    groups = c.get("n_groups") or c["mamba_n_groups"]
    found = {}
    for name, weight in tensors.items():
        if name.endswith("conv1d.weight"):
            weight = weight[:, 0]
        elif name.endswith(".A_log"):
            weight = -np.exp(weight)[:, None]
        elif name.endswith(".D"):
            weight = weight[:, None]
        elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            weight = weight.reshape(groups, -1)
        found[name.replace(".dt_bias", ".dt_proj.bias")] = weight
    return found


def of_granite_hybrid(c: Config, tensors: Tensors) -> Tensors:
    """Gate and up in two tensors, of the experts and of the MLP that every token passes."""
    found = {}
    mlp = "mlp.shared_expert" if c["num_local_experts"] else "mlp"
    for name, weight in permuted(c, with_flat_states(c, tensors)).items():
        if name.endswith("input_linear.weight"):
            stem = name.replace("shared_mlp", mlp).replace("block_sparse_moe", "mlp.experts")
            half = weight.shape[-2] // 2
            found[stem.replace("input_linear", "gate_proj")] = weight[..., :half, :]
            found[stem.replace("input_linear", "up_proj")] = weight[..., half:, :]
        else:
            found[name.replace("shared_mlp.output_linear", f"{mlp}.down_proj")] = weight
    return found


def of_falcon_h1(c: Config, tensors: Tensors) -> Tensors:
    """All factors in the weights."""
    inner, shared = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
    sizes = [inner, inner, shared, shared, c["mamba_n_heads"]]
    into, (gate, down) = c["attention_in_multiplier"], c["mlp_multipliers"]
    factors = {
        "mamba.in_proj": np.repeat(np.array(c["ssm_multipliers"]) * c["ssm_in_multiplier"], sizes)[:, None],
        "mamba.out_proj": c["ssm_out_multiplier"],
        "q_proj": into,
        "k_proj": into * c["key_multiplier"],
        "v_proj": into,
        "o_proj": c["attention_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "lm_head": c["lm_head_multiplier"],
        "embed_tokens": c["embedding_multiplier"],
    }

    def scaled(name: str, weight: np.ndarray) -> np.ndarray:
        return weight * next((f for part, f in factors.items() if name.endswith(f"{part}.weight")), 1.0)

    return {name: scaled(name, weight) for name, weight in with_flat_states(c, tensors).items()}


def of_nemotron_h(c: Config, tensors: Tensors) -> Tensors:
    """Under the names of published checkpoints, a layer's experts under those of an MLP."""
    found = {}
    for name, weight in permuted(c, with_flat_states(c, tensors)).items():
        name = re.sub(r"^model\.", "backbone.", name)
        stacked = re.sub(
            r"^backbone\.(.+)\.mixer\.experts\.(\w+?)(\.weight)?$", r"model.\1.mlp.experts.\2.weight", name
        )
        if "moe" in c["layers_block_type"]:
            stacked = stacked.replace(".dt_proj.", ".dt.")
        found[stacked] = weight
    return found


def of_gpt_oss(c: Config, tensors: Tensors) -> Tensors:
    """Matrices of experts `[out, in]`; gate and up, which alternate, in two tensors."""
    found = {}
    for name, weight in tensors.items():
        stem, is_bias = name.removesuffix("_bias"), name.endswith("_proj_bias")
        if not stem.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name.replace("self_attn.sinks", "self_attn.sinks.weight")] = weight
            continue
        suffix, rows = ("bias", weight) if is_bias else ("weight", weight.swapaxes(1, 2))
        if stem.endswith("down_proj"):
            found[f"{stem}.{suffix}"] = rows
        else:
            found[f"{stem.replace('gate_up', 'gate')}.{suffix}"] = rows[:, ::2]
            found[f"{stem.replace('gate_up', 'up')}.{suffix}"] = rows[:, 1::2]
    return found


def with_split_experts(c: Config, tensors: Tensors) -> Tensors:
    """Gate and up of the stacks that transformers writes in two tensors."""
    found = {}
    for name, weight in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            parts = zip(("gate_proj", "up_proj"), np.split(weight, 2, axis=1), strict=True)
            found |= {f"{name.replace('gate_up_proj', part)}.weight": rows for part, rows in parts}
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = weight
    return found


def of_gpt2(c: Config, tensors: Tensors) -> Tensors:
    """Matrices `[out, in]`."""
    turned = tuple(f"{name}.weight" for name in ("c_attn", "c_proj", "c_fc"))
    return {name: weight.T if name.endswith(turned) else weight for name, weight in tensors.items()}


def of_gptneox(c: Config, tensors: Tensors) -> Tensors:
    """Rows of all queries, then of all keys, then of all values."""
    heads = c["num_attention_heads"]

    def by_part(rows: np.ndarray) -> np.ndarray:
        parts = rows.reshape(heads, 3, -1, *rows.shape[1:])
        return np.concatenate([parts[:, part].reshape(-1, *rows.shape[1:]) for part in range(3)])

    return {name: by_part(rows) if "query_key_value" in name else rows for name, rows in tensors.items()}


def of_bloom(c: Config, tensors: Tensors) -> Tensors:
    """GPT-NeoX's parts, and nothing before the names."""
    parted = of_gptneox(c | {"num_attention_heads": c["n_head"]}, tensors)
    return {name.removeprefix("transformer."): weight for name, weight in parted.items()}


def of_llama4(c: Config, tensors: Tensors) -> Tensors:
    """Matrices of experts `[out, in]`, gate and up in two tensors."""
    found = {}
    for name, weight in tensors.items():
        if name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = weight.swapaxes(1, 2)
        elif name.endswith("experts.gate_up_proj"):
            parts = zip(("gate_proj", "up_proj"), np.split(weight.swapaxes(1, 2), 2, axis=1), strict=True)
            found |= {f"{name.replace('gate_up_proj', part)}.weight": rows for part, rows in parts}
        else:
            found[name] = weight
    return found


def of_qwen_delta(c: Config, tensors: Tensors) -> Tensors:
    """Norms with their 1, but the one behind the rule; the rate of decays, not its logarithm; queries, keys and values
    of Qwen3-Next in one tensor and the gates in another, heads in their order."""
    found = {}
    for name, weight in tensors.items():
        stem = name.rpartition("linear_attn.")[0] + "linear_attn"
        if name.endswith("A_log"):
            found[name] = -np.exp(weight)
        elif name.endswith("dt_bias"):
            found[f"{stem}.dt_proj.bias"] = weight
        elif name.endswith("conv1d.weight"):
            found[name] = weight[:, 0]
        elif name.endswith("in_proj_qkvz.weight"):
            keys, values, per = c["linear_num_key_heads"], c["linear_value_head_dim"], c["linear_key_head_dim"]
            group = c["linear_num_value_heads"] // keys * values
            heads = weight.reshape(keys, 2 * per + 2 * group, -1)
            parts = np.split(heads, [per, 2 * per, 2 * per + group], axis=1)
            q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in parts)
            found[f"{stem}.in_proj_qkv.weight"] = np.concatenate([q, k, v])
            found[f"{stem}.in_proj_z.weight"] = z
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(weight, 2, axis=1)
            found[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            found[name.replace("gate_up_proj", "up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = weight
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            found[name] = weight + 1
        else:
            found[name] = weight
    return found


def of_gemma4(c: Config, tensors: Tensors) -> Tensors:
    """The factors of the router and of experts beside the tensors whose products they are on."""
    renamed = {
        "layer_scalar": "layer_scalar.weight",
        "router.scale": "router.proj.scale",
        "router.per_expert_scale": "experts.down_proj.scale",
        "experts.gate_up_proj": "experts.gate_up_proj.weight",
        "experts.down_proj": "experts.down_proj.weight",
    }
    found = {}
    for name, weight in tensors.items():
        end = next((end for end in renamed if name.endswith(f".{end}")), "")
        found[name.removesuffix(end) + renamed.get(end, "")] = weight
    return found


def proportional_divisors(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    """One for the pairs that rotate in layers without a window, and a huge one for the others."""
    rope = c["rope_parameters"]["full_attention"]
    pairs = max(change["head_dim"] for change in c["per_layer_config"].values()) // 2
    rotated = int(rope["partial_rotary_factor"] * pairs)
    yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated))


def of_qwen3_5(c: Config, tensors: Tensors) -> Tensors:
    """The first value head of every key head, then the second of each, and so on."""
    keys, size = c["linear_num_key_heads"], c["linear_value_head_dim"]
    first = 2 * keys * c["linear_key_head_dim"]

    def tiled(rows: np.ndarray, per: int) -> np.ndarray:
        heads = rows.reshape(keys, -1, per, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    found = of_qwen_delta(c, tensors)
    for name, weight in found.items():
        if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
            found[name] = np.concatenate([weight[:first], tiled(weight[first:], size)])
        elif name.endswith(".in_proj_z.weight"):
            found[name] = tiled(weight, size)
        elif name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_proj.bias")):
            found[name] = tiled(weight, 1)
        elif name.endswith(".linear_attn.out_proj.weight"):
            found[name] = tiled(weight.T, size).T
    return found


def llama3_divisors(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    """What each frequency of llama3's rope is divided by: 1 for short wavelengths, the factor for long ones."""
    rope = (c["rope_parameters"] or {}).get("full_attention", c["rope_parameters"] or {})
    if rope.get("rope_type") != "llama3":
        return
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns >= low
    yield "rope_freqs.weight", 1 / ((1 - smooth) / factor + smooth)


def longrope_divisors(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    for length in ("long", "short"):
        if factors := c["rope_parameters"].get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", np.asarray(factors)


def further_layer(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    """One of the tensors of a layer that predicts a further token."""
    yield f"blk.{c['num_hidden_layers']}.nextn.enorm.weight", np.ones(c["hidden_size"])


def nothing(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    return iter(())


def of_encoder(c: Config, tensors: Tensors) -> Tensors:
    """By their own names, and without the pooler, which is a classifier's."""
    return {name.removeprefix("model."): weight for name, weight in tensors.items() if ".pooler." not in name}
