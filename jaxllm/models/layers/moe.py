"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): the router and the layer, for all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.errors import CheckpointError
from jaxllm.models.layers.linear import Linear
from jaxllm.models.layers.mlp import ACTIVATIONS, MLP, ClampedSwiglu, GatedMLP, gated
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.params import param, weight
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Later, Mixture, Norm, Residual, StepMetadata, late_sum
from jaxllm.pallas_kernels.grouped_matmul import sort_by_group
from jaxllm.sharding.collectives import (
    data_size,
    device_rank,
    gather_over_data,
    share_out_over_data,
    sum_over_tensor,
    tensor_rank,
    tensor_size,
)
from jaxllm.sharding.layout import Layout, Segment
from jaxllm.sharding.mesh import EVERY, TENSOR, Axes

SCORING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}
"""What turns a token's logits into its experts' scores."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """How tokens choose their experts, and how large those are.

    Attributes:
        hidden: the size of one expert's MLP; `shared_hidden` that of the MLP every token passes (0: none).
        scoring: "softmax" over all experts, or each expert's own "sigmoid".
        correction_bias: a bias on the scores that counts for the choice only, not for the weights.
        num_groups, top_groups: only the experts of the best `top_groups` groups may be chosen.
        group_score: what ranks a group: its best expert ("max"), or its two best together ("top2_sum").
        renormalize: the chosen scores are divided by their sum plus `renormalize_eps`.
        scale: factor on the weights, after that.
        shared_gate: the shared MLP's output is multiplied by the sigmoid of one more logit.
        scale_inputs: an expert's weight is on what it gets and not on what it gives.
        router_bias: on the logits.
        expert_scale: a learnt factor on the weight of each expert, after all else.
        beside_dense: a dense MLP runs beside the experts, each between norms of its own, and the router reads what
            comes before these, through a norm of its own.
        expert_bias: on all products of the experts.
        swiglu: what the experts' gates do; None is `act(gate) * up`.
        gated: experts, shared ones too, have a gate; otherwise they are `down(act(up(x)))`.
        latent: channels that tokens are projected to for the routed experts, and back from; 0 is no projection.

    The published routers:

        Mixtral (arXiv:2401.04088)       softmax, renormalize
        Qwen 2 MoE, Qwen 3 MoE           softmax, renormalize where `norm_topk_prob` says so
        DeepSeek V2 (arXiv:2405.04434)   softmax, groups by max (Lite: one group), scale
        gpt-oss (arXiv:2508.10925)       softmax over the chosen, which is softmax and renormalize; router_bias
        DeepSeek V3 (arXiv:2412.19437)   sigmoid, correction_bias, groups by top2_sum, renormalize with 1e-20, scale
        Llama 4                          sigmoid, scale_inputs
        Gemma 4                          softmax, renormalize, expert_scale, beside_dense

    Raises:
        CheckpointError: groups or top_k that the experts do not allow.
    """

    num_experts: int
    top_k: int
    hidden: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    renormalize: bool = False
    renormalize_eps: float = 0.0
    scale: float = 1.0
    shared_hidden: int = 0
    shared_gate: bool = False
    scale_inputs: bool = False
    router_bias: bool = False
    expert_scale: bool = False
    beside_dense: bool = False
    expert_bias: bool = False
    swiglu: ClampedSwiglu | None = None
    gated: bool = True
    latent: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise CheckpointError(f"the number of experts is {self.num_experts}; accepted is 1 or more")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise CheckpointError(
                f"the number of expert groups is {self.num_groups}; accepted are divisors of {self.num_experts} experts"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise CheckpointError(
                f"the number of expert groups a token may use is {self.top_groups}; accepted are 1 … {self.num_groups}"
            )
        most = self.top_groups * (self.num_experts // self.num_groups)
        if not 1 <= self.top_k <= most:
            raise CheckpointError(f"the number of experts a token uses is {self.top_k}; accepted are 1 … {most}")
        if self.group_score == "top2_sum" and self.num_experts < 2 * self.num_groups:
            raise CheckpointError(
                f"the number of expert groups is {self.num_groups}, ranked by their two best of {self.num_experts} "
                f"experts; accepted are 1 … {self.num_experts // 2}"
            )


def route(
    logits: Float[Array, "T X"], config: MoEConfig, bias: Float[Array, "X"] | None = None
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """The weight, float32, and the number of every expert that each token uses, best first.

    Args:
        logits: the router's output.
        bias: the correction bias of a config that has one.
    """
    scores = SCORING[config.scoring](logits.astype(jnp.float32))
    choice = scores if bias is None else scores + bias
    if config.top_groups < config.num_groups:
        choice = _best_groups_only(choice, config)
    experts = lax.top_k(choice, config.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + config.renormalize_eps)
    return weights * config.scale, experts


def _best_groups_only(choice: Float[Array, "T X"], config: MoEConfig) -> Float[Array, "T X"]:
    """`choice`, with -inf for the experts of all but each token's best groups."""
    groups = choice.reshape(choice.shape[0], config.num_groups, -1)
    best = lax.top_k(groups, 2 if config.group_score == "top2_sum" else 1)[0].sum(axis=-1)
    chosen = lax.top_k(best, config.top_groups)[1]
    allowed = (chosen[:, :, None] == jnp.arange(config.num_groups)).any(axis=1)
    return jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(choice.shape)


