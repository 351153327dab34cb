"""The slices of `gpu.py` that run a model's own steps: attention alone, decode, prefill, and both at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_bars import ATTENTION_SHARE
from benchmarks.gpu_slice import QUANTIZED, Slice, model_config, model_folder
from jaxllm.config import EngineConfig
from jaxllm.engine.core.executables import COMPILER_OPTIONS
from jaxllm.engine.core.keys import PLAIN, SAMPLED, Key, Variant
from jaxllm.engine.core.packing import SETTING_FLOATS, SETTING_INTS
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.plan import step_functions
from jaxllm.engine.start.platform import Platform
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.pallas_kernels.matrices import E2M1
from jaxllm.quantization.coded import CodedKind, groups
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.quantization.stored import E8M0
from jaxllm.sharding.mesh import build_meshes, named_sharding
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import ParamSpec, dummy_parameters

MIXED_DECODES = 32
ROOM = 512
"""Tokens that a sequence may grow by while it is measured."""
ATTENTION_BYTES = 2**33
"""Keys and values that a measurement of attention reads at most, if it reads more than one layer's: far more than any
cache holds, so that what is measured is memory."""


def measure_model(run: Slice) -> None:
    """Measure the cells of the slice that are not yet there."""
    given, name = run.given, run.name
    if name == "attention":
        Model(given, given.attention_rows, max(given.attention_contexts), 16).attention(run)
    elif name == "decode":
        Model(given, given.rows, max(given.contexts) + ROOM, 16).decode(run, PLAIN, given.contexts)
    elif name == "sampled":
        Model(given, given.rows, max(given.contexts) + ROOM, 16).decode(run, SAMPLED, given.contexts)
    elif name in QUANTIZED:
        if name in OTHERS:
            SCHEMES["int4"] = OTHERS[name]  # of this process, in place of what int4 means elsewhere
        scheme = "int4" if name in OTHERS else SCHEME_OF.get(name, name)
        Model(given, given.rows, min(given.contexts) + ROOM, 16, scheme, name).decode(run, PLAIN, given.contexts[:1])
    else:
        decodes, longest = (4, 64) if given.tiny else (MIXED_DECODES, max(given.prefill))
        model = Model(given, [decodes + 1], max(given.contexts[0], longest) + ROOM, max(longest, 2 * decodes))
        for tokens in given.prefill:
            model.prefill(run, tokens)
        model.mixed(run, given.contexts[0], decodes)


OTHERS: dict[str, Callable[[np.dtype], CodedKind]] = {
    "gptq128": lambda dtype: groups(dtype, 4, 128),
    "mxfp4": lambda dtype: groups(dtype, 4, 32, True, E8M0, E2M1),
}
"""Kinds that only checkpoints have."""

SCHEME_OF = {"q4_k_m": "q4k"}
"""What most of a mixture is encoded in."""


def _more_bits(layers: int) -> dict[str, str]:
    """The tensors to which llama.cpp's Q4_K_M gives Q6_K: in the first and the last eighth, and a third between."""
    first = layers // 8
    found = [n for n in range(layers) if n < first or n >= 7 * layers // 8 or (n - first) % 3 == 2]
    return {f"*.{n}.{name}.weight": "q6k" for n in found for name in ("self_attn.v_proj", "mlp.down_proj")}


class Model:
    """A model with random weights, its compiled steps and the state that they pass on."""

    def __init__(
        self, given: Any, rows: Sequence[int], longest: int, batched: int, isq: str | None = None, label: str = ""
    ):
        self.rows, self.isq, self.tiny = rows, label or given.isq, given.tiny
        folder = model_folder(given, "steps")
        config = EngineConfig(
            model=str(folder), load_format="dummy", max_model_len=longest, max_num_seqs=max(*rows, 2),
            max_num_batched_tokens=max(batched, *rows), isq=isq or given.isq, cpu_kernels="off",
            isq_map=_more_bits(model_config(given)["num_hidden_layers"]) if label == "q4_k_m" else None,
            kv_cache_memory=2**24 if given.tiny else None,
        )  # fmt: skip
        self.mesh = build_meshes(1)[0]
        platform = Platform.of(self.mesh.devices.flat[0])
        self.blueprint = make_blueprint(config, open_checkpoint(folder, "dummy"), platform)
        self.sizes, self.config = self.blueprint.sizes, self.blueprint.spec.config
        self.functions = step_functions(self.blueprint, self.mesh)
        abstract = self.functions.state.abstract()
        self.state = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract))()
        print(self.blueprint.plan.summary(), flush=True)

    @functools.cached_property
    def weights(self) -> Any:
        params = self.blueprint.params
        drawn = _random_bits(params, self.mesh) if self.isq else dummy_parameters(params, self.mesh, 0)
        return self.functions.pack_weights(drawn)

    def attention(self, run: Slice) -> None:
        """Decode attention of as many layers as read ATTENTION_BYTES, their pages in any order."""
        c, kernels = self.config, self.blueprint.options.kernels
        if c.mla is not None:
            return run.report(what="attention", note="latent pages are measured within decode")
        token_bytes = self.blueprint.plan.kv_bytes_per_token // len(self.sizes.caches)

        @functools.partial(jax.jit, donate_argnums=0)
        def attend(state: Any, kv: Any, meta: Any) -> Any:
            q, layers = state
            with_new = []
            for pages in layers:  # each layer's queries are those before it, as in a model: none runs beside another
                q, pages = kernels.attention(q, kv, kv, pages, meta, scale=c.head_dim**-0.5)
                with_new.append(pages)
            return q, tuple(with_new)

        for context in run.given.attention_contexts:
            for rows in run.given.attention_rows:
                if not run.wants(what="attention", rows=rows, context=context):
                    continue
                count = min(max(ATTENTION_BYTES // (rows * context * token_bytes), 1), len(self.sizes.caches))
                meta = self._decode_metadata(rows, context)
                q, kv = (jnp.ones((rows, n, c.head_dim), self.sizes.dtype) for n in (c.num_heads, c.num_kv_heads))
                step = functools.partial(attend, kv=kv, meta=meta)
                pages, others = tuple(self.state["caches"][:count]), self.state["caches"][count:]
                seconds, last = run.timed(step, (q, pages))
                rate = rows * context * token_bytes * count / seconds
                row = {"what": "attention", "rows": rows, "context": context, "us_a_layer": seconds / count * 1e6}
                row |= {"GBs": rate / 1e9, "share": rate / run.bandwidth}
                if rows >= 8 and row["share"] < ATTENTION_SHARE:
                    row["profile"], last = run.profile(f"attention-{rows}-{context}", step, last)
                self.state |= {"caches": (*last[1], *others)}
                run.report(**row)
        return None

    def decode(self, run: Slice, variant: Variant, contexts: Sequence[int]) -> None:
        """Steps of a token for each row: the device's time, and the host's to dispatch one."""
        label = {"what": "decode", "variant": "+".join(sorted(variant)) or "greedy"} | (
            {"isq": self.isq} if self.isq else {}
        )
        held = (self.sizes.num_pages - 1) * self.sizes.page_size
        for rows in self.rows:
            for context in contexts:
                cell = label | {"rows": rows, "context": context}
                if not run.wants(**cell):
                    continue
                if rows * (context + ROOM) > held and not self.tiny:
                    run.report(**cell, note=f"not measured: the pool holds {held:,} tokens")
                    continue
                self._decode_cell(run, variant, cell, traced=context == min(contexts) and variant == PLAIN)

    def _decode_cell(self, run: Slice, variant: Variant, cell: dict[str, Any], traced: bool) -> None:
        rows, context = cell["rows"], cell["context"]
        bucket = max(rows, 2)  # as in the engine, which has no smaller one
        key = Key("decode", bucket, variant)
        step, compile_seconds = self._decode_step(key)
        ints, views = self.functions.features.packing(key, self.sizes).new()
        views["num_decodes"][...], views["num_steps"][...] = rows, 1
        views["tokens"][:], views["slot"][:] = 1, self.sizes.max_num_seqs
        views["slot"][:rows] = np.arange(rows)
        host = []

        def advance(state: Any) -> Any:
            began = time.perf_counter()
            pages, slots, _ = step(self.weights, state["caches"], state["slots"], ints)
            host.append(time.perf_counter() - began)
            return state | {"caches": pages, "slots": slots}

        self._occupy(rows, context, sampled="sampled" in variant)
        seconds, self.state = run.timed(advance, self.state)
        floor = (self._read + rows * context * self.blueprint.plan.kv_bytes_per_token) / run.bandwidth
        measured = {"ms": seconds * 1e3, "toks": rows / seconds, "share": floor / seconds}
        measured |= {"host_ms": float(np.median(host)) * 1e3, "compile_s": compile_seconds}
        if traced:
            name = f"{run.name}-{rows}-{context}"
            measured["profile"], self.state = run.profile(name, advance, self.state, count=4)
        run.report(**cell, **measured)

    def prefill(self, run: Slice, tokens: int) -> None:
        """One prompt of so many tokens."""
        self._backbone(run, {"what": "prefill", "tokens": tokens}, 0, context=0)

    def mixed(self, run: Slice, context: int, decodes: int) -> None:
        """Decodes beside a chunk of a prompt."""
        tokens = min(self.sizes.max_num_batched_tokens, 2048)
        self._backbone(run, {"what": "mixed", "tokens": tokens, "decodes": decodes}, decodes, context)

    def _backbone(self, run: Slice, cell: dict[str, Any], decodes: int, context: int) -> None:
        if not run.wants(**cell):
            return
        tokens, c = cell["tokens"], self.config
        key = Key("backbone", tokens)
        step, compile_seconds = self._compiled(self.functions.step(key))
        ints, views = self.functions.features.packing(key, self.sizes).new()
        views["num_decodes"][...], views["num_seqs"][...], views["tokens"][:] = decodes, decodes + 1, 1
        views["query_start"][:] = np.minimum(np.arange(len(views["query_start"])), decodes)
        views["query_start"][decodes + 1 :] = tokens
        views["slot"][: decodes + 1] = np.arange(decodes + 1)
        views["new_pages"][:, 0] = self.sizes.max_num_seqs

        def advance(state: Any) -> Any:
            position = jnp.full(state["slots"].position.shape, context, jnp.int32).at[decodes].set(0)
            slots = state["slots"]._replace(position=position)
            pages, slots, hidden = step(self.weights, state["caches"], slots, state["hidden"], ints)
            return state | {"caches": pages, "slots": slots, "hidden": hidden}

        self._occupy(decodes + 1, max(context, tokens))
        seconds, self.state = run.timed(advance, self.state)
        measured = {"ms": seconds * 1e3, "toks": tokens / seconds, "compile_s": compile_seconds}
        if c.moe is None:
            # Every weight but embedding and head, and the half of the scores that a causal mask leaves.
            tables = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
            products = 2 * (self.blueprint.plan.num_parameters - tables) * tokens
            scores = 2 * c.num_layers * c.num_heads * c.head_dim * ((tokens - decodes) ** 2 + 2 * decodes * context)
            rate = (products + scores) / seconds
            measured |= {"TFLOPs": rate / 1e12, "share": rate / run.flops}
        measured["profile"], self.state = run.profile(f"{cell['what']}-{tokens}", advance, self.state)
        run.report(**cell, **measured)

    @property
    def _read(self) -> int:
        """Bytes of the weights that a decode step reads: of an embedding that is not the head too, its rows alone."""
        tables = [p for p in self.blueprint.params if "embed" in p.path and not self.config.tie_word_embeddings]
        leaves = [leaf.array for table in tables for leaf in table.leaves()]
        return self.blueprint.plan.weight_bytes - sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @functools.lru_cache(maxsize=1)  # noqa: B019  there is one model
    def _decode_step(self, key: Key) -> tuple[Any, float]:
        return self._compiled(self.functions.step(key))

    def _compiled(self, built: Any) -> tuple[Any, float]:
        function, arguments = built
        lowered, began = function.lower(*arguments), time.perf_counter()
        options = COMPILER_OPTIONS.get(self.functions.platform)
        return lowered.compile(compiler_options=options), time.perf_counter() - began

    def _table(self, rows: int, context: int) -> np.ndarray:
        """Pages of each row, scattered as in a pool that has been used for long; where it has too few, some twice."""
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
        slots = self.state["slots"]
        ints, floats = np.zeros(slots.setting_ints.shape, np.int32), np.zeros(slots.setting_floats.shape, np.float32)
        for row in range(rows):
            whole, parts = SETTING_INTS.views(ints[row]), SETTING_FLOATS.views(floats[row])
            whole["top_k"][...] = 50 if sampled else 0
            parts["temperature"][...], parts["top_p"][...] = (1, 0.9) if sampled else (0, 1)
        self.state["slots"] = slots._replace(
            position=slots.position.at[:rows].set(context - 1),
            page_table=slots.page_table.at[:rows].set(self._table(rows, context)),
            setting_ints=jnp.asarray(ints),
            setting_floats=jnp.asarray(floats),
        )


HALVES = 0x211F211F
"""Two float16 of about 0.01."""


def _random_bits(params: Sequence[ParamSpec], mesh: Any) -> tuple[Any, ...]:
    """Weights of which only the speed counts: codes at random and scales all alike, without encoding anything."""

    @functools.cache
    def drawing(shape: tuple[int, ...], dtype: np.dtype, axes: Any) -> Callable[[jax.Array], jax.Array]:
        def draw(key: jax.Array) -> jax.Array:
            if dtype == np.int32:
                return jnp.full(shape, HALVES, dtype)
            if dtype.itemsize == 1:
                return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8) & 127, dtype)
            return jnp.full(shape, 1 if len(shape) == 1 else 0.01, dtype)

        return jax.jit(draw, out_shardings=named_sharding(mesh, axes))

    values = []
    for spec, key in zip(params, jax.random.split(jax.random.key(0), len(params)), strict=True):
        leaves = [drawing(x.array.shape, np.dtype(x.array.dtype), x.axes)(key) for x in spec.leaves()]
        values.append(jax.tree.unflatten(jax.tree.structure(spec.abstract()), leaves))
    return tuple(values)
