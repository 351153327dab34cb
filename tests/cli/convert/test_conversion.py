"""`jaxllm convert`, from the function behind it on: what is written, and what is refused."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import LLM, SamplingParams
from jaxllm.cli.convert import safetensors as to_safetensors
from jaxllm.cli.convert.conversion import TargetFormat, convert_model
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.errors import CheckpointError, ConfigError, JaxLLMError
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import load_parameters
from tests.models import packed_models
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import tiny_weights, write_checkpoint
from tests.reference.tiny_gguf import gguf_config, write_gguf
from tests.support.sizes import FIELDS
from tests.weights.models import real_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def converted(source: Path, target: Path, to: TargetFormat, **fields: Any) -> Path:
    fields = {"dtype": "float32", "skip_tokenizer_init": True} | fields
    convert_model(EngineConfig(model=str(source), **fields), target, to)
    return target


def tokens(path: Path, **fields: Any) -> list[int]:
    with LLM(path, **FIELDS | fields) as llm:
        return llm.generate([[5, 6, 7, 8, 9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("isq", [None, "int4", "q8_0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_orbax_directory_says_what_its_source_says(isq, dtype, tmp_path):
    """In bfloat16 from the C++ kernels' tiles, where there are any."""
    source = write_checkpoint("llama_gqa", tmp_path / "source")
    target = converted(source, tmp_path / "saved", "orbax", isq=isq, dtype=dtype)
    assert tokens(target, dtype=dtype) == tokens(source, dtype=dtype, isq=isq)


@pytest.mark.slow
def test_a_real_gguf_says_from_orbax_what_it_says_by_itself(tmp_path):
    source = real_model("gemma3-270m")
    target = converted(source, tmp_path / "saved", "orbax", dtype="bfloat16")
    assert tokens(target, dtype="bfloat16") == tokens(source, dtype="bfloat16")


def logits(path: Path) -> np.ndarray:
    checkpoint, ids = open_checkpoint(path), packed_models.prompt()
    kinds = KindChooser(checkpoint, model_spec(checkpoint).names)
    return Harness(path, kinds=kinds).run([ids], [Chunk(0, 0, len(ids))])[0]


KINDS = ("llama:gptq_128", "llama:awq", "llama:fp8_blocks", "llama:bitsandbytes_nf4", "mixtral:mxfp4",
         "llama:gptq_sorted", "llama:gptq_sorted_each", "mixtral:gptq_sorted_each",
         "deepseek_v3:compressed_w8a16", "llama:modelopt_nvfp4", "llama:mxfp8", "mixtral:nvfp4")  # fmt: skip
"""A checkpoint of each kind of weight."""


@pytest.mark.parametrize("case", KINDS)
def test_packed_weights_are_saved_as_they_are(case, tmp_path):
    packed, _ = packed_models.write(case, tmp_path / "packed")
    np.testing.assert_array_equal(logits(converted(packed, tmp_path / "saved", "orbax")), logits(packed))


@pytest.mark.parametrize("case", ["llama:gptq_sorted", "llama:gptq_sorted_each"])
def test_sorted_inputs_that_devices_divide_stay_as_they_were_saved(case, tmp_path):
    packed, _ = packed_models.write(case, tmp_path / "packed")
    checkpoint = open_checkpoint(converted(packed, tmp_path / "saved", "orbax"))
    spec = model_spec(checkpoint)
    kinds = KindChooser(checkpoint, spec.names, tp=2)
    _, params = abstract_model(spec, BuildOptions(np.float32, 2), kinds)
    assert kinds.notes == []
    down = next(param for param in params if param.path == "layers.0.mlp.down.weight")
    mesh = build_meshes(1)[0]
    (value,) = load_parameters(checkpoint, [down], spec.names, mesh, ignored=("*",))
    expected = open_checkpoint(packed).read("model.layers.0.mlp.down_proj.weight").expand()
    np.testing.assert_array_equal(value.dequantize(), expected)


def test_an_order_that_is_none_is_refused(tmp_path):
    packed, _ = packed_models.write("llama:gptq_sorted", tmp_path / "packed")
    checkpoint = open_checkpoint(converted(packed, tmp_path / "saved", "orbax"))
    name = "layers.0.mlp.down.weight"
    kind, tensor = checkpoint.kinds[name], checkpoint.read(name)
    lying = tensor._replace(codes=replace(tensor.codes, order=np.zeros_like(tensor.codes.order)))
    with pytest.raises(CheckpointError, match=r"down\.weight': its order does not name each of 256 inputs once"):
        kind.pack([lying], None)


