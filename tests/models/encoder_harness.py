"""An encoder as the engine runs it, without the engine: loaded from a checkpoint, inside `shard_map`, texts packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.engine.core.batch import whole_texts
from jaxllm.engine.features.pooling import with_token_types
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.pallas_kernels import REFERENCE, Kernels
from jaxllm.quantization.weight import WeightKind
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import ParamSpec, load_parameters

TOKENS = 352
"""More than two tiles of attention, and no whole number of them."""
TEXTS = 6


class EncoderHarness:
    """Hidden states of whole texts, or the scores of classes."""

    def __init__(
        self,
        path: Path,
        *,
        tp: int = 1,
        dtype: Any = jnp.float32,
        kernels: Kernels = REFERENCE,
        kinds: Callable[[ParamSpec], tuple[WeightKind, ...]] | None = None,
    ):
        checkpoint = open_checkpoint(path)
        spec = model_spec(checkpoint)
        self.config = spec.config
        model, params = abstract_model(spec, BuildOptions(dtype, tp, kernels), kinds)
        mesh = build_meshes(tp)[0]
        loaded = load_parameters(checkpoint, params, spec.names, mesh, ignored=spec.ignored)
        self._weights = tuple(jax.tree.leaves(loaded))
        checkpoint.close()
        graph, state = nnx.split(model)
        treedef = jax.tree.structure(state)
        classifies = self.config.num_labels > 0

        def step(weights: Any, fields: dict[str, jax.Array]) -> jax.Array:
            merged = nnx.merge(graph, jax.tree.unflatten(treedef, weights))
            tokens, meta = whole_texts(fields)
            hidden, _ = merged(tokens, (), with_token_types(meta, fields["second_text"]))
            return merged.logits(hidden) if classifies else hidden

        specs = (tuple(P(*leaf.axes) for p in params for leaf in p.leaves()), P())
        mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        self._step = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})

    def run(self, texts: Sequence[Sequence[int]], seconds: Sequence[int] = ()) -> list[np.ndarray]:
        """What each text's tokens have in one step, `[n, E]` or `[n, labels]`."""
        starts = [0, *accumulate(map(len, texts))]
        tokens, second = np.zeros(TOKENS, np.int32), np.zeros(TEXTS, np.int32)
        tokens[: starts[-1]] = [token for text in texts for token in text]
        second[: len(seconds)] = seconds
        query_start = np.full(TEXTS + 1, starts[-1], np.int32)
        query_start[: len(starts)] = starts
        fields = {"tokens": tokens, "second_text": second, "query_start": query_start, "num_seqs": np.int32(len(texts))}
        found = np.asarray(self._step(self._weights, fields))
        return [found[a:b] for a, b in pairwise(starts)]
