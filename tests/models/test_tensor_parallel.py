"""The same logits whatever the number of devices that share a layer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.models.config import allowed_degrees
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import FAMILIES, ModelSpec, abstract_model, model_spec
from jaxllm.weights import open_checkpoint
from tests.reference import load_golden
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.reference.tiny_configs import kin
from tests.support.devices import over_devices

LAYOUTS = {
    "llama_tp3:3": "an odd degree, 257 tokens of vocabulary over 3 devices",
    "llama_gqa:4": "more devices than KV heads: two hold each",
    "olmo2:2": "a norm over the heads of all devices",
    "llama_bias:2": "biases of split rows are split, those of summed outputs are added once",
    "gemma3_mqa:4": "one KV head on every device; the embedding is the head",
    "mixtral:8:ep": "one expert a device",
    "mamba2_bias:2": "all heads share what they read, and both devices have it; a norm over the heads of both",
    "bert:2": "an encoder",
}
LIKE_LAYOUTS = {
    "llama_mha8:8": "one head a device",
    "mixtral:8": "as many devices as heads",
    "mamba2:6": "two devices for each group of heads",
    "granite4:6": "attention and states on as many devices as heads, KV heads on two each",
    "qwen3_classifier:2": "three classes on one device, padding on the other",
}
DENSE = (
    "smollm3", "mistral_nemo", "ministral3_text", "phi", "phi3", "qwen2", "qwen3", "stablelm_qk_layernorm", "gemma",
    "gemma2", "gemma3_small", "gemma4", "gemma4_unified", "glm", "glm4", "lfm2", "lfm2_bias", "olmo2", "exaone4",
    "cohere2", "gpt2", "gpt_neox", "mpt", "qwen3_5",
)  # fmt: skip
BY_THREE = (
    "olmo3", "mistral4", "cohere", "granite", "ernie4_5", "starcoder2", "seed_oss", "hunyuan", "hunyuan_moe",
    "internlm3", "mamba2", "mamba2_bias", "granite4", "falcon_h1", "falcon_h1_norm", "nemotron_h",
    "qwen3_next_by_three", "bloom",
)  # fmt: skip
SPARSE = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "lfm2_moe",
    "ernie4_5_moe",
    "gpt_oss",
    "glm4_moe",
    "minimax_m2",
    "glm4_moe_lite",
    "gemma4_moe",
    "llama4",
    "qwen3_next",
    "qwen3_5_moe",
)
SPARSE_BY_TWO = ("granite4_moe", "nemotron_h_moe")
ENCODERS = (
    "roberta_classifier:2",
    "modernbert:3",
    "modernbert_classifier:6",
    "nomic_bert:4",
    "embedding_gemma:2",
)
GROUPS = {
    "layouts": tuple(LAYOUTS),
    "like layouts": tuple(LIKE_LAYOUTS),
    "dense": (*(f"{name}:4" for name in DENSE), *(f"{name}:3" for name in BY_THREE)),
    "kin": tuple(f"{name}:4" for name in kin.VARIANTS),
    "encoders": ENCODERS,
    "sparse": tuple(f"{name}{how}" for name in SPARSE for how in (":4", ":2:ep"))
    + tuple(f"{name}{how}" for name in SPARSE_BY_TWO for how in (":2", ":2:ep")),
}
QUANTIZED = {
    "one of each": ("llama_gqa:4:int8", "mixtral:4:ep:fp8"),
    "others": ("llama_gqa:2:fp8", "mixtral:4:int8", "deepseek_v2_lite:2:int8"),
}


def logits_of(cases: Iterable[str], folder: Path) -> dict[str, np.ndarray]:
    """Of each case, one process for all of them."""
    return over_devices(8, "tests.models.run_sharded", folder / "logits.npz", str(folder), *cases)


@pytest.mark.timeout(1500)  # minutes of the processor, which other tests leave little of
@pytest.mark.parametrize("group", GROUPS)
def test_logits_are_the_goldens(tmp_path, group):
    logits = logits_of(GROUPS[group], tmp_path)
    found = {case: logits[case] for case in GROUPS[group]}
    goldens = {case: load_golden(case.split(":")[0]).logits for case in GROUPS[group]}
    assert {case: found[case].shape for case in found} == {case: golden.shape for case, golden in goldens.items()}
    worst = {case: float(np.abs(found[case] - golden).max()) for case, golden in goldens.items()}
    assert not {case: error for case, error in worst.items() if not error <= 1e-4}


@pytest.mark.parametrize("group", QUANTIZED)
def test_quantized_weights_are_the_same_on_any_number_of_devices(tmp_path, group):
    alone = {case: f"{case.split(':')[0]}:1:{case.split(':')[-1]}" for case in QUANTIZED[group]}
    logits = logits_of([*alone, *alone.values()], tmp_path)
    worst = {case: float(np.abs(logits[case] - logits[one]).max()) for case, one in alone.items()}
    assert not {case: error for case, error in worst.items() if not error <= 1e-4}
    goldens = {case: load_golden(case.split(":")[0]).logits for case in alone}
    assert all(np.abs(logits[case] - golden).max() > 1e-4 for case, golden in goldens.items())


def test_every_family_is_among_the_cases():
    names = {case.split(":")[0] for cases in GROUPS.values() for case in cases}
    types = {kind for family in FAMILIES for kind in family.model_types}
    missing = types - {tiny_config(name)["model_type"] for name in names}
    others = {"ministral": "mistral", "xlm-roberta": "roberta", "kimi_k2": "deepseek_v3"}
    others |= {"baichuan": "llama with fused tensors"}
    others |= {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "glm4v_text": "glm4"}
    others |= {"qwen3_vl_moe_text": "qwen3_moe", "glm4v_moe_text": "glm4_moe", "paddleocr_vl_text": "ernie4_5"}
    assert missing == set(others), f"beside those that only spell it differently: {others}"


@pytest.fixture
def spec(request, tmp_path) -> ModelSpec:
    return model_spec(open_checkpoint(write_checkpoint(request.param, tmp_path)))


@pytest.mark.parametrize(
    ("spec", "tp", "allowed"),
    [
        ("llama_gqa", 3, [1, 2, 4]),  # 4 heads
        ("llama_gqa", 8, [1, 2, 4]),
        ("llama_mha8", 6, [1, 2, 4, 8]),
        ("llama_tp3", 2, [1, 3]),  # 9 heads over 3 KV heads; 96 rows of MLP rule 9 out
        ("llama_tp3", 9, [1, 3]),
        ("gemma3_mqa", 3, [1, 2, 4]),
    ],
    indirect=["spec"],
)
def test_a_degree_that_does_not_divide_is_refused_with_those_that_do(spec, tp, allowed):
    assert allowed_degrees(spec.config) == allowed
    with pytest.raises(ConfigError) as error:
        abstract_model(spec, BuildOptions(tp=tp))
    message = str(error.value)
    assert f"tensor_parallel_size is {tp}" in message and "\n" not in message
    assert message.endswith("accepted are " + ", ".join(map(str, allowed)))


@pytest.mark.parametrize(("spec", "tp"), [("llama_gqa", 4), ("gemma3_mqa", 2), ("llama_tp3", 3)], indirect=["spec"])
def test_shapes_divide_and_hold_the_model(spec, tp):
    """Global shapes: divisible where sharded, and no smaller than the published model's."""
    assert spec.config.vocab_size % (64 * tp) != 0
    _, whole = abstract_model(spec, BuildOptions(dtype=jnp.float32))
    _, split = abstract_model(spec, BuildOptions(dtype=jnp.float32, tp=tp))
    assert [p.path for p in whole] == [p.path for p in split]
    for a, b in zip(whole, split, strict=True):
        assert all(x <= y for x, y in zip(a.shape, b.shape, strict=True))
        for size, axis in zip(b.shape, b.axes, strict=True):
            assert axis is None or size % tp == 0