@pytest.mark.parametrize("case", ["llama:gptq_sorted", "llama:awq", "llama:fp8_blocks", "mixtral:mxfp4"])
def test_packed_weights_are_expanded_for_other_programs(case, tmp_path):
    packed, expanded = packed_models.write(case, tmp_path / "packed")
    target = converted(packed, tmp_path / "plain", "safetensors")
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    np.testing.assert_allclose(logits(target), logits(expanded), atol=1e-5)


def test_what_is_saved_may_be_saved_again_in_other_kinds(tmp_path):
    source = write_checkpoint("llama_gqa", tmp_path / "source")
    plain = converted(source, tmp_path / "plain", "orbax")
    twice, once = (converted(path, tmp_path / f"{path.name}-int8", "orbax", isq="int8") for path in (plain, source))
    pairs = zip(open_checkpoint(twice).tensors.items(), open_checkpoint(once).tensors.items(), strict=True)
    assert all(mine == other for mine, other in pairs)
    read = [open_checkpoint(path).read("head.weight") for path in (twice, once)]
    np.testing.assert_array_equal(read[0].data, read[1].data)


def test_tokenizer_and_generation_config_go_along(tmp_path):
    source = write_checkpoint("llama_gqa", tmp_path / "source")
    (source / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": [2, 7]}')
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"eos_token": "x"}', "chat_template.jinja": "{{ 1 }}"}
    files["chat_template.json"] = '{"chat_template": "{{ 3 }}"}'
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 2 }}")
    (source / "pytorch_model.bin").write_text("left behind")
    target = converted(source, tmp_path / "saved", "orbax", skip_tokenizer_init=False)
    assert {name: (target / name).read_text() for name in files} == files
    assert (target / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ 2 }}"
    assert not (target / "pytorch_model.bin").exists()
    assert open_checkpoint(target).generation_config == {"temperature": 0.25, "eos_token_id": [2, 7]}


def test_a_model_without_a_tokenizer_is_refused_unless_none_is_wanted(tmp_path):
    source = write_checkpoint("llama_gqa", tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        converted(source, tmp_path / "saved", "orbax", skip_tokenizer_init=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# safetensors


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_small", "qwen3_tied", "qwen2"])
def test_a_gguf_becomes_what_transformers_writes(name, tmp_path):
    """Names, shapes and numbers are those of the checkpoint that the GGUF was made of."""
    source = write_gguf(name, tmp_path / "m.gguf")
    target = converted(source, tmp_path / "folder", "safetensors")
    found, expected = load_file(target / "model.safetensors"), tiny_weights(name)
    assert {k: v.shape for k, v in found.items()} == dict(load_golden(name).tensor_shapes)
    for tensor, array in found.items():
        np.testing.assert_allclose(array, expected[tensor], atol=1e-6, err_msg=tensor)
    given, written = gguf_config(name), json.loads((target / "config.json").read_text())
    assert {k: written[k] for k in ("model_type", "hidden_size")} == {
        k: given[k] for k in ("model_type", "hidden_size")
    }
    assert model_spec(open_checkpoint(target)).config == model_spec(open_checkpoint(source)).config


def test_what_config_json_cannot_say_is_refused(tmp_path):
    """llama.cpp spells llama3's scaling out in divisors."""
    source = write_gguf("llama3_rope", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="the layers of this Llama model cannot be said"):
        converted(source, tmp_path / "folder", "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_folder_is_cast_and_sharded(monkeypatch, tmp_path):
    monkeypatch.setattr(to_safetensors, "SHARD_BYTES", 30_000)
    source = write_checkpoint("llama_gqa", tmp_path / "source")
    target = converted(source, tmp_path / "folder", "safetensors", dtype="bfloat16")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    expected = load_file(source / "model.safetensors")
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        found = load_file(target / file)[name]
        assert found.dtype.name == ("bfloat16" if found.ndim > 1 else "float32")
        np.testing.assert_array_equal(found, expected[name].astype(found.dtype))
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_orbax_directory_becomes_a_folder_again(tmp_path):
    source = write_checkpoint("qwen2_moe", tmp_path / "source")
    saved = converted(source, tmp_path / "saved", "orbax")
    with pytest.raises(ConfigError, match="Qwen 2 MoE"):  # its experts' sizes have no keys here
        converted(saved, tmp_path / "folder", "safetensors")
    plain = converted(write_checkpoint("qwen3", tmp_path / "plain"), tmp_path / "plain-saved", "orbax")
    found = load_file(converted(plain, tmp_path / "again", "safetensors") / "model.safetensors")
    expected = tiny_weights("qwen3")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(array, expected[name]) for name, array in found.items())


# GGUF


def test_a_gguf_is_quantized_and_keeps_its_metadata(tmp_path):
    source = write_gguf(
        "llama_gqa", tmp_path / "m.gguf", also_keys={"tokenizer.ggml.tokens": ["a", "bé"], "general.x": 7}
    )
    target = converted(source, tmp_path / "q.gguf", "gguf", isq="q8_0", isq_map={"*attn_v.weight": "none"})
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    changed = {"general.file_type", "general.quantization_version"}
    mine = {n: f.contents() for n, f in after.fields.items() if not n.startswith("GGUF.") and n not in changed}
    assert mine == {n: f.contents() for n, f in before.fields.items() if not n.startswith("GGUF.")}
    assert after.fields["general.file_type"].contents() == 7
    for old, new in zip(before.tensors, after.tensors, strict=True):
        quantized = old.data.ndim > 1 and "attn_v" not in old.name
        assert (new.name, new.tensor_type.name) == (old.name, "Q8_0" if quantized else "F32")
        values = gguf.quants.dequantize(new.data, new.tensor_type).reshape(old.data.shape)
        assert np.abs(values - old.data).max() <= (np.abs(old.data).max() / 127 if quantized else 0)


def test_what_was_done_is_said(tmp_path):
    """Rows of 64 take no blocks of 256: nothing becomes Q4_K."""
    source = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: "Q8_0")
    config = EngineConfig(model=str(source), isq="q4k", dequantize=True, skip_tokenizer_init=True)
    was, now, why = convert_model(config, tmp_path / "q.gguf", "gguf")[:3]
    size = format_bytes((tmp_path / "q.gguf").stat().st_size)
    assert was.startswith(f"it was {format_bytes(source.stat().st_size)}: Q8_0 ")
    assert now.startswith(f"it is {size}: Q5_1 ")
    assert why.startswith("0.0% of the weights are q4k (Q4_K): its blocks do not divide the rows of the others")


def test_a_quantized_gguf_is_expanded_first_only_if_asked(tmp_path):
    source = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: "Q8_0")
    with pytest.raises(ConfigError, match="is quantized already"):
        converted(source, tmp_path / "no.gguf", "gguf", isq="q5_1")
    same = converted(source, tmp_path / "same.gguf", "gguf")
    for old, new in zip(gguf.GGUFReader(source).tensors, gguf.GGUFReader(same).tensors, strict=True):
        np.testing.assert_array_equal(old.data, new.data)
    wide = converted(source, tmp_path / "wide.gguf", "gguf", dequantize=True)
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(wide).tensors} == {"F32"}


