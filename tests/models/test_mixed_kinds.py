"""A model whose fused products are made of weights of several kinds, as a Q4_K_M file's are."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.quantization.weight import DenseKind, Fused, WeightKind
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import ParamSpec
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import write_checkpoint

FLOAT32, BFLOAT16 = DenseKind(np.dtype(np.float32)), DenseKind(np.dtype(jnp.bfloat16))


def last_segment_apart(spec: ParamSpec) -> tuple[WeightKind, ...]:
    """v of q·k·v, and up of gate·up, are bfloat16; everything else is float32."""
    count = len(spec.layout.segments) if spec.layout else 1
    return (*[FLOAT32] * (count - 1), BFLOAT16) if count > 1 else (FLOAT32,)


def test_every_fused_product_is_cut_where_the_kinds_change(tmp_path):
    spec = model_spec(open_checkpoint(write_checkpoint("llama_gqa", tmp_path)))
    model, params = abstract_model(spec, BuildOptions(jnp.float32), last_segment_apart)
    by_path = {param.path: param for param in params}
    qkv = by_path["layers.0.attention.qkv.weight"].abstract()
    assert isinstance(qkv, Fused)
    assert [part.shape[0] for part in qkv.parts] == [
        (spec.config.num_heads + spec.config.num_kv_heads) * spec.config.head_dim,
        spec.config.num_kv_heads * spec.config.head_dim,
    ]
    assert isinstance(model.layers[0].attention.qkv.weight.get_value(), Fused)


@pytest.mark.parametrize("name", ["llama_gqa", "mixtral", "deepseek_v2_lite"])
def test_logits_are_those_of_weights_rounded_the_same_way(name, tmp_path: Path):
    """float32 everywhere but where the last segment is kept in bfloat16: the golden, to that rounding."""
    golden = load_golden(name)
    ids = golden.prompt_token_ids
    path = write_checkpoint(name, tmp_path)
    mixed = Harness(path, kinds=last_segment_apart).run([ids], [Chunk(0, 0, len(ids))])[0]
    plain = Harness(path).run([ids], [Chunk(0, 0, len(ids))])[0]
    scale = np.abs(plain).max()
    error = np.abs(mixed - plain).max() / scale
    assert 0 < error < 0.02
    assert jax.numpy.argmax(jnp.asarray(mixed[-1])) == plain[-1].argmax()