class MoE(nnx.Module):
    """A router, experts, and the shared experts where there are any.

    Over the tensor axis either every expert's hidden size is divided, or (`expert_parallel`) the experts themselves.
    Activations are whole on every device, so that both end in one sum over the axis.

    Where several batches run side by side, experts are divided over the data axis as well. A device is then given the
    rows of all batches, and each batch gets its own rows back.
    """

    def __init__(
        self, size: int, config: MoEConfig, activation: str, options: BuildOptions, norm_eps: float | None = None
    ):
        """`norm_eps` is of the router's own norm, in a model that has one."""
        self.router = Router(size, config, options, norm_eps)
        self.latent_down = Linear(size, config.latent, options) if config.latent else None
        self.experts = Experts(config.latent or size, config, activation, options)
        self.latent_up = Linear(config.latent, size, options) if config.latent else None
        shared = GatedMLP if config.gated else MLP
        self.shared = shared(size, config.shared_hidden, activation, options) if config.shared_hidden else None
        self.shared_gate = Linear(size, 1, options) if config.shared_gate else None
        self.kernels = options.kernels
        self.config = config

    def __call__(
        self,
        x: Float[Array, "T E"],
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
    ) -> Float[Array, "T E"]:
        """The layer's output, added to `residual` if there is one. Padding visits no expert: it costs no weights."""
        before, x = x, x if norm is None else norm(x)
        out = self._mixed(x, meta, before)
        part = late_sum(out)
        out = sum_over_tensor(part if self.kernels.wide_sums else part.astype(x.dtype)).astype(x.dtype)
        return out if residual is None else residual + out

    def unsummed(self, x: Float[Array, "T E"], meta: StepMetadata) -> Mixture | Float[Array, "T E"]:
        """The layer's output, where kernels and one device have it as a mixture that is yet to be summed."""
        out = self._mixed(x, meta, x) if tensor_size() * data_size() == 1 else self(x, meta)
        return out if isinstance(out, Mixture) else out.astype(x.dtype)

    def _mixed(
        self, x: Float[Array, "T E"], meta: StepMetadata, before: Float[Array, "T E"]
    ) -> Mixture | Float[Array, "T E"]:
        """This device's part of the output, in float32; `x` is the norm of what is `before` it."""
        with jax.named_scope("router"):
            logits, bias = self.router(before if self.config.beside_dense else x)
        here = self.experts.here
        first = device_rank() * here if here < self.config.num_experts else 0
        with jax.named_scope("experts"):
            rows = x if self.latent_down is None else self.latent_down(x)
            if self.experts.serve_all_batches:
                rows, logits, sequences = _of_all_batches(rows, logits, meta.seq_ids)
                meta = replace(meta, seq_ids=sequences)  # they say which rows are padding
            out: Any = None
            if not (self.config.expert_scale or self.config.scale_inputs):
                out = self.experts.mixture(rows, logits, bias, self.config, first, meta)
            if out is None:
                weights, experts = route(logits, self.config, bias)
                out = self._routed(rows, self.router.scaled(weights, experts), experts, first, meta.live)
            if self.experts.serve_all_batches:
                out = share_out_over_data(late_sum(out))
            if self.latent_up is not None:
                out = self.latent_up.partial(late_sum(out).astype(x.dtype))
        with jax.named_scope("shared_experts"):
            shared = self._shared(x)
        if isinstance(out, Mixture):
            return replace(out, shared=shared)
        return out if shared is None else out + shared

    def _shared(self, x: Float[Array, "T E"]) -> Float[Array, "T E"] | None:
        if self.shared is None:
            return None
        shared = self.shared.partial(x)
        return shared if self.shared_gate is None else shared * jax.nn.sigmoid(self.shared_gate.partial(x))

    def _routed(
        self, x: Float[Array, "T E"], weights: jax.Array, experts: jax.Array, first: jax.Array | int, live: jax.Array
    ) -> Float[Array, "T E"]:
        """This device's part of the experts' weighted sum, in float32.

        Worked example, 3 tokens, top 2, this device holds experts 0 and 1 of four:

            experts  [[1, 3], [0, 1], [2, 3]]      (token, expert) pairs, flat: 1 3 0 1 2 3
            group    [1, 2, 0, 1, 2, 2]            2: not here
            order    [2, 0, 3, 1, 4, 5]            rows of tokens 1, 0, 1, then those that no group holds
            sizes    [1, 2]
        """
        num_tokens, top_k = experts.shape
        here = self.experts.here
        group = experts.reshape(-1) - first
        elsewhere = (group < 0) | (group >= here) | ~jnp.repeat(live, top_k)
        group = jnp.where(elsewhere, here, group)
        order, place, sizes = sort_by_group(group, here)
        rows = x.at[order // top_k].get(mode="promise_in_bounds")
        if self.config.scale_inputs:
            rows = (rows * weights.reshape(-1)[order][:, None]).astype(x.dtype)
        out = self.experts(rows, sizes)
        out = out.at[place].get(mode="promise_in_bounds").reshape(num_tokens, top_k, -1)
        return (out if self.config.scale_inputs else out * weights[:, :, None]).sum(axis=1)


def _of_all_batches(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The rows of every batch, one batch after the other."""
    found: tuple[jax.Array, ...] = gather_over_data(arrays)
    return tuple(a.reshape(-1, *a.shape[2:]) for a in found)


class Router(nnx.Module):
    """Logits of all experts, in float32 on every device, and the correction bias of the choice if there is one."""

    def __init__(self, size: int, config: MoEConfig, options: BuildOptions, norm_eps: float | None = None):
        self.norm = None if norm_eps is None else RMSNorm(size, norm_eps, options.kernels)
        self.weight = weight((config.num_experts, size), jnp.float32)
        self.bias = param((config.num_experts,), jnp.float32) if config.router_bias else None
        self.correction_bias = param((config.num_experts,), jnp.float32) if config.correction_bias else None
        self.expert_scale = param((config.num_experts,), jnp.float32) if config.expert_scale else None
        self.kernels = options.kernels

    def __call__(self, x: Float[Array, "T E"]) -> tuple[Float[Array, "T X"], Float[Array, "X"] | None]:
        x = x if self.norm is None else self.norm(x.astype(jnp.float32))
        logits = self.kernels.linear(x, self.weight.get_value())
        correction = None if self.correction_bias is None else self.correction_bias[...]
        return logits if self.bias is None else logits + self.bias[...], correction

    def scaled(self, weights: Float[Array, "T k"], experts: Int[Array, "T k"]) -> Float[Array, "T k"]:
        """The experts' weights, with the factor of each."""
        return weights if self.expert_scale is None else weights * self.expert_scale[...][experts]


class DenseBesideMoE(nnx.Module):
    """A dense MLP and experts side by side (Gemma 4): `norm(dense(norm(x))) + norm(experts(norm(x)))`."""

    def __init__(
        self, size: int, hidden: int, config: MoEConfig, activation: str, norm_eps: float, options: BuildOptions
    ):
        self.dense = GatedMLP(size, hidden, activation, options)
        self.dense_post_norm = RMSNorm(size, norm_eps, options.kernels)
        self.moe_norm = RMSNorm(size, norm_eps, options.kernels)
        self.moe = MoE(size, config, activation, options, norm_eps)
        self.moe_post_norm = RMSNorm(size, norm_eps, options.kernels)

    def __call__(
        self,
        x: Float[Array, "T E"],
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Residual = None,
    ) -> Float[Array, "T E"]:
        """Both blocks of `x`, added to `residual` if there is one; `norm` is the dense one's."""
        dense = self.dense_post_norm(self.dense(x, meta, norm=norm))
        out = dense + self.moe_post_norm(self.moe(x, meta, norm=self.moe_norm.traced))
        return out if residual is None or isinstance(residual, Later) else residual + out


class Experts(nnx.Module):
    """The MLPs of all experts, gated or not, on rows sorted by expert."""

    def __init__(self, size: int, config: MoEConfig, activation: str, options: BuildOptions):
        pieces = 1 if options.expert_parallel else options.tp
        segment = Segment(config.hidden, pieces)
        layout = Layout((segment, segment) if config.gated else (segment,), pieces, axis=1)
        whole = options.expert_parallel
        sharing = options.tp * options.dp if whole else 1
        first = ExpertLinear(
            (config.num_experts, layout.rows, size),
            (EVERY, None, None) if whole else (None, TENSOR, None),
            options,
            layout,
            bias=config.expert_bias,
        )
        self.gate_up = first if config.gated else None
        self.up = None if config.gated else first
        self.down = ExpertLinear(
            (config.num_experts, size, config.hidden),
            (EVERY, None, None) if whole else (None, None, TENSOR),
            options,
            bias=config.expert_bias,
        )
        self.activation = activation
        self.swiglu = config.swiglu
        self.here = config.num_experts // sharing
        """How many of the experts a device has, or has a part of."""
        self.serve_all_batches = whole and options.dp > 1
        """Whether tokens of other batches use the experts that are here."""
        self.kernels = options.kernels

    def mixture(
        self, x: Float[Array, "T E"], logits: Float[Array, "T X"], bias: Float[Array, "X"] | None, routing: MoEConfig,
        first: jax.Array | int, meta: StepMetadata,
    ) -> Mixture | None:  # fmt: skip
        """What tokens get of the experts from `first` on that are here, where there are kernels for all of it."""
        biases = self._first.own_bias, self.down.own_bias
        return self.kernels.experts(
            x,
            logits,
            bias,
            self._first.weight.get_value(),
            self.down.weight.get_value(),
            routing=routing,
            first=first,
            here=self.here,
            activation=ACTIVATIONS[self.activation],
            gate=self.swiglu if self.up is None else ACTIVATIONS[self.activation],
            biases=biases if routing.expert_bias else None,
            meta=meta,
        )

    def __call__(self, rows: Float[Array, "N E"], group_sizes: Int[Array, "X"]) -> Float[Array, "N E"]:
        hidden = self._first(rows, group_sizes)
        if self.up is not None:
            hidden = ACTIVATIONS[self.activation](hidden)
        else:
            hidden = gated(hidden, self.activation) if self.swiglu is None else self.swiglu(hidden)
        return self.down(hidden, group_sizes)

    @property
    def _first(self) -> ExpertLinear:
        first = self.gate_up if self.up is None else self.up
        assert first is not None
        return first


class ExpertLinear(nnx.Module):
    """One `[o, i]` weight for each expert, and a bias or none.

    Where devices share the inputs, whose products are summed later, the first alone adds the bias.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        axes: Axes,
        options: BuildOptions,
        layout: Layout | None = None,
        *,
        bias: bool = False,
    ):
        self.weight = weight(shape, options.dtype, axes, layout)
        self.bias = param(shape[:2], jnp.float32, axes[:2], layout) if bias else None
        self.shares_inputs = axes[2] is not None
        self.kernels = options.kernels

    @property
    def own_bias(self) -> Float[Array, "X o"] | None:
        """What this device adds."""
        if self.bias is None or not self.shares_inputs or tensor_size() == 1:
            return None if self.bias is None else self.bias[...]
        return jnp.where(tensor_rank() == 0, self.bias[...], 0)

    def __call__(self, rows: Float[Array, "N i"], group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
        out, bias = self.kernels.grouped_matmul(rows, self.weight.get_value(), group_sizes), self.own_bias
        if bias is None:
            return out
        group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(rows)), side="right")
        return out + bias.at[group].get(mode="fill", fill_value=0)  # rows past all groups stay zero
