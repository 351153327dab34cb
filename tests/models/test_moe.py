"""Routers against the definitions of their papers, and the whole layer against a dense float64 mixture.

Run as a module it computes the sharded cases, in a process of its own (the number of devices is fixed at start-up):
JAX_NUM_CPU_DEVICES=8 NPROC=16 python -m tests.models.test_moe OUT.npz
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.errors import CheckpointError
from jaxllm.models.layers.experts import MoEConfig, route
from jaxllm.models.layers.mlp import ClampedSwiglu
from jaxllm.models.layers.moe import MoE
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import REFERENCE, Kernels, StepMetadata
from jaxllm.pallas_kernels.gpu import experts as gpu_experts
from jaxllm.sharding.mesh import build_meshes
from tests.support.devices import over_devices
from tests.support.gpu_here import INTERPRET

SIZE, EXPERTS, HIDDEN, TOKENS = 16, 16, 24, 13

Params = dict[str, Any]
"""Parameter path -> tensor, or one tensor for each segment of a fused parameter."""


def config(**fields: Any) -> MoEConfig:
    return MoEConfig(**{"num_experts": EXPERTS, "hidden": HIDDEN, "top_k": 3, **fields})


V3: dict[str, Any] = {
    "scoring": "sigmoid",
    "correction_bias": True,
    "group_score": "top2_sum",
    "num_groups": 4,
    "top_groups": 2,
    "renormalize": True,
    "renormalize_eps": 1e-20,
    "scale": 2.5,
}

# Routers, each from its own definition; `s` are one token's logits.


def softmax(s: np.ndarray) -> np.ndarray:
    p = np.exp(s - s.max())
    return p / p.sum()


def sigmoid(s: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-s))


def best(values: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-values)[:count]


def mixtral(s: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The softmax of the two greatest logits alone, as the paper writes it (arXiv:2401.04088)."""
    experts = best(s, 2)
    return softmax(s[experts]), experts


