"""`jaxllm convert --merge-lora`: the model with its adapters says what PEFT says, and other models are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxllm.cli.convert.conversion import MergedAdapter, TargetFormat, convert_model
from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from tests.models import packed_models
from tests.models.harness import Chunk, Harness
from tests.reference.gguf_adapters import gguf_adapter_tensors, write_gguf_adapter
from tests.reference.peft_adapters import ADAPTERS, adapter_tensors, load_adapter_golden, save_adapter, write_adapter
from tests.reference.tiny import write_checkpoint
from tests.reference.tiny_gguf import write_gguf

TOLERANCE = 2e-4


def merged(base: Path, target: Path, *adapters: Path | str, to: TargetFormat = "safetensors", **fields: Any) -> Path:
    config = EngineConfig(model=str(base), **{"dtype": "float32", "skip_tokenizer_init": True} | fields)
    convert_model(config, target, to, merge_lora=[str(adapter) for adapter in adapters])
    return target


def logits(path: Path, ids: list[int]) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    kinds = KindChooser(checkpoint, model_spec(checkpoint).names)
    return Harness(path, kinds=kinds).run([ids], [Chunk(0, 0, len(ids))])[0]


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_merged_model_says_what_peft_says(name: str, tmp_path: Path) -> None:
    base, golden = write_checkpoint(ADAPTERS[name].base, tmp_path / "base"), load_adapter_golden(name)
    target = merged(base, tmp_path / "merged", write_adapter(name, tmp_path / "adapter"))
    np.testing.assert_allclose(logits(target, golden.prompt_token_ids), golden.logits, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["dora", "tied_head", "gemma3_norms", "phi3_fused", "gpt2"])
def test_adapters_of_hugging_face_go_into_gguf_files(name: str, tmp_path: Path) -> None:
    """Whose Q and K have their rows in another order, norms one more, and matrices the other axis first."""
    changed = {"gemma3_norms": {"query_pre_attn_scalar": 32}}
    base, golden = write_gguf(ADAPTERS[name].base, tmp_path / "base.gguf"), load_adapter_golden(name)
    adapter = write_adapter(name, tmp_path / "adapter")
    found = logits(merged(base, tmp_path / "merged.gguf", adapter, to="gguf"), golden.prompt_token_ids)
    if name in changed:  # the file cannot say all of the config
        plain = merged(write_checkpoint(ADAPTERS[name].base, tmp_path / "hf"), tmp_path / "hf_merged", adapter)
        config = json.loads((plain / "config.json").read_text())
        scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
        (plain / "config.json").write_text(json.dumps(config | changed[name] | scaling))
        expected = logits(plain, golden.prompt_token_ids)
    else:
        expected = golden.logits
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "tied_embedding"])
@pytest.mark.parametrize("base_format", ["gguf", "safetensors"])
def test_gguf_adapters_go_into_both(name: str, base_format: str, tmp_path: Path) -> None:
    case, golden = ADAPTERS[name], load_adapter_golden(name)
    tensors = gguf_adapter_tensors(name, write_adapter(name, tmp_path / "adapter"))
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", tensors)
    if base_format == "gguf":
        base = write_gguf(case.base, tmp_path / "base.gguf")
        target = merged(base, tmp_path / "merged.gguf", adapter, to="gguf")
    else:
        target = merged(write_checkpoint(case.base, tmp_path / "base"), tmp_path / "merged", adapter)
    np.testing.assert_allclose(logits(target, golden.prompt_token_ids), golden.logits, atol=TOLERANCE)


def test_several_go_in_one_after_the_other_each_as_strong_as_it_says(tmp_path: Path) -> None:
    base, ids = write_checkpoint("llama_gqa", tmp_path / "base"), load_adapter_golden("plain").prompt_token_ids
    adapter = write_adapter("plain", tmp_path / "adapter")
    once = merged(base, tmp_path / "once", adapter)
    halves = merged(base, tmp_path / "halves", f"{adapter}=0.25", f"{adapter}=0.75")
    undone = merged(base, tmp_path / "undone", adapter, f"{adapter}=-1")
    np.testing.assert_allclose(logits(halves, ids), logits(once, ids), atol=TOLERANCE)
    np.testing.assert_allclose(logits(undone, ids), logits(base, ids), atol=TOLERANCE)


@pytest.mark.parametrize("case", ["llama:gptq_sorted", "llama:awq", "llama:fp8_blocks", "llama:bitsandbytes_nf4"])
def test_a_quantized_base_is_expanded_first(case: str, tmp_path: Path) -> None:
    packed, expanded = packed_models.write(case, tmp_path / "packed")
    shapes = {name: info.shape for name, info in open_checkpoint(expanded).tensors.items()}
    adapter, ids = small_adapter(shapes, tmp_path / "adapter"), packed_models.prompt()
    expected = logits(merged(expanded, tmp_path / "expected", adapter), ids)
    for to in ("safetensors", "orbax"):
        found = logits(merged(packed, tmp_path / to, adapter, to=to, dequantize=True), ids)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert np.abs(expected - logits(expanded, ids)).max() > 0.01


def small_adapter(shapes: dict[str, tuple[int, ...]], folder: Path) -> Path:
    """For the output projections of a model's attention."""
    rng, tensors = np.random.default_rng(1), {}
    for name, shape in shapes.items():
        if name.endswith("o_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((2, shape[1])).astype(np.float32) / 8
            tensors[f"{module}.lora_B.weight"] = rng.standard_normal((shape[0], 2)).astype(np.float32) / 8
    return save_adapter({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["o_proj"]}, tensors, folder)


def test_a_gguf_keeps_the_types_of_its_tensors_unless_others_are_asked_for(tmp_path: Path) -> None:
    base = write_gguf("llama_gqa", tmp_path / "base.gguf", types=lambda name: "Q8_0")
    adapter = write_adapter("plain", tmp_path / "adapter")

    def types(path: Path) -> dict[str, str]:
        return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}

    kept = merged(base, tmp_path / "kept.gguf", adapter, to="gguf")
    assert types(kept) == types(base)
    other = merged(base, tmp_path / "other.gguf", adapter, to="gguf", dequantize=True, isq="q4_0")
    assert types(other)["blk.0.attn_q.weight"] == types(other)["blk.0.attn_k.weight"] == "Q4_0"
    ids, golden = load_adapter_golden("plain").prompt_token_ids, load_adapter_golden("plain").logits
    assert np.abs(logits(kept, ids) - golden).max() < 0.3 < np.abs(logits(base, ids) - golden).max()


