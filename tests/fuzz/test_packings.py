"""Quantized checkpoints: opened, and every matrix unpacked and kept packed."""

from __future__ import annotations

import json

import jax
import numpy as np

from jaxllm.quantization.schemes import coded_kind
from jaxllm.weights import open_checkpoint
from tests.fuzz.harness import COUNTS, fuzz
from tests.fuzz.mutants import json_bytes, mutate_bytes, mutate_json
from tests.fuzz.test_safetensors import joined, split
from tests.reference import packings

FLOAT32 = np.dtype(np.float32)
PACKINGS = (
    packings.gptq(4, 32, symmetric=True), packings.gptq(8, -1, symmetric=False, act_order=True), packings.awq(32),
    packings.marlin(32, of_awq=False), packings.compressed_packed(4, 32, symmetric=False, act_order=True),
    packings.compressed_int8(rounds_inputs=True), packings.compressed_fp8(), packings.fp8_tensors(),
    packings.fp8_blocks(32, 32), packings.bitsandbytes_nf4(), packings.bitsandbytes_int8(), packings.mxfp4(),
    packings.auto_round(32), packings.nvfp4("modelopt"), packings.nvfp4("compressed-tensors"),
    packings.mxfp4_modules("quark"), packings.mxfp8("modelopt"), packings.modelopt_fp8("FP8"), packings.torchao("intx"),
)  # fmt: skip


@COUNTS
def test_a_quantized_checkpoint_is_read_or_refused(count, tmp_path):
    values, valid = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32), []
    for number, packing in enumerate(PACKINGS):
        name = "a.experts.up_proj" if packing.config["quant_method"] == "mxfp4" else "a.up_proj"
        tensors, _ = packing.pack(values)
        folder = tmp_path / str(number)
        config = {"quantization_config": packing.config}
        packings.save(config, {name + part: array for part, array in tensors.items()}, folder)
        valid.append((folder, config, *split((folder / "model.safetensors").read_bytes())))

    def attempt(rng: np.random.Generator) -> None:
        folder, config, header, rest = valid[rng.integers(len(valid))]
        what = rng.choice(["config", "header", "bytes"])
        mutant = mutate_json(rng, config) if what == "config" else config
        (folder / "config.json").write_bytes(json_bytes(rng, mutant))
        head = json_bytes(rng, mutate_json(rng, header)) if what == "header" else json.dumps(header).encode()
        data = mutate_bytes(rng, rest)[: len(rest)].ljust(len(rest), b"\0") if what == "bytes" else rest
        (folder / "model.safetensors").write_bytes(joined(head, data))
        checkpoint = open_checkpoint(folder)
        for name, info in checkpoint.tensors.items():
            tensor = checkpoint.read(name)
            assert tensor.shape == info.shape
            if info.coding is None:
                continue
            assert tensor.expand().shape == info.shape
            *_, rows, inputs = info.shape
            kind = coded_kind(info.coding, FLOAT32, [rows], inputs)
            weight = kind.pack([tensor], None)
            abstract = kind.abstract(info.shape)
            assert [a.shape for a in jax.tree.leaves(weight)] == [a.shape for a in jax.tree.leaves(abstract)]

    assert 0 < fuzz(count, attempt) < count