# What is refused


@pytest.mark.parametrize(
    ("to", "fields", "message"),
    [
        ("safetensors", {"isq": "int8"}, "isq and isq_map go with `--to orbax`"),
        ("gguf", {}, r"`--to gguf` takes a GGUF file, whose metadata it copies; .* is none: llama\.cpp's convert_hf"),
        ("orbax", {"isq_map": {"*.nothing": "q8_0"}}, "which no tensor of"),
    ],
)
def test_what_a_format_does_not_hold_is_refused(to, fields, message, tmp_path):
    source = write_checkpoint("llama_gqa", tmp_path / "source")
    with pytest.raises(ConfigError, match=message):
        converted(source, tmp_path / ("target.gguf" if to == "gguf" else "target"), to, **fields)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_kind_that_gguf_does_not_have_is_refused(tmp_path):
    source = write_gguf("llama_gqa", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="kept as per_channel, which GGUF does not have; it has q4_0, q4_1"):
        converted(source, tmp_path / "q.gguf", "gguf", isq="int8")


def test_a_destination_that_exists_is_left_alone(tmp_path):
    source = write_checkpoint("llama_gqa", tmp_path / "source")
    with pytest.raises(ConfigError, match="the source itself"):
        converted(source, source, "orbax")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match=r"'.*target', which exists; accepted is a path that does not exist"):
        converted(source, tmp_path / "target", "orbax")
    assert (tmp_path / "target" / "mine").read_text() == "mine"


@pytest.mark.parametrize("to", ["orbax", "safetensors", "gguf"])
def test_nothing_is_left_of_what_could_not_be_written(to, tmp_path):
    """As on a full disk: no file may have more than 20,000 bytes."""
    source = write_gguf("llama_gqa", tmp_path / "m.gguf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(JaxLLMError, match=r"target(\.gguf)?'?: .*") as refused:
            converted(source, tmp_path / ("target.gguf" if to == "gguf" else "target"), to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