def test_a_model_whose_head_is_its_embedding_gets_a_head_where_they_differ(tmp_path: Path) -> None:
    base = write_checkpoint("llama_mqa_tied", tmp_path / "base")
    target = merged(base, tmp_path / "merged", write_adapter("tied_head", tmp_path / "adapter"))
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in open_checkpoint(target).tensors
    assert "lm_head.weight" not in open_checkpoint(base).tensors


def test_an_adapter_of_another_model_is_refused_by_what_does_not_fit(tmp_path: Path) -> None:
    adapter = write_adapter("plain", tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight', which .* does not have"):
        merged(write_checkpoint("gpt2", tmp_path / "gpt2"), tmp_path / "out", adapter)
    with pytest.raises(CheckpointError, match=r"keeps 'model\.layers\.0\.self_attn\.q_proj\.weight' in another layout"):
        merged(write_checkpoint("phi3", tmp_path / "phi3"), tmp_path / "out", adapter)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' is of shape \(128, 64\); expected is"):
        merged(write_checkpoint("llama_yarn", tmp_path / "yarn"), tmp_path / "out", adapter)
    tensors = adapter_tensors("plain") | {"base_model.model.model.layers.0.mlp.up_proj.bias": np.zeros(96, np.float32)}
    with_bias = save_adapter(load_adapter_golden("plain").settings, tensors, tmp_path / "bias")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias', which .* does not have; it was trained on 'llama_gqa'"):
        merged(write_checkpoint("llama_gqa", tmp_path / "llama"), tmp_path / "out", with_bias)
    assert not (tmp_path / "out").exists()


def test_what_was_converted_is_merged_into_what_it_was_made_of(tmp_path: Path) -> None:
    base = merged(write_checkpoint("llama_gqa", tmp_path / "base"), tmp_path / "saved", to="orbax")
    with pytest.raises(ConfigError, match="was converted already: merge into what it was made of"):
        merged(base, tmp_path / "out", write_adapter("plain", tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("text", "path", "scale"), [("a/b", "a/b", 1.0), ("a/b=0.5", "a/b", 0.5), ("x=y=-2", "x=y", -2.0)]
)
def test_a_scale_stands_after_the_path(text: str, path: str, scale: float) -> None:
    assert MergedAdapter.parse(text) == MergedAdapter(Path(path), scale)


def test_a_path_with_an_equals_sign_is_one_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "r=8").mkdir()
    assert MergedAdapter.parse(f"{tmp_path}/r=8") == MergedAdapter(tmp_path / "r=8")


@pytest.mark.parametrize("text", ["a=much", "a=nan", "=0.5", "a=inf"])
def test_other_scales_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted is PATH or PATH=SCALE"):
        MergedAdapter.parse(text)
