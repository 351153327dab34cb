"""The tower that every family is a configuration of: patches of images in, rows for the language model out.

Images lie one after the other without padding between them. All that depends on their shapes is data from `packing.py`:
which patches see each other, where each one is, its taps into the table of positions, and which patches make a row. So
one executable serves all images that have the same number of patches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.config import DecoderConfig, NormKind, Projection
from jaxllm.models.decoder import DecoderLayer
from jaxllm.models.encoder import HEAD_ACTIVATIONS, run_layer
from jaxllm.models.layers.linear import Linear, param
from jaxllm.models.layers.mlp import MLP, gated
from jaxllm.models.layers.norm import norm_of_kind
from jaxllm.models.layers.rope import Angles
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Norm, Residual, StepMetadata


@dataclass(frozen=True)
class AxialRope:
    """Half of the pairs of a head's channels are rotated by a patch's row, the others by its column.

    Attributes:
        alternate: the axes take the frequencies of the whole head in turn, instead of each having the same ones.
        columns_first: the first pairs are rotated by the column.
    """

    head_dim: int
    theta: float = 10_000.0
    alternate: bool = False
    columns_first: bool = False

    def angles(self, places: Int[Array, "P 2"]) -> Angles:
        size = self.head_dim if self.alternate else self.head_dim // 2
        freqs = self.theta ** -(np.arange(0, size, 2) / size)
        freqs = np.concatenate([freqs[::2], freqs[1::2]]) if self.alternate else np.tile(freqs, 2)
        axes = np.repeat((1, 0) if self.columns_first else (0, 1), self.head_dim // 4)
        angles = places[:, axes].astype(jnp.float32) * freqs.astype(np.float32)
        return Angles(jnp.cos(angles), jnp.sin(angles))


@dataclass(frozen=True)
class PositionTable:
    """Learnt positions for a square of `side` by `side` patches.

    Attributes:
        kind: how other images read it. "fixed": there are none; "fraction": at the nearest place below; "bilinear":
            between four places, corners at corners; "axes": it has a part for columns and one for rows, to be added.
        class_row: each tile has one more patch in front of the others, with the first position and no pixels.
    """

    side: int
    kind: Literal["fixed", "fraction", "bilinear", "axes"] = "fixed"
    class_row: bool = False

    @property
    def taps(self) -> int:
        return {"bilinear": 4, "axes": 2}.get(self.kind, 1 + self.class_row)

    @property
    def rows(self) -> int:
        return 2 * self.side if self.kind == "axes" else self.side**2 + 2 * self.class_row


@dataclass(frozen=True, kw_only=True)
class MergerConfig:
    """How patches become rows: norm, pooling, affine, norm, products, of which there may be any.

    Attributes:
        norm: of each patch, with `norm_eps`.
        pool: "concat": the patches of a row lie side by side; "mean": they are averaged and multiplied by `scale`.
        affine: a learnt bias is subtracted, and the rest multiplied by a learnt factor.
        pooled_norm: of the result.
        products: these follow one after the other.
    """

    norm: NormKind | None = None
    norm_eps: float = 1e-6
    pool: Literal["concat", "mean"] = "concat"
    scale: float = 1.0
    affine: bool = False
    pooled_norm: NormKind | None = None
    products: tuple[Projection, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """A tower for images.

    Attributes:
        blocks: its layers, those of an encoder.
        inputs: numbers of a patch.
        merge: a row is made of that many patches each way.
        patch_bias: the embedding of patches has a bias.
        first_norm, last_norm: in front of the layers and after them.
        full_layers: with a window, the layers whose patches see the whole image all the same.
        window: the side of a window, in rows; 0 for none.
        deepstack: layers whose outputs make rows too, for the language model's first layers; their mergers norm the
            patches of a row together.
        clipped: inputs and outputs of each product are kept within learnt bounds (Gemma 4 E2B and E4B).
    """

    blocks: DecoderConfig
    inputs: int
    merge: int
    merger: MergerConfig
    patch_bias: bool = True
    table: PositionTable | None = None
    rope: AxialRope | None = None
    first_norm: NormKind | None = None
    last_norm: NormKind | None = None
    full_layers: tuple[int, ...] = ()
    window: int = 0
    deepstack: tuple[int, ...] = ()
    clipped: bool = False

    @property
    def patches_per_row(self) -> int:
        return self.merge**2

    @property
    def row_size(self) -> int:
        """Numbers of a row: of the embedding, and of what each of `deepstack` adds."""
        return self.merger.products[-1].size * (1 + len(self.deepstack))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TowerBatch:
    """P patches of several images, then padding, as `packing.pack` lays them out.

    Attributes:
        patches: their pixels.
        seq_ids: the tile of each patch, S for padding.
        starts: the first patch of each of S tiles, and the end of the last.
        places: row and column of each patch in its tile.
        index, weight: k taps of each patch, rows of the table of positions and their weights.
        merge: the m patches of each of R rows.
        windows, window_starts: as `seq_ids` and `starts`, of windows; None without them.
    """

    patches: Float[Any, "P D"]
    seq_ids: Int[Any, "P"]
    starts: Int[Any, "n"]
    places: Int[Any, "P 2"]
    index: Int[Any, "P k"]
    weight: Float[Any, "P k"]
    merge: Int[Any, "R m"]
    windows: Int[Any, "P"] | None = None
    window_starts: Int[Any, "n"] | None = None


class Tower(nnx.Module):
    """Patch embedding, positions, layers that see an image or a window of it, and mergers."""

    def __init__(self, config: TowerConfig, options: BuildOptions):
        blocks, patches = config.blocks, config.patches_per_row
        size, eps = blocks.hidden_size, blocks.norm_eps
        self.config, self.dtype = config, options.dtype
        self.patch = Linear(config.inputs, size, options, config.patch_bias)

        self.positions = param((config.table.rows, size), options.dtype) if config.table is not None else None
        self.first_norm, self.last_norm = (
            _norm(kind, size, eps, options) for kind in (config.first_norm, config.last_norm)
        )
        layer = ClippedLayer if config.clipped else DecoderLayer
        self.layers = nnx.List([layer(blocks, i, options) for i in range(blocks.num_layers)])
        self.merger = Merger(config.merger, size, patches, options)
        deep = replace(config.merger, norm=None, pooled_norm=config.merger.norm)
        self.deep_mergers = nnx.List([Merger(deep, size, patches, options) for _ in config.deepstack])

    def __call__(self, batch: TowerBatch) -> Float[Array, "R n"]:
        """Rows of the images one after the other; a row is its embedding, then what each of `deepstack` adds."""
        x, deep = self.through(self.begin(batch), batch, range(len(self.layers)))
        return self.end(x, batch, deep)

    def begin(self, batch: TowerBatch) -> Float[Array, "P E"]:
        """The patches in front of the layers."""
        x = self.patch(jnp.asarray(batch.patches, self.dtype))
        if self.positions is not None:
            found = self.positions[...][batch.index].astype(jnp.float32)
            x = (x + jnp.sum(found * batch.weight[:, :, None], axis=1)).astype(self.dtype)
        live = _metadata(batch.seq_ids, batch.starts).live
        return jnp.where(live[:, None], x if self.first_norm is None else self.first_norm(x), 0)

    def through(
        self, x: Float[Array, "P E"], batch: TowerBatch, layers: range
    ) -> tuple[Float[Array, "P E"], list[Float[Array, "R _"]]]:
        """The patches after these layers, and what those of `deepstack` among them give."""
        config = self.config
        image = _metadata(batch.seq_ids, batch.starts)
        window = image
        if batch.windows is not None and batch.window_starts is not None:
            window = _metadata(batch.windows, batch.window_starts)
        angles = None if config.rope is None else config.rope.angles(batch.places)
        deep: list[jax.Array] = []
        for index in layers:
            with jax.named_scope(f"tower_layer_{index}"):
                full = not config.window or index in config.full_layers
                x = run_layer(*nnx.split(self.layers[index]), x, angles, image if full else window)
            if index in config.deepstack:
                deep.append(self.deep_mergers[config.deepstack.index(index)](x, batch.merge))
        return x, deep

    def end(self, x: Float[Array, "P E"], batch: TowerBatch, deep: Sequence[jax.Array]) -> Float[Array, "R n"]:
        """The rows, of the patches after the last layer."""
        x = x if self.last_norm is None else self.last_norm(x)
        return jnp.concatenate([self.merger(x, batch.merge), *deep], axis=-1)


def _norm(kind: NormKind | None, size: int, eps: float, options: BuildOptions) -> Any:
    return None if kind is None else norm_of_kind(kind, size, eps, options.kernels)


def _metadata(seq_ids: Int[Array, "P"], starts: Int[Array, "n"]) -> StepMetadata:
    """The patches as texts of a batch, of which attention sees each by itself."""
    count = len(starts) - 1
    zeros, none = jnp.zeros(len(seq_ids), jnp.int32), jnp.int32(0)
    lengths, pages = jnp.diff(starts), jnp.zeros((count, 1), jnp.int32)
    return StepMetadata(zeros, seq_ids, lengths, starts, pages, none, none, zeros, decode_only=False)


class Merger(nnx.Module):
    """Rows of the language model's size, of patches that belong together."""

    def __init__(self, config: MergerConfig, size: int, patches: int, options: BuildOptions):
        pooled = size * patches if config.pool == "concat" else size

        self.config, eps = config, config.norm_eps
        self.norm = _norm(config.norm, size, eps, options)
        self.pooled_norm = _norm(config.pooled_norm, pooled, eps, options)
        self.bias = param((size,), jnp.float32) if config.affine else None
        self.factor = param((size,), jnp.float32) if config.affine else None
        inputs = [pooled, *(product.size for product in config.products[:-1])]
        self.products = nnx.List(
            [Linear(i, p.size, options, p.bias) for i, p in zip(inputs, config.products, strict=True)]
        )

    def __call__(self, x: Float[Array, "P E"], merge: Int[Array, "R m"]) -> Float[Array, "R n"]:
        config, dtype = self.config, x.dtype
        x = (x if self.norm is None else self.norm(x))[merge]
        mean = config.pool == "mean"
        x = x.astype(jnp.float32).mean(axis=1) * config.scale if mean else x.reshape(len(merge), -1)
        if self.bias is not None and self.factor is not None:
            x = (x - self.bias[...]) * self.factor[...]
        x = (x if self.pooled_norm is None else self.pooled_norm(x)).astype(dtype)
        for product, kind in zip(self.products, config.products, strict=True):
            x = HEAD_ACTIVATIONS[kind.activation](product(x).astype(jnp.float32)).astype(dtype)
        return x


