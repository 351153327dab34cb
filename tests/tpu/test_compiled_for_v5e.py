"""The programs that a TPU v5e would run, compiled here by libtpu: pages stay where they are, the kernel fits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.pallas_kernels.pages import INTERLEAVED
from jaxllm.pallas_kernels.tpu import most_sequences, paged_attention
from tests.pallas_kernels.oracle import ragged_batch
from tests.tpu.meshes import compilable
from tests.tpu.models import blueprint_of, step_of

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(900)]
OPTIMIZED = True


@pytest.mark.parametrize(
    ("model", "tp", "kind"),
    [
        ("Llama-3.1-8B", 1, "decode"),
        ("Llama-3.1-8B", 1, "backbone"),
        ("Llama-3.1-8B", 2, "decode"),
        ("Llama-3.2-1B", 1, "decode"),
        ("Qwen2-7B-Instruct", 1, "decode"),
    ],
)
def test_pages_are_written_in_place(model: str, tp: int, kind: str, tmp_path: Path) -> None:
    blueprint = blueprint_of(model, tmp_path, tp)
    step, arguments = step_of(blueprint, kind, compilable(tp))
    program = step.lower(*arguments).compile()
    memory, text = program.memory_analysis(), program.as_text()
    ((shape, *_),) = blueprint.sizes.buffers[0]
    assert "ragged_paged_attention" in text
    assert not re.findall(rf"= bf16\[{shape[0]},.* (?:copy|copy-start|transpose)\(.*", text)
    assert memory.alias_size_in_bytes >= blueprint.plan.kv_bytes
    assert memory.temp_size_in_bytes <= blueprint.plan.workspace_bytes


def compiled(*, sequences: int, columns: int, page_size: int, **shape: Any) -> Any:
    """A decode step's attention alone, over 512 pages."""
    batch = ragged_batch(decodes=(1,), seqs=sequences, page_size=page_size, **shape)
    meta = dataclasses.replace(batch.meta, page_table=jnp.zeros((sequences, columns), jnp.int32))
    (buffer,) = INTERLEAVED.shapes(512, page_size, shape["kv_heads"], (shape["head_dim"],))
    pages = (jax.ShapeDtypeStruct(buffer, shape["dtype"]),)
    leaves, tree = jax.tree.flatten(meta)  # lower() would fill it with placeholders, which are no arrays

    def attend(q: Any, k: Any, v: Any, pages: Any, leaves: Any) -> Any:
        return paged_attention(q, k, v, pages, jax.tree.unflatten(tree, leaves), scale=0.1)

    mapped = jax.shard_map(attend, mesh=compilable(), in_specs=P(), out_specs=P(), check_vma=False)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (batch.q, batch.k, batch.v, pages, leaves)
    )
    return jax.jit(mapped, donate_argnums=3).lower(*arguments).compile()


SHAPES = {
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": jnp.bfloat16,
    "sequences": 8,
    "columns": 64,
    "page_size": 16,
}


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 71, "kv_heads": 1, "head_dim": 64},
        {"heads": 14, "kv_heads": 2, "head_dim": 80},
        {"heads": 28, "kv_heads": 4},
        {"heads": 40, "kv_heads": 8},
        {"heads": 64, "kv_heads": 16},
        {"heads": 32, "kv_heads": 32, "head_dim": 96},
        {"dtype": jnp.float32, "kv_heads": 2},
        {"dtype": jnp.float32, "kv_heads": 4, "page_size": 128},
        {"heads": 71, "kv_heads": 1, "page_size": 128},
        {"heads": 64, "kv_heads": 8, "page_size": 128},
        {"sequences": most_sequences(8192), "columns": 8192},
        {"sequences": most_sequences(896), "columns": 896},
    ],
    ids=str,
)
def test_what_is_said_to_be_taken(shape: dict[str, Any]) -> None:
    memory = compiled(**SHAPES | shape).memory_analysis()
    assert memory.alias_size_in_bytes >= 512 * 16 * 2 * (SHAPES | shape)["kv_heads"] * 128 * 2


@pytest.mark.parametrize(
    ("shape", "error", "words"),
    [
        ({"heads": 9, "kv_heads": 3}, ValueError, "can not be XLA fully tiled"),
        ({"dtype": jnp.float32}, ValueError, "divisible by 8"),
        ({"head_dim": 256}, Exception, "Mosaic failed to compile.*last dim size is not 128"),
        ({"dtype": jnp.float16}, AssertionError, None),
        ({"sequences": most_sequences(8192) + 8, "columns": 8192}, jax.errors.JaxRuntimeError, "smem"),
    ],
    ids=str,
)
def test_what_is_said_not_to_be(shape: dict[str, Any], error: type[Exception], words: str | None) -> None:
    """Else there would be no reason to leave it to the compiler."""
    with pytest.raises(error, match=words):
        compiled(**SHAPES | shape)
