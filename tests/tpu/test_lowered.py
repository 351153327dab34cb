"""Whole steps lowered for a TPU where there is none, nor libtpu: Mosaic takes the kernel, pages are given away."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from tests.tpu.meshes import described
from tests.tpu.models import blueprint_of, step_of


@pytest.mark.parametrize("kind", ["decode", "backbone"])
@pytest.mark.parametrize(("model", "tp"), [("Llama-3.1-8B", 1), ("Llama-3.1-8B", 2), ("Llama-3.2-1B", 1)])
def test_a_step_attends_through_jaxs_kernel_over_pages_in_place(model: str, tp: int, kind: str, tmp_path: Path) -> None:
    blueprint = blueprint_of(model, tmp_path, tp)
    assert blueprint.plan.attention_backend == "tpu"
    step, arguments = step_of(blueprint, kind, described(tp))
    text = step.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text and "ragged_paged_attention" in text

    ((shape, *_),) = blueprint.sizes.buffers[0]
    assert shape[2:] == (2 * 8, 128)  # keys and values of 8 heads; those of 64 channels are filled up
    signature = re.search(r"@main\((.*?)\) ->", text, re.DOTALL)
    assert signature is not None
    pages = re.findall(rf"tensor<{'x'.join(map(str, shape))}xbf16> {{(.*?)}}(?=, %|$)", signature[1])
    assert len(pages) == len(jax.tree.leaves(arguments[1])) == 2
    assert all("tf.aliasing_output" in page or "jax.buffer_donor" in page for page in pages)


def test_a_step_with_experts_multiplies_by_the_compilers_own_grouped_product(tmp_path: Path) -> None:
    step, arguments = step_of(blueprint_of("Qwen3-30B-A3B", tmp_path), "backbone", described())
    assert "ragged_dot" in step.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


def test_pages_take_what_the_plan_says(tmp_path: Path) -> None:
    """Heads of 64 channels as well, which are filled up."""
    blueprint = blueprint_of("Llama-3.2-1B", tmp_path)
    _, arguments = step_of(blueprint, "decode", described())
    assert sum(page.size * page.dtype.itemsize for page in jax.tree.leaves(arguments[1])) == blueprint.plan.kv_bytes


def test_a_page_table_for_the_longest_context_fits_by_default(tmp_path: Path) -> None:
    blueprint = blueprint_of("Llama-3.1-8B", tmp_path, max_model_len=131072)
    assert blueprint.plan.attention_backend == "tpu"
    assert blueprint.plan.max_num_seqs == 24  # of 8,192 pages each, in the scalar memory of a core
    roomier = blueprint_of("Llama-3.1-8B", tmp_path, max_model_len=131072, block_size=128)
    assert roomier.plan.max_num_seqs == 224
