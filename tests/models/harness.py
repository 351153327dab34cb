"""A model as the engine runs it, without the engine: loaded from a checkpoint, inside `shard_map`, over paged KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.models.caches import CacheLayout
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.pallas_kernels import REFERENCE, Kernels, StateRows, StepMetadata
from jaxllm.quantization.weight import WeightKind
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import ParamSpec, load_parameters

PAGE = 8
TOKENS = 96
SEQS = 4


class Chunk(NamedTuple):
    """Tokens `start … end - 1` of sequence `seq`."""

    seq: int
    start: int
    end: int


def metadata(*arrays: np.ndarray | np.int32, decode_only: bool, states: StateRows | None = None) -> StepMetadata:
    """A step's metadata of what it holds in NumPy, in the order of its fields."""
    return StepMetadata(*map(jnp.asarray, arrays), decode_only=decode_only, states=states)


def state_rows(seqs: Sequence[int], starts: Sequence[int], rows: int) -> StateRows:
    """Each sequence's state has the row of its number, padding that of SEQS, and nothing is kept."""
    written = np.full(rows, SEQS, np.int32)
    written[: len(seqs)] = seqs
    begins = np.zeros(rows, bool)
    begins[: len(starts)] = [start == 0 for start in starts]
    fields = written, begins, written, np.full(rows, SEQS, np.int32), np.zeros(rows, np.int32)
    return StateRows(*map(jnp.asarray, fields))


@cache
def _jitted(graph: Any, treedef: Any, mesh: Mesh, weight_specs: tuple[P, ...], cache_specs: tuple[Any, ...]) -> Any:
    """One for all models that differ by nothing but their weights: what it is called with is traced once."""

    def step(weights: Any, caches: Any, tokens: jax.Array, meta: StepMetadata) -> Any:
        merged = nnx.merge(graph, jax.tree.unflatten(treedef, weights))
        hidden, caches = merged(tokens, caches, meta)
        return merged.logits(hidden), caches

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(weight_specs, cache_specs, P(), P()),
            out_specs=(P(), cache_specs),
            check_vma=False,
        ),
        donate_argnums=1,
        compiler_options={"xla_backend_optimization_level": 0},
    )


class Harness:
    """Logits of every token run. Sequences have `MAX_LEN` tokens of pages each, handed out in a scrambled order."""

    tokens = TOKENS

    def __init__(
        self,
        path: Path,
        *,
        tp: int = 1,
        expert_parallel: bool = False,
        dtype: Any = jnp.float32,
        max_len: int = 128,
        kernels: Kernels = REFERENCE,
        kinds: Callable[[ParamSpec], tuple[WeightKind, ...]] | None = None,
    ):
        checkpoint = open_checkpoint(path)
        spec = model_spec(checkpoint)
        self.config = spec.config
        options = BuildOptions(dtype, tp, kernels, expert_parallel)
        model, params = abstract_model(spec, options, kinds)
        mesh = build_meshes(tp)[0]
        loaded = load_parameters(checkpoint, params, spec.names, mesh, ignored=spec.ignored)
        self._weights = tuple(jax.tree.leaves(loaded))
        checkpoint.close()
        graph, state = nnx.split(model)
        weight_specs = tuple(P(*leaf.axes) for p in params for leaf in p.leaves())
        self._columns = -(-max_len // PAGE)
        count = SEQS * self._columns
        self._table = 1 + np.random.default_rng(0).permutation(count).reshape(SEQS, self._columns).astype(np.int32)
        layout = CacheLayout(kernels.page_dtype(dtype), PAGE, tp, kernels.page_layout)
        buffers = [layout.buffers(spec, count + 1, SEQS + 1) for spec in self.config.caches]
        self._caches = tuple(
            tuple(jax.device_put(np.zeros(b.shape, b.dtype), NamedSharding(mesh, P(*b.axes))) for b in layer)
            for layer in buffers
        )
        cache_specs = tuple(tuple(P(*b.axes) for b in layer) for layer in buffers)
        self._step = _jitted(graph, jax.tree.structure(state), mesh, weight_specs, cache_specs)

    def run(self, tokens: Sequence[Sequence[int]], chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """One mixed step of at most `TOKENS` tokens, one-token chunks first: each chunk's logits `[n, V]`."""
        assert all(len(range(c.start, c.end)) >= 1 for c in chunks) and len(chunks) <= SEQS
        ids, positions, lengths = (np.zeros(self.tokens, np.int32) for _ in range(3))
        seq_ids = np.full(self.tokens, SEQS, np.int32)
        query_start, context_len = np.zeros(SEQS + 1, np.int32), np.zeros(SEQS, np.int32)
        table = np.zeros_like(self._table)
        row = 0
        for index, chunk in enumerate(chunks):
            end = row + chunk.end - chunk.start
            ids[row:end] = tokens[chunk.seq][chunk.start : chunk.end]
            positions[row:end] = np.arange(chunk.start, chunk.end)
            lengths[row:end] = max(len(tokens[chunk.seq]), chunk.end)
            seq_ids[row:end] = index
            context_len[index] = chunk.end
            table[index] = self._table[chunk.seq]
            row = end
            query_start[index + 1 :] = row
        decodes = next((i for i, c in enumerate(chunks) if c.end - c.start > 1), len(chunks))
        counts = np.int32(decodes), np.int32(len(chunks))
        states = state_rows([c.seq for c in chunks], [c.start for c in chunks], SEQS)
        fields = positions, seq_ids, context_len, query_start, table, *counts, lengths
        meta = metadata(*fields, decode_only=False, states=states)
        logits = self._call(ids, meta)
        return [logits[a:b] for a, b in pairwise(query_start[: len(chunks) + 1])]

    def decode(self, token: int, position: int, seq: int = 0, length: int = 0) -> np.ndarray:
        """A decode-only step of one live row and one of padding: the logits `[V]`.

        `length` is what length-dependent rotary embeddings go by, where it is more than the tokens so far.
        """
        table = np.stack([self._table[seq], np.zeros(self._columns, np.int32)])
        meta = metadata(
            np.array([position, 0], np.int32),
            np.array([0, 2], np.int32),
            np.array([position + 1, 0], np.int32),
            np.array([0, 1, 1], np.int32),
            table,
            np.int32(1),
            np.int32(1),
            np.array([max(length, position + 1), 1], np.int32),
            decode_only=True,
            states=state_rows([seq], [position], 2),
        )
        return self._call(np.array([token, 0], np.int32), meta)[0]

    def _call(self, tokens: np.ndarray, meta: Any) -> np.ndarray:
        logits, self._caches = self._step(self._weights, self._caches, tokens, meta)
        return np.asarray(logits)
