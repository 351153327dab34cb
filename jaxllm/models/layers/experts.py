"""The choice of experts (arXiv:1701.06538), and the experts: stacks of matrices, for rows sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.errors import CheckpointError
from jaxllm.models.layers.hands import told
from jaxllm.models.layers.host_experts import ExpertPlaces, places_for, run_in_turns
from jaxllm.models.layers.linear import param, weight
from jaxllm.models.layers.mlp import ACTIVATIONS, ClampedSwiglu, gated
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Mixture, StepMetadata
from jaxllm.pallas_kernels.products import sort_by_group
from jaxllm.quantization.weight import HostShare, PartlyOnHost, Weight
from jaxllm.sharding.mesh import EVERY, TENSOR, Axes, Layout, Segment, tensor_rank, tensor_size

SCORING: dict[str, Callable[[jax.Array], jax.Array]] = {  # functions from a token's logits to the scores of experts
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The rule by which tokens choose their experts, and the sizes of these.

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

    Raises CheckpointError for groups or top_k that the experts do not allow.
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
    """The weight (float32) and number of each expert that each token uses, best first; `bias` corrects the choice."""
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


class ExpertStack(NamedTuple):
    """The matrices `[X, o, i]` of some experts, and the biases `[X, o]` that they have."""

    first: Weight
    down: Weight
    first_bias: Float[Array, "X o"] | None
    down_bias: Float[Array, "X o"] | None

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]


class Experts(nnx.Module):
    """The MLPs of all experts, gated or not, on rows sorted by expert; the last `host_experts` are in host memory."""

    def __init__(self, size: int, config: MoEConfig, activation: str, options: BuildOptions):
        pieces = 1 if options.expert_parallel else options.tp
        segment = Segment(config.hidden, pieces)
        layout = Layout((segment, segment) if config.gated else (segment,), pieces, axis=1)
        whole, count = options.expert_parallel, config.num_experts
        sharing = options.tp * options.dp if whole else 1
        self.num_on_host = options.host_experts
        host = HostShare(self.num_on_host, sharing) if self.num_on_host else None
        axes: Axes = (EVERY, None, None) if whole else (None, TENSOR, None)
        first = ExpertLinear((count, layout.rows, size), axes, options, layout, bias=config.expert_bias, host=host)
        self.gate_up = first if config.gated else None
        self.up = None if config.gated else first
        axes = (EVERY, None, None) if whole else (None, None, TENSOR)
        self.down = ExpertLinear((count, size, config.hidden), axes, options, bias=config.expert_bias, host=host)
        self.activation = activation
        self.swiglu = config.swiglu
        self.here = config.num_experts // sharing  # the number of experts that a device has, or has a part of
        self.serve_all_batches = whole and options.dp > 1  # tokens of other batches use the experts that are here, too
        self.kernels = options.kernels

    def mixture(
        self, x: Float[Array, "T E"], logits: Float[Array, "T X"], bias: Float[Array, "X"] | None, routing: MoEConfig,
        first: jax.Array | int, meta: StepMetadata,
    ) -> Mixture | None:  # fmt: skip
        """The output of the experts from `first` on that are here, where there are kernels for all of it."""
        if self.num_on_host:
            return None
        stack = self._on_device()
        return self.kernels.experts(
            x, logits, bias, stack.first, stack.down, routing=routing, first=first, here=self.here,
            activation=ACTIVATIONS[self.activation], gate=self._gate,
            biases=(stack.first_bias, stack.down_bias) if routing.expert_bias else None, meta=meta,
        )  # fmt: skip

    def routed(
        self, x: Float[Array, "T E"], weights: Float[Array, "T k"], experts: Int[Array, "T k"],
        first: jax.Array | int, live: Bool[Array, "T"], *, scale_inputs: bool,
    ) -> Float[Array, "T E"]:  # fmt: skip
        """The weighted sum of what tokens get of the experts from `first` on that are here, in float32.

        Worked example, 3 tokens, top 2, this device holds experts 0 and 1 of four:

            experts  [[1, 3], [0, 1], [2, 3]]      (token, expert) pairs, flat: 1 3 0 1 2 3
            group    [1, 2, 0, 1, 2, 2]            2: not here
            order    [2, 0, 3, 1, 4, 5]            rows of tokens 1, 0, 1, then those that no group holds
            sizes    [1, 2]
        """
        num_tokens, top_k = experts.shape
        group = experts.reshape(-1) - first
        elsewhere = (group < 0) | (group >= self.here) | ~jnp.repeat(live, top_k)

        def pairs(group: Int[Array, "P"], stack: ExpertStack) -> Float[Array, "P E"]:
            given = x
            if scale_inputs:
                given = (jnp.repeat(x, top_k, axis=0) * weights.reshape(-1)[:, None]).astype(x.dtype)
            found = self.kernels.chosen_experts(
                given, group, stack.first, stack.down, activation=ACTIVATIONS[self.activation], gate=self._gate,
                biases=None if stack.first_bias is None else (stack.first_bias, stack.down_bias),
            )  # fmt: skip
            if found is not None:
                return found
            order, place, sizes = sort_by_group(group, stack.num_experts)
            rows = given.at[order if scale_inputs else order // top_k].get(mode="promise_in_bounds")
            return self.products(rows, sizes, stack).at[place].get(mode="promise_in_bounds")

        group = jnp.where(elsewhere, self.here, group)
        out = self._pairs_of_all(group, pairs) if self.num_on_host else pairs(group, self._on_device())
        out = out.reshape(num_tokens, top_k, -1)
        return (out if scale_inputs else out * weights[:, :, None]).sum(axis=1)

    def _on_device(self) -> ExpertStack:
        weights = self._first.weight.get_value(), self.down.weight.get_value()
        return ExpertStack(*weights, self._first.own_bias, self.down.own_bias)

    def _pairs_of_all(
        self, group: Int[Array, "P"], pairs: Callable[[Int[Array, "P"], ExpertStack], Float[Array, "P E"]]
    ) -> Float[Array, "P E"]:
        """The output of `pairs` of tokens and experts, each computed once, where some experts are in host memory."""
        first, down = self._first.weight.get_value(), self.down.weight.get_value()
        assert isinstance(first, PartlyOnHost) and isinstance(down, PartlyOnHost), "so they were declared"
        biases, resident, layer = (self._first.own_bias, self.down.own_bias), first.num_resident, told()
        out = jnp.zeros((len(group), down.shape[1]), jnp.float32)
        if first.resident is not None and down.resident is not None:
            theirs = (None if bias is None else bias[:resident] for bias in biases)
            out = pairs(jnp.minimum(group, resident), ExpertStack(first.resident, down.resident, *theirs))
        on_host = jnp.where((group >= resident) & (group < self.here), group - resident, self.num_on_host)
        waiting = jnp.zeros(self.num_on_host, bool).at[on_host].set(True, mode="drop")

        def run(places: ExpertPlaces, place_of: Int[Array, "N"]) -> Float[Array, "P E"]:
            number = resident + jnp.maximum(places.expert - 1, 0)
            theirs = (None if bias is None else bias[number] for bias in biases)
            num_places = len(places.expert)
            place = place_of.at[on_host].get(mode="fill", fill_value=num_places)
            return pairs(place, ExpertStack(first.stack_of(places.first), down.stack_of(places.down), *theirs))

        assert layer.places is not None, "a layer with experts in host memory is given places"
        out, layer.places = run_in_turns(first, down, layer.places, waiting, run, out)
        return out

    def places(self, count: int, tp: int) -> ExpertPlaces | None:
        """Buffers of `count` places on each device for experts in host memory; None where all are on the devices."""
        weights = self._first.weight.get_value(), self.down.weight.get_value()
        if not all(isinstance(weight, PartlyOnHost) for weight in weights):
            return None
        return places_for(*weights, (self._first.axes, self.down.axes), count, tp)

    def products(
        self, rows: Float[Array, "N E"], group_sizes: Int[Array, "X"], stack: ExpertStack
    ) -> Float[Array, "N E"]:
        """The output for each row of the expert whose group it is in, in float32; zeros for rows after all groups."""
        hidden = self._product(rows, group_sizes, stack.first, stack.first_bias)
        if self.up is not None:
            hidden = ACTIVATIONS[self.activation](hidden)
        else:
            hidden = gated(hidden, self.activation) if self.swiglu is None else self.swiglu(hidden)
        return self._product(hidden, group_sizes, stack.down, stack.down_bias)

    def _product(
        self, rows: Float[Array, "N i"], group_sizes: Int[Array, "X"], weight: Weight, bias: jax.Array | None
    ) -> Float[Array, "N o"]:
        out = self.kernels.grouped_matmul(rows, weight, group_sizes)
        if bias is None:
            return out
        group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(rows)), side="right")
        return out + bias.at[group].get(mode="fill", fill_value=0)  # rows past all groups stay zero

    @property
    def _gate(self) -> Callable[[jax.Array], jax.Array] | None:
        """The function of the first product's output, where that is not `activation(gate) * up`."""
        return self.swiglu if self.up is None else ACTIVATIONS[self.activation]

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
        self, shape: tuple[int, int, int], axes: Axes, options: BuildOptions, layout: Layout | None = None, *,
        bias: bool = False, host: HostShare | None = None,
    ):  # fmt: skip
        self.weight = weight(shape, options.dtype, axes, layout, host)
        self.axes = axes
        self.bias = param(shape[:2], jnp.float32, axes[:2], layout) if bias else None
        self.shares_inputs = axes[2] is not None

    @property
    def own_bias(self) -> Float[Array, "X o"] | None:
        if self.bias is None or not self.shares_inputs or tensor_size() == 1:
            return None if self.bias is None else self.bias[...]
        return jnp.where(tensor_rank() == 0, self.bias[...], 0)
