"""A family is one file: what finds families finds it in the folder, and nothing else is edited."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np

from tests.reference.tiny import tiny_config

FAMILY = """
from jaxllm.models.families.llama import llama_from_hf
from jaxllm.models.family import Family
from jaxllm.models.hf_fields import SIZE

SQUIRREL = Family(
    name="Squirrel",
    models="Squirrel 7B",
    architectures=("SquirrelForCausalLM",),
    model_types=("squirrel",),
    wrappers=("squirrel_with_eyes",),
    from_hf=llama_from_hf,
    gguf_architectures=("squirrel",),
    gguf={"hidden_size": "nut_length"},
    fields={"nut_length": SIZE},
)
"""
CHECK = """
import sys
from pathlib import Path
from jaxllm.models import families
families.__path__.append(sys.argv[1])
from jaxllm.models.registry import FAMILIES
from jaxllm.models.verdict import verdict
print("Squirrel" in [family.name for family in FAMILIES], *map(verdict, map(Path, sys.argv[2:])), sep="\\n")
"""


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "squirrel")
    sizes = {"block_count": 2, "context_length": 64, "nut_length": 48, "feed_forward_length": 96}
    for key, size in (sizes | {"attention.head_count": 4, "attention.key_length": 12}).items():
        writer.add_uint32(f"squirrel.{key}", size)
    writer.add_float32("squirrel.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((128, 48), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_in_the_folder_is_all_that_a_family_takes(tmp_path: Path) -> None:
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "squirrel.py").write_text(FAMILY)
    text = tiny_config("llama_gqa") | {"model_type": "squirrel"}
    files = {"plain": text, "wrapped": {"model_type": "squirrel_with_eyes", "text_config": text}}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    write_gguf(tmp_path / "squirrel.gguf")
    asked = [str(tmp_path / name) for name in ("families", "plain.json", "wrapped.json", "squirrel.gguf")]
    found = subprocess.run([sys.executable, "-c", CHECK, *asked], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["True", *["served, as Squirrel"] * 3]