class ClippedLinear(nnx.Module):
    """Products with one input, each of which keeps its input and its output within learnt bounds of its own.

    Every device computes all of them.
    """

    def __init__(self, in_features: int, sizes: tuple[int, ...], options: BuildOptions):
        self.parts = nnx.List([Linear(in_features, size, options) for size in sizes])
        self.bounds = param((len(sizes), 4), jnp.float32)

    def late_segments(self, x: Float[Array, "T i"], norm: Norm | None = None) -> tuple[list[Float[Array, "T _"]], None]:
        x = x if norm is None else norm(x)
        bounds = self.bounds[...].astype(x.dtype)
        return [
            jnp.clip(part(jnp.clip(x, low, high)), out_low, out_high)
            for part, (low, high, out_low, out_high) in zip(self.parts, bounds, strict=True)
        ], None

    def __call__(
        self, x: Float[Array, "T i"], norm: Norm | None = None, residual: Residual = None
    ) -> Float[Array, "T o"]:
        assert residual is None, "a norm comes between a clipped product and the residual sum"
        return jnp.concatenate(self.late_segments(x, norm)[0], axis=-1)


class ClippedMLP(MLP):
    """The gated MLP of clipped products."""

    def __init__(self, size: int, hidden: int, activation: str, options: BuildOptions):
        self.gate_up = ClippedLinear(size, (hidden, hidden), options)
        self.down: Any = ClippedLinear(hidden, (size,), options)
        self.activation = activation

    def _between(self, x: Float[Array, "T E"], norm: Norm | None = None) -> Float[Array, "T F"]:
        return gated(self.gate_up(x, norm), self.activation)


class ClippedLayer(DecoderLayer):
    """The layer with clipped products."""

    def __init__(self, config: DecoderConfig, index: int, options: BuildOptions):
        super().__init__(config, index, options)
        size, inner = config.hidden_size, config.num_heads * config.head_dim
        self.attention: Any
        self.attention.qkv = ClippedLinear(size, (inner,) * 3, options)
        self.attention.output = ClippedLinear(inner, (size,), options)
        self.mlp = ClippedMLP(size, config.intermediate_size, config.hidden_act, options)