def greedy(s: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    experts = best(softmax(s), 3)
    return softmax(s)[experts], experts


def greedy_normalized(s: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights, experts = greedy(s, bias)
    return weights / weights.sum(), experts


def gpt_oss(s: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over the chosen."""
    chosen = best(s, 3)
    return softmax(s[chosen]), chosen


def deepseek_v2(s: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = softmax(s)
    groups = best(np.array([group.max() for group in np.split(p, 4)]), 2)
    candidates = np.concatenate([np.arange(4) + 4 * group for group in groups])
    experts = candidates[best(p[candidates], 3)]
    return 16.0 * p[experts], experts


def deepseek_v3(s: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = sigmoid(s)
    biased = p + bias
    groups = best(np.array([np.sort(group)[-2:].sum() for group in np.split(biased, 4)]), 2)
    candidates = np.concatenate([np.arange(4) + 4 * group for group in groups])
    experts = candidates[best(biased[candidates], 3)]
    return 2.5 * p[experts] / (p[experts].sum() + 1e-20), experts


Oracle = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
ROUTERS: dict[str, tuple[MoEConfig, Oracle]] = {
    "mixtral": (config(top_k=2, renormalize=True), mixtral),
    "qwen2-moe": (config(), greedy),
    "qwen3-moe": (config(renormalize=True), greedy_normalized),
    "deepseek-v2-lite": (config(), greedy),
    "deepseek-v2": (config(num_groups=4, top_groups=2, scale=16.0), deepseek_v2),
    "deepseek-v3": (config(**V3), deepseek_v3),
}


@pytest.mark.parametrize("bias_mean", [0.0, -3.0, 3.0], ids="bias {:+.0f}".format)
@pytest.mark.parametrize("router", ROUTERS)
def test_router(router, bias_mean):
    """With the bias at -3 every biased score is negative: an expert of another group must not win with a zero."""
    moe, oracle = ROUTERS[router]
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal((200, EXPERTS))).astype(np.float32)
    bias = (bias_mean + random.standard_normal(EXPERTS)).astype(np.float32)
    weights, experts = jax.jit(route, static_argnums=1)(logits, moe, bias if moe.correction_bias else None)
    assert weights.dtype == jnp.float32 and experts.dtype == jnp.int32
    expected = [oracle(row, bias) for row in logits.astype(np.float64)]
    np.testing.assert_array_equal(experts, [row[1] for row in expected])
    np.testing.assert_allclose(weights, [row[0] for row in expected], rtol=2e-6)


def test_scores_that_are_all_zero_give_zero_weights():
    weights, _ = route(jnp.full((2, EXPERTS), -200.0), config(**V3), jnp.zeros(EXPERTS))
    np.testing.assert_array_equal(weights, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 17}, "experts a token uses is 17; accepted are 1 … 16"),
        ({"top_k": 9, "num_groups": 4, "top_groups": 2}, "experts a token uses is 9; accepted are 1 … 8"),
        ({"num_groups": 3}, "groups is 3; accepted are divisors of 16"),
        ({"num_groups": 4, "top_groups": 5}, "groups a token may use is 5; accepted are 1 … 4"),
        ({"num_groups": 16, "top_groups": 4, "group_score": "top2_sum"}, "groups is 16, .* accepted are 1 … 8"),
    ],
)
def test_a_router_that_cannot_choose_is_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        config(**fields)


LAYERS: dict[str, MoEConfig] = {
    "mixtral": config(top_k=2, renormalize=True),
    "qwen2-moe": config(shared_hidden=40, shared_gate=True),
    "deepseek-v3": config(**V3, shared_hidden=48),
    "gpt-oss": config(
        top_k=3, renormalize=True, router_bias=True, expert_bias=True, swiglu=ClampedSwiglu(alpha=1.702, limit=0.7)
    ),
}
ORACLES: dict[str, Oracle] = {"mixtral": mixtral, "qwen2-moe": greedy, "deepseek-v3": deepseek_v3, "gpt-oss": gpt_oss}


def random_params(moe: MoEConfig, seed: int = 0) -> Params:
    random = np.random.default_rng(seed)

    def tensor(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    params: Params = {
        "router.weight": 3 * tensor(EXPERTS, SIZE),
        "experts.gate_up.weight": (tensor(EXPERTS, HIDDEN, SIZE), tensor(EXPERTS, HIDDEN, SIZE)),
        "experts.down.weight": tensor(EXPERTS, SIZE, HIDDEN),
    }
    if moe.router_bias:
        params["router.bias"] = random.standard_normal(EXPERTS).astype(np.float32)
    if moe.expert_bias:
        biases = [random.standard_normal((EXPERTS, size)).astype(np.float32) for size in (HIDDEN, HIDDEN, SIZE)]
        params |= {"experts.gate_up.bias": (biases[0], biases[1]), "experts.down.bias": biases[2]}
    if moe.correction_bias:
        params["router.correction_bias"] = random.standard_normal(EXPERTS).astype(np.float32)
    if moe.shared_hidden:
        params["shared.gate_up.weight"] = (tensor(moe.shared_hidden, SIZE), tensor(moe.shared_hidden, SIZE))
        params["shared.down.weight"] = tensor(SIZE, moe.shared_hidden)
    if moe.shared_gate:
        params["shared_gate.weight"] = tensor(1, SIZE)
    return params


def random_tokens(count: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((count, SIZE)).astype(np.float32)


def layer_oracle(name: str, params: Params, x: np.ndarray) -> np.ndarray:
    moe = LAYERS[name]
    x = x.astype(np.float64)
    p = jax.tree.map(lambda tensor: np.asarray(tensor, np.float64), params)
    bias = p.get("router.correction_bias", np.zeros(EXPERTS))

    def mlp(gate: np.ndarray, up: np.ndarray, down: np.ndarray, v: np.ndarray) -> np.ndarray:
        return down @ ((gate @ v) * sigmoid(gate @ v) * (up @ v))

    def expert(e: int, v: np.ndarray) -> np.ndarray:
        (gates, ups), downs = p["experts.gate_up.weight"], p["experts.down.weight"]
        if not moe.expert_bias:
            return mlp(gates[e], ups[e], downs[e], v)
        gate_bias, up_bias = p["experts.gate_up.bias"]
        assert moe.swiglu is not None
        limit = moe.swiglu.limit
        gate = np.minimum(gates[e] @ v + gate_bias[e], limit)
        up = np.clip(ups[e] @ v + up_bias[e], -limit, limit)
        return downs[e] @ (gate * sigmoid(moe.swiglu.alpha * gate) * (up + 1)) + p["experts.down.bias"][e]

    out = np.zeros_like(x)
    for t, v in enumerate(x):
        logits = p["router.weight"] @ v + p.get("router.bias", 0)
        for weight, e in zip(*ORACLES[name](logits, bias), strict=True):
            out[t] += weight * expert(e, v)
        if moe.shared_hidden:
            gate = sigmoid(p["shared_gate.weight"] @ v) if moe.shared_gate else 1.0
            out[t] += gate * mlp(*p["shared.gate_up.weight"], p["shared.down.weight"], v)
    return out


INTERPRETED = replace(
    REFERENCE,
    experts=partial(gpu_experts.experts, interpret=INTERPRET),
    chosen_experts=partial(gpu_experts.chosen_experts, interpret=INTERPRET),
)
"""With the experts of NVIDIA GPUs."""


@cache
def build(
    moe: MoEConfig, tp: int, expert_parallel: bool, dtype: Any, kernels: Kernels
) -> tuple[Callable[..., jax.Array], dict[str, nnx.Variable]]:
    """The compiled layer over `tp` devices, as a function of its parameters and inputs, and its abstract parameters."""
    options = BuildOptions(dtype, tp, kernels, expert_parallel)
    layer = MoE(SIZE, moe, "silu", options)
    graph, state = nnx.split(layer)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    variables = {".".join(str(key.key) for key in path): variable for path, variable in leaves}

    def forward(values: list[Any], x: jax.Array, meta: StepMetadata) -> jax.Array:
        filled = [variable.replace(value) for variable, value in zip(variables.values(), values, strict=True)]
        return nnx.merge(graph, jax.tree.unflatten(tree, filled))(x, meta)

    specs = [P(*variable.get_metadata()["axes"]) for variable in variables.values()]

    def sharded_layer(values: list[Any], x: jax.Array, meta: StepMetadata) -> jax.Array:
        mapped = jax.shard_map(
            forward, mesh=build_meshes(tp)[0], in_specs=(specs, P(), P()), out_specs=P(), check_vma=False
        )
        return mapped(values, x, meta)

    return jax.jit(sharded_layer), variables


def run(
    moe: MoEConfig,
    params: Params,
    x: Any,
    live: np.ndarray | None = None,
    *,
    tp: int = 1,
    expert_parallel: bool = False,
    dtype: Any = jnp.float32,
    kernels: Kernels = REFERENCE,
) -> np.ndarray:
    """The layer's output over `tp` devices, its parameters laid out as they say themselves."""
    layer, variables = build(moe, tp, expert_parallel, dtype, kernels)
    assert set(variables) == set(params)
    values = []
    for name, variable in variables.items():
        tensors, layout = params[name], variable.get_metadata()["layout"]
        whole = layout.assemble(tensors) if isinstance(tensors, tuple) else tensors
        abstract = variable.get_value()
        assert whole.shape == abstract.shape
        values.append(jax.tree.map(lambda leaf, whole=whole: jnp.asarray(whole, leaf.dtype), abstract))
    return np.asarray(layer(values, x, metadata(np.ones(len(x), bool) if live is None else live)))


def metadata(live: np.ndarray) -> StepMetadata:
    """A step of one sequence; rows that are not live are padding."""
    count = len(live)
    positions = jnp.arange(count)
    return StepMetadata(
        positions=positions,
        seq_ids=jnp.where(live, 0, 1),
        context_len=jnp.array([count]),
        query_start=jnp.array([0, count]),
        page_table=jnp.zeros((1, 1), jnp.int32),
        num_decodes=jnp.array(0),
        num_seqs=jnp.array(1),
        rotary_lengths=positions + 1,
        decode_only=False,
    )


@pytest.mark.parametrize("kernels", [REFERENCE, INTERPRETED], ids=["reference", "gpu"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_the_dense_mixture(name, kernels):
    params, x = random_params(LAYERS[name]), random_tokens()
    out = run(LAYERS[name], params, x, kernels=kernels)
    np.testing.assert_allclose(out, layer_oracle(name, params, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3])
def test_weights_on_the_inputs_are_there_with_the_experts_of_gpus(top_k):
    """As Llama 4 has them: each pair of a token and an expert has inputs of its own."""
    moe = config(top_k=top_k, scoring="sigmoid", scale_inputs=True, shared_hidden=8)
    params, x, live = random_params(moe), random_tokens(), np.arange(TOKENS) < 9
    found, expected = (run(moe, params, x, live, kernels=kernels) for kernels in (INTERPRETED, REFERENCE))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_in_bfloat16(name):
    def rounded(tensor: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(tensor, jnp.bfloat16), np.float32)

    params = random_params(LAYERS[name])
    params |= {k: jax.tree.map(rounded, v) for k, v in params.items() if not k.startswith("router")}
    x = rounded(random_tokens())
    out = run(LAYERS[name], params, jnp.asarray(x, jnp.bfloat16), dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float64), layer_oracle(name, params, x), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_number_of_tokens(count):
    params, x = random_params(LAYERS["deepseek-v3"]), random_tokens(count)
    out = run(LAYERS["deepseek-v3"], params, x)
    np.testing.assert_allclose(out, layer_oracle("deepseek-v3", params, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [REFERENCE, INTERPRETED], ids=["reference", "gpu"])
def test_a_row_that_is_not_finite_leaves_the_others_alone(kernels):
    moe = LAYERS["qwen2-moe"]
    params, x = random_params(moe), random_tokens()
    broken = x.copy()
    broken[4] = np.nan
    out, clean = run(moe, params, broken, kernels=kernels), run(moe, params, x, kernels=kernels)
    assert np.isnan(out[4]).all()
    np.testing.assert_array_equal(np.delete(out, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("kernels", [REFERENCE, INTERPRETED], ids=["reference", "gpu"])
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss"])
def test_rows_that_are_not_live_get_the_shared_experts_only(name, kernels):
    moe = LAYERS[name]
    params, x = random_params(moe), random_tokens()
    live = np.arange(TOKENS) < 9
    down = {key: np.zeros_like(value) for key, value in params.items() if key.startswith("experts.down")}
    expected = layer_oracle(name, params, x)
    expected[~live] = layer_oracle(name, params | down, x)[~live]
    np.testing.assert_allclose(run(moe, params, x, live, kernels=kernels), expected, rtol=1e-5, atol=1e-5)


# (layer, degree, expert parallel, all tokens want the experts of one device)
SHARDED = [
    *(("deepseek-v3", tp, expert_parallel, False) for tp in (2, 4, 8) for expert_parallel in (False, True)),
    ("qwen2-moe", 2, False, False),
    ("qwen2-moe", 4, True, False),
    ("mixtral", 1, True, False),
    ("mixtral", 8, True, False),
    ("gpt-oss", 4, False, False),
    ("gpt-oss", 4, True, False),
    ("deepseek-v3", 4, True, True),
]


ON_GPUS = [
    ("deepseek-v3", 2, False, False),
    ("qwen2-moe", 4, True, False),
    ("deepseek-v3", 4, True, True),
    ("gpt-oss", 4, False, False),
    ("gpt-oss", 4, True, False),
]
"""Those that run with the experts of GPUs as well."""


def sharded_params(name: str, crowded: bool) -> Params:
    params = random_params(LAYERS[name])
    if crowded:
        params["router.correction_bias"] = np.where(np.arange(EXPERTS) < 3, 10.0, 0.0).astype(np.float32)
    return params


def sharded_id(case: tuple[str, int, bool, bool]) -> str:
    name, tp, expert_parallel, crowded = case
    return f"{name} {'expert' if expert_parallel else 'tensor'} parallel {tp}" + (", crowded" if crowded else "")


def main(out: str) -> None:
    """Write the output of every sharded case."""
    outputs = {"devices": np.array(jax.device_count())}
    for case in SHARDED:
        name, tp, expert_parallel, crowded = case
        params = sharded_params(name, crowded)
        options: Any = {"tp": tp, "expert_parallel": expert_parallel}
        outputs[sharded_id(case)] = run(LAYERS[name], params, random_tokens(), **options)
        if case in ON_GPUS:
            own = run(LAYERS[name], params, random_tokens(), kernels=INTERPRETED, **options)
            outputs[sharded_id(case) + ", gpu"] = own
    np.savez(out, **outputs)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict[str, np.ndarray]:
    return over_devices(8, "tests.models.test_moe", tmp_path_factory.mktemp("moe") / "outputs.npz")


@pytest.mark.parametrize("case", SHARDED, ids=sharded_id)
def test_sharded_layer_is_the_dense_mixture(sharded, case):
    name, _, _, crowded = case
    expected = layer_oracle(name, sharded_params(name, crowded), random_tokens())
    for kernels in ("", ", gpu") if case in ON_GPUS else ("",):
        np.testing.assert_allclose(sharded[sharded_id(case) + kernels], expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main(sys.argv[1])
