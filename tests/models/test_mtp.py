"""Modules that predict further tokens against their definition in float64, and checkpoints without one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.errors import CheckpointError
from jaxllm.models.abstract import abstract_model
from jaxllm.models.caches import CacheLayout
from jaxllm.models.mtp import MTPSpec, mtp_spec
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import model_spec
from jaxllm.pallas_kernels import REFERENCE
from jaxllm.sharding.mesh import build_mesh
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import load_parameters
from tests.models.harness import metadata
from tests.models.mtp_module import module_hidden, mtp_config, mtp_weights, write_mtp_checkpoint
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint

TOKENS, PAGE = 21, 8


def predicted(directory: Any, embeddings: np.ndarray, hidden: np.ndarray, cuts: list[int]) -> np.ndarray:
    """What the module gives of one sequence, which runs in steps that end at the `cuts`."""
    checkpoint = open_checkpoint(directory)
    spec = mtp_spec(checkpoint, model_spec(checkpoint))
    assert isinstance(spec, MTPSpec)
    model, params = abstract_model(spec, BuildOptions(jnp.float32, 1, REFERENCE))
    mesh = build_mesh(1)
    loaded = load_parameters(checkpoint, params, spec.names, mesh, ignored=spec.ignored)
    checkpoint.close()
    graph, state = nnx.split(model)
    tree, (cache,) = jax.tree.structure(state), spec.config.caches
    buffers = CacheLayout(REFERENCE.page_dtype(jnp.float32), PAGE, 1, REFERENCE.page_layout).buffers(cache, 5, 1)
    caches: Any = (tuple(jnp.zeros(b.shape, b.dtype) for b in buffers),)

    def step(weights: Any, embeddings: Any, hidden: Any, caches: Any, meta: Any) -> Any:
        return nnx.merge(graph, jax.tree.unflatten(tree, weights)).predict(embeddings, hidden, caches, meta)

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    found, begin = [], 0
    for end in cuts:
        count, table = end - begin, np.array([[2, 4, 1, 3]], np.int32)
        one, zeros = np.int32(1), np.zeros(count, np.int32)
        at = np.arange(begin, end, dtype=np.int32)
        decodes, starts = np.int32(count == 1), np.array([0, count], np.int32)
        fields = at, zeros, np.array([end], np.int32), starts, table, decodes, one, at + 1
        meta = metadata(*fields, decode_only=False)
        weights = tuple(jax.tree.leaves(loaded))
        out, caches = run(weights, embeddings[begin:end], hidden[begin:end], caches, meta)
        found.append(np.asarray(out))
        begin = end
    return np.concatenate(found)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_what_the_head_reads_is_as_defined(name, tmp_path):
    dice, size = np.random.default_rng(2), tiny_config(name)["hidden_size"]
    embeddings, hidden = (dice.standard_normal((TOKENS, size)).astype(np.float32) for _ in range(2))
    expected = module_hidden(mtp_weights(name), mtp_config(name), embeddings, hidden)
    directory = write_mtp_checkpoint(name, tmp_path)
    for cuts in ([TOKENS], [7, 8, 20, TOKENS]):
        found = predicted(directory, embeddings, hidden, cuts)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def spec_of(directory: Any) -> MTPSpec:
    checkpoint = open_checkpoint(directory)
    try:
        return mtp_spec(checkpoint, model_spec(checkpoint))
    finally:
        checkpoint.close()


def test_a_checkpoint_without_one_is_refused_by_the_name_of_a_tensor(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tensor 'mtp\.fc\.weight'"):
        spec_of(write_checkpoint("qwen3_5", tmp_path))


def test_the_module_of_a_wrapped_model_is_found_beside_a_copy_of_the_embedding(tmp_path):
    """Kimi's checkpoints have a prefix before all names; some list the module's own embedding before the model's."""
    weights = {f"language_model.{name}": weight for name, weight in sorted(mtp_weights("deepseek_v3").items())[::-1]}
    wrapper = {"model_type": "kimi_k25", "text_config": mtp_config("deepseek_v3"), "tie_word_embeddings": False}
    save_checkpoint(wrapper, weights, tmp_path)
    names = spec_of(tmp_path).names
    assert names["join.weight"][0][0].name == "language_model.model.layers.2.eh_proj.weight"
    assert names["layers.0.attention.kv_b.weight"][0][0].name in weights


def test_a_family_whose_modules_are_not_supported_is_refused_by_name(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"a checkpoint of Llama .* supported in .* Qwen3-Next, Qwen3\.5.* DeepSeek V3"
    ):
        spec_of(save_checkpoint(tiny_config("llama_gqa"), tiny_weights("llama_gqa"), tmp_path))
