"""The part of `gpu.py` that runs a model's own steps: attention alone, decode, prefill, and both at once."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import timed
from jaxllm.config import EngineConfig
from jaxllm.engine.device.executables import COMPILER_OPTIONS
from jaxllm.engine.device.keys import PLAIN, SAMPLED
from jaxllm.engine.device.packing import SETTING_FLOATS, SETTING_INTS, backbone_packing, decode_packing
from jaxllm.engine.device.step import StepFunctions
from jaxllm.engine.start.plan import Platform, make_blueprint
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.sharding.mesh import build_mesh
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import dummy_parameters

TINY = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MIXED_DECODES = 32
ROOM = 512
"""Tokens that a sequence may grow by while it is measured."""


class Model:
    """A model with random weights, its compiled steps and the state that they pass on."""

    def __init__(self, given: argparse.Namespace, default: Path):
        self.given = given
        folder = Path(tempfile.mkdtemp())
        values = json.loads(((given.config / "config.json") if given.config else default).read_text())
        (folder / "config.json").write_text(json.dumps(values.get("config", values) | (TINY if given.tiny else {})))
        longest, rows = max(*given.contexts, *given.prefill) + ROOM, max(*given.rows, MIXED_DECODES + 1)
        config = EngineConfig(
            model=str(folder), load_format="dummy", max_model_len=longest, max_num_seqs=rows,
            max_num_batched_tokens=max(*given.prefill, 2 * MIXED_DECODES), isq=given.isq, cpu_kernels="off",
            kv_cache_memory=2**24 if given.tiny else None,
        )  # fmt: skip
        self.blueprint = make_blueprint(config, open_checkpoint(folder, "dummy"), Platform.current())
        self.sizes, mesh = self.blueprint.sizes, build_mesh(1)
        self.functions = StepFunctions(self.blueprint.model, self.blueprint.params, mesh, self.sizes)
        self.weights = self.functions.pack_weights(dummy_parameters(self.blueprint.params, mesh, 0))
        abstract = self.functions.abstract_state()
        self.state = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract))()
        config = self.blueprint.spec.config
        table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * 2
        self.read = self.blueprint.plan.weight_bytes - table
        """Bytes of the weights that a decode step reads."""

    def attention(self, bench: Any) -> None:
        """Attention of one layer's shape alone, its pages in any order."""
        c, kernels = self.blueprint.spec.config, self.blueprint.options.kernels
        if c.mla is not None:
            return bench.report(what="attention", note="latent pages are measured within decode")
        for rows, context in self._cells():
            if not bench.time_left:
                return None
            meta = self._decode_metadata(rows, context)
            q, kv = (jnp.ones((rows, heads, c.head_dim), self.sizes.dtype) for heads in (c.num_heads, c.num_kv_heads))

            def attend(state: Any, kv: Any = kv, meta: Any = meta) -> Any:
                q, pages = state
                return kernels.attention(q, kv, kv, pages, meta, scale=1.0)

            layer, *others = self.state.pages
            seconds, (_, layer) = timed(jax.jit(attend, donate_argnums=0), (q, layer))
            self.state = self.state._replace(pages=(layer, *others))
            moved = rows * context * self.blueprint.plan.kv_bytes_per_token / self.sizes.num_layers
            rate = moved / seconds
            bench.report(
                what="attention", rows=rows, context=context, us=seconds * 1e6, GBs=rate / 1e9,
                share=rate / bench.bandwidth,
            )  # fmt: skip
        return None

    def decode(self, bench: Any) -> None:
        """Steps of a token for each row: the device's time, and the host's to dispatch one."""
        for variant in (PLAIN, SAMPLED):
            for rows, context in self._cells():
                if not bench.time_left:
                    return
                step, compile_seconds = self._compiled(self.functions.decode(rows, variant))
                packing = decode_packing(rows)
                ints = np.zeros(packing.size, np.int32)
                views = packing.views(ints)
                views["num_decodes"][...], views["num_steps"][...] = rows, 1
                views["tokens"][:], views["slot"][:] = 1, np.arange(rows)
                host = []

                def run(state: Any, step: Any = step, ints: Any = ints, host: Any = host) -> Any:
                    began = time.perf_counter()
                    pages, slots, _ = step(self.weights, state.pages, state.slots, ints)
                    host.append(time.perf_counter() - began)
                    return state._replace(pages=pages, slots=slots)

                self._occupy(rows, context, sampled=variant.sampled)
                seconds, self.state = timed(run, self.state)
                floor = (self.read + rows * context * self.blueprint.plan.kv_bytes_per_token) / bench.bandwidth
                bench.report(
                    what="decode", variant=str(variant) or "greedy", rows=rows, context=context, ms=seconds * 1e3,
                    toks=rows / seconds, share=floor / seconds, host_ms=float(np.median(host)) * 1e3,
                    compile_s=compile_seconds,
                )  # fmt: skip

    def prefill(self, bench: Any) -> None:
        """One prompt of so many tokens."""
        for tokens in self.given.prefill:
            if bench.time_left:
                self._backbone(bench, "prefill", tokens, decodes=0)

    def mixed(self, bench: Any) -> None:
        """Decodes beside a chunk of a prompt."""
        self._backbone(bench, "mixed", self.sizes.max_num_batched_tokens, MIXED_DECODES)

    def _backbone(self, bench: Any, what: str, tokens: int, decodes: int) -> None:
        step, compile_seconds = self._compiled(self.functions.backbone(tokens))
        packing = backbone_packing(tokens, self.sizes.max_num_seqs, self.sizes.page_size)
        ints = np.zeros(packing.size, np.int32)
        views = packing.views(ints)
        views["num_decodes"][...], views["num_seqs"][...], views["tokens"][:] = decodes, decodes + 1, 1
        views["query_start"][:] = np.minimum(np.arange(len(views["query_start"])), decodes)
        views["query_start"][decodes + 1 :] = tokens
        views["slot"][: decodes + 1] = np.arange(decodes + 1)
        views["new_pages"][:, 0] = self.sizes.max_num_seqs
        context = self.given.contexts[0]

        def run(state: Any) -> Any:
            position = jnp.full(state.slots.position.shape, context, jnp.int32).at[decodes].set(0)
            slots = state.slots._replace(position=position)
            pages, slots, hidden = step(self.weights, state.pages, slots, state.hidden, ints)
            return state._replace(pages=pages, slots=slots, hidden=hidden)

        self._occupy(decodes + 1, max(context, tokens))
        seconds, self.state = timed(run, self.state, 5)
        flops = 2 * self.blueprint.plan.num_parameters * tokens / seconds
        bench.report(
            what=what, tokens=tokens, decodes=decodes, ms=seconds * 1e3, toks=tokens / seconds, TFLOPs=flops / 1e12,
            share=flops / bench.flops, compile_s=compile_seconds,
        )  # fmt: skip

    def _cells(self) -> list[tuple[int, int]]:
        """Rows and contexts that the pool holds, pages of different rows being different ones."""
        held = (self.sizes.num_pages - 1) * self.sizes.page_size
        cells = [(rows, context) for context in self.given.contexts for rows in self.given.rows]
        return [(rows, context) for rows, context in cells if rows * (context + ROOM) <= held]

    def _compiled(self, built: Any) -> tuple[Any, float]:
        function, arguments = built
        lowered, began = function.lower(*arguments), time.perf_counter()
        options = COMPILER_OPTIONS.get(self.functions.platform)
        return lowered.compile(compiler_options=options), time.perf_counter() - began

    def _table(self, rows: int, context: int) -> np.ndarray:
        """Pages of each row, scattered as in a pool that has been used for long."""
        each = min(-(-(context + ROOM) // self.sizes.page_size), self.sizes.pages_per_seq)
        table = np.zeros((rows, self.sizes.pages_per_seq), np.int32)
        ids = np.random.default_rng(0).permutation(np.arange(1, self.sizes.num_pages))
        table[:, :each] = np.resize(ids, rows * each).reshape(rows, each)
        return table

    def _decode_metadata(self, rows: int, context: int) -> StepMetadata:
        position = jnp.full(rows, context - 1, jnp.int32)
        return StepMetadata(
            positions=position, seq_ids=jnp.arange(rows), context_len=position + 1, query_start=jnp.arange(rows + 1),
            page_table=jnp.asarray(self._table(rows, context)), num_decodes=jnp.int32(rows), num_seqs=jnp.int32(rows),
            rotary_lengths=position + 1, decode_only=True,
        )  # fmt: skip

    def _occupy(self, rows: int, context: int, sampled: bool = False) -> None:
        """Slots as they are when `rows` sequences of `context` tokens run."""
        slots = self.state.slots
        ints, floats = np.zeros(slots.setting_ints.shape, np.int32), np.zeros(slots.setting_floats.shape, np.float32)
        for row in range(rows):
            whole, parts = SETTING_INTS.views(ints[row]), SETTING_FLOATS.views(floats[row])
            whole["window"][...], whole["top_k"][...], parts["repetition"][...] = 2**30, 50 if sampled else 0, 1
            parts["temperature"][...], parts["top_p"][...] = (1, 0.9) if sampled else (0, 1)
        self.state = self.state._replace(
            slots=slots._replace(
                position=slots.position.at[:rows].set(context - 1),
                page_table=slots.page_table.at[:rows].set(self._table(rows, context)),
                setting_ints=jnp.asarray(ints),
                setting_floats=jnp.asarray(floats),
            )
        )
