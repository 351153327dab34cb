"""examples/convert_gptq.py and convert_awq.py: the numbers they find, and the bits they write."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm.models.registry import model_spec
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.source import resolve_model
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import tiny_prompt, write_checkpoint

pytestmark = pytest.mark.programs

EXAMPLES = Path(__file__).parents[1] / "examples"
GROUP = 32


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in ("calibration", "convert_gptq", "convert_awq"):
        sys.modules.pop(name, None)


def unpack_gptq(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """`[o, i]`, number by number as AutoGPTQ's documentation has it: zero points are stored less one."""
    qweight, qzeros = tensors["qweight"].view(np.uint32), tensors["qzeros"].view(np.uint32)
    scales, g_idx = tensors["scales"].astype(np.float32), tensors["g_idx"]
    inputs, outputs = qweight.shape[0] * 8, qweight.shape[1]
    found = np.empty((outputs, inputs), np.float32)
    for i in range(inputs):
        group = g_idx[i]
        codes = (qweight[i // 8] >> np.uint32(4 * (i % 8))) & 15
        zeros = np.array([(qzeros[group, o // 8] >> np.uint32(4 * (o % 8))) & 15 for o in range(outputs)])
        found[:, i] = scales[group] * (codes.astype(np.float32) - (zeros.astype(np.float32) + 1))
    return found


def unpack_awq(tensors: dict[str, np.ndarray], size: int) -> np.ndarray:
    """`[o, i]`, number by number: outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight from the lowest bits up."""
    place = {output: slot for slot, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}
    qweight, qzeros = tensors["qweight"].view(np.uint32), tensors["qzeros"].view(np.uint32)
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    found = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        shift = np.uint32(4 * place[o % 8])
        codes = ((qweight[:, o // 8] >> shift) & 15).astype(np.float32)
        zeros = ((qzeros[:, o // 8] >> shift) & 15).astype(np.float32)
        groups = np.arange(inputs) // size
        found[o] = tensors["scales"][groups, o].astype(np.float32) * (codes - zeros[groups])
    return found


def correlated(rng: np.random.Generator, tokens: int, inputs: int) -> np.ndarray:
    """Inputs as a model has them: alike, and some of them large."""
    mixed = rng.normal(size=(tokens, inputs // 4)) @ rng.normal(size=(inputs // 4, inputs))
    return ((mixed + rng.normal(size=(tokens, inputs))) * np.exp(rng.normal(size=inputs))).astype(np.float32)


def output_error(found: np.ndarray, weight: np.ndarray, x: np.ndarray) -> float:
    return float(((x @ (found - weight).T) ** 2).sum())


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_errs_less_than_rounding_and_is_written_as_found(act_order, example):
    rng = np.random.default_rng(0)
    x, weight = correlated(rng, 512, 128), rng.normal(size=(48, 128)).astype(np.float32)
    gptq, calibration = example("convert_gptq"), example("calibration")
    parts = gptq.quantized(jnp.asarray(weight), calibration.gram(jnp.asarray(x)), GROUP, True, act_order)
    found = np.asarray(calibration.expanded(*parts))
    nearest = calibration.expanded(*calibration.rounded(jnp.asarray(weight), GROUP, True), np.arange(128) // GROUP)
    assert output_error(found, weight, x) < 0.5 * output_error(np.asarray(nearest), weight, x)
    tensors = gptq.checkpoint_tensors(*parts)
    shapes = {name: (array.shape, array.dtype.name) for name, array in tensors.items()}
    assert shapes == {
        "qweight": ((16, 48), "int32"), "qzeros": ((4, 6), "int32"), "scales": ((4, 48), "float16"),
        "g_idx": ((128,), "int32"),
    }  # fmt: skip
    np.testing.assert_allclose(unpack_gptq(tensors), found, rtol=1e-6)
    assert (np.diff(tensors["g_idx"]) >= 0).all() != act_order


def test_gptq_of_inputs_that_are_not_alike_is_rounding(example):
    """With nothing to make good elsewhere, the nearest code is the best."""
    weight = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    gptq, calibration = example("convert_gptq"), example("calibration")
    codes, *_ = gptq.quantized(jnp.asarray(weight), jnp.eye(64), GROUP, False, False)
    np.testing.assert_array_equal(codes, calibration.rounded(jnp.asarray(weight), GROUP, False)[0])


def test_awq_errs_less_than_rounding_and_is_written_as_found(example):
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(correlated(rng, 512, 128)), jnp.asarray(rng.normal(size=(48, 128)), jnp.float32)
    awq, calibration = example("convert_awq"), example("calibration")
    scale, group_of = awq.best_scale(weight, x, calibration.gram(x), GROUP), np.arange(128) // GROUP
    parts = calibration.rounded(weight * scale, GROUP, False)
    found = np.asarray(calibration.expanded(*parts, group_of))
    nearest = np.asarray(calibration.expanded(*calibration.rounded(weight, GROUP, False), group_of))
    errors = [output_error(values, np.asarray(weight), np.asarray(x)) for values in (found / scale, nearest)]
    assert errors[0] < 0.9 * errors[1]
    np.testing.assert_allclose(unpack_awq(awq.checkpoint_tensors(*parts), GROUP), found, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama_gqa", "llama_bias", "qwen3"])
def test_the_llama_of_the_examples_is_transformers(name, example, tmp_path):
    calibration = example("calibration")
    model = calibration.Model(write_checkpoint(name, tmp_path))
    tokens = np.array([tiny_prompt(name)], np.int32)
    logits = np.asarray(load_golden(name).logits, np.float64)[: tokens.shape[1] - 1]
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.exp(-log_softmax[np.arange(len(logits)), tokens[0, 1:]].mean())
    assert model.perplexity(model.layers, tokens) == pytest.approx(expected, rel=1e-4)


def test_awqs_scales_change_nothing_before_rounding(example, tmp_path):
    """What inputs are divided by is in the norm, or the product, before them."""
    calibration, awq = example("calibration"), example("convert_awq")
    model = calibration.Model(write_checkpoint("llama_mha8", tmp_path))  # as many heads of values as of queries
    x = model.embed(np.array([tiny_prompt("llama_mha8")], np.int32))
    expected, into = model.layer(model.layers[0], x)
    scaled = awq.scaled(model.layers[0], into, GROUP)
    changed = {name for name in scaled if not np.array_equal(scaled[name], model.layers[0][name])}
    assert changed >= {"input_layernorm.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight"}
    np.testing.assert_allclose(model.layer(scaled, x)[0], expected, atol=2e-4)


def converted(source: Path, target: Path, method: str, example, monkeypatch, *flags: str) -> Any:
    """What the example's `main` makes of a folder and a text of random tokens; returns its module."""
    calibration, convert = example("calibration"), example(f"convert_{method}")
    text = np.random.default_rng(0).integers(0, 100, 4 * 32)

    class Tokenizer:
        def encode(self, _: str) -> list[int]:
            return text.tolist()

    monkeypatch.setattr(calibration, "load_tokenizer", lambda folder: Tokenizer())
    own = ["--group-size", str(GROUP), "--windows", "3", "--length", "32"]
    monkeypatch.setattr(sys, "argv", ["convert", str(source), str(target), *own, *flags])
    convert.main()
    return convert


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_folder_is_written_whole(method, example, monkeypatch, tmp_path, capsys):
    """What is unpacked from it stands for the weights that it was made of."""
    source = write_checkpoint("llama_mha8", tmp_path / "source")
    (source / "generation_config.json").write_text("{}")
    convert = converted(source, tmp_path / "target", method, example, monkeypatch)
    assert capsys.readouterr().out.count("perplexity") == 3
    target, plain = load_file(tmp_path / "target" / "model.safetensors"), load_file(source / "model.safetensors")
    config = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == (method, 4, GROUP)
    assert (tmp_path / "target" / "generation_config.json").exists()
    linear = "model.layers.0.self_attn.v_proj" if method == "gptq" else "model.layers.0.mlp.gate_proj"
    assert f"{linear}.weight" not in target
    parts = {name.removeprefix(f"{linear}."): array for name, array in target.items() if name.startswith(f"{linear}.")}
    if method == "gptq":
        found, expected = unpack_gptq(parts), plain[f"{linear}.weight"]
    else:  # the norm before it holds what its inputs are divided by
        norm = "model.layers.0.post_attention_layernorm.weight"
        found = unpack_awq(parts, GROUP) * (target[norm] / plain[norm])
        expected = plain[f"{linear}.weight"]
    assert np.abs(found - expected).mean() < 0.25 * np.abs(expected).mean()
    with pytest.raises(SystemExit, match="target exists; accepted is a path that does not"):
        convert.main()


def test_the_text_is_long_enough_for_what_is_asked_by_default(example, monkeypatch, tmp_path):
    """With the tokenizer of the model that the headers name."""
    calibration = example("calibration")
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    monkeypatch.setattr(calibration, "load_tokenizer", lambda folder: tokenizer)
    source = write_checkpoint("llama_mha8", tmp_path / "source")
    args = calibration.arguments("").parse_args([str(source), str(tmp_path / "target"), "--group-size", str(GROUP)])
    _, windows, held_out = calibration.prepared(args)
    assert (len(windows), len(held_out)) == (args.windows, args.windows // 3)


TRANSFORMERS = """
import json, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig
folder, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
method = json.load(open(folder + "/config.json"))["quantization_config"]["quant_method"]
chosen = GPTQConfig(bits=4, backend="torch") if method == "gptq" else AwqConfig(backend="torch_awq")
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, device_map="cpu", quantization_config=chosen)
assert type(model.model.layers[0].mlp.up_proj).__module__.startswith("gptqmodel.")
with torch.no_grad():
    np.save(out, model(torch.tensor([ids])).logits[0].numpy())
"""
PYTHON = os.environ.get("GPTQMODEL_PYTHON", sys.executable)
"""One that has transformers with its back end for GPTQ and AWQ; see docs/models.md."""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "flags"), [("gptq", ()), ("gptq", ("--act-order",)), ("awq", ())])
def test_transformers_reads_a_folder_as_jaxllm_does(method, flags, example, monkeypatch, tmp_path):
    if subprocess.run([PYTHON, "-c", "import gptqmodel, torch"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no gptqmodel; GPTQMODEL_PYTHON names one that has")
    folder, ids = tmp_path / "target", tiny_prompt("llama_mha8")
    converted(write_checkpoint("llama_mha8", tmp_path / "source"), folder, method, example, monkeypatch, *flags)
    program = [PYTHON, "-c", TRANSFORMERS, str(folder), json.dumps(ids), str(tmp_path / "logits.npy")]
    subprocess.run(program, check=True, env=os.environ | {"TORCHDYNAMO_DISABLE": "1"})  # compiles for minutes
    expected = np.load(tmp_path / "logits.npy")
    checkpoint = open_checkpoint(folder)
    kinds = KindChooser(checkpoint, model_spec(checkpoint).names)
    found = Harness(folder, kinds=kinds).run([ids], [Chunk(0, 0, len(ids))])[0]
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()  # it multiplies in float16
