"""Experts on NVIDIA GPUs, interpreted or on one: routing and lists against float64 NumPy, and the whole layer too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels import Mixture, RootMeanSquare, StepMetadata
from jaxllm.pallas_kernels.gpu.experts import add_norm, experts
from jaxllm.pallas_kernels.gpu.route import RowLists, groups_of_rows, list_rows, route
from jaxllm.quantization.weight import fuse
from tests.pallas_kernels.gpu.test_matmul import KINDS
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware


@dataclass(frozen=True)
class Router:
    """What `MoEConfig` says of routing, and the definition of it."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    renormalize: bool = False
    renormalize_eps: float = 0.0
    scale: float = 1.0

    def weights(self, logits: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """One token's weights and experts, best first; of equal ones the first."""
        if self.scoring == "softmax":
            scores = np.exp(logits - logits.max())
            scores /= scores.sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
        choice = scores if bias is None else scores + bias
        groups = choice.reshape(self.num_groups, -1)
        ranked = np.sort(groups, axis=1)[:, ::-1]
        best = ranked[:, 0] + (ranked[:, 1] if self.group_score == "top2_sum" else 0)
        kept = np.argsort(-best, kind="stable")[: self.top_groups]
        masked = np.full_like(groups, -np.inf)
        masked[kept] = groups[kept]
        experts = np.argsort(-masked.reshape(-1), kind="stable")[: self.top_k]
        weights = scores[experts]
        if self.renormalize:
            weights = weights / (weights.sum() + self.renormalize_eps)
        return weights * self.scale, experts


QWEN = Router(128, 8, renormalize=True)
V3 = Router(64, 6, "sigmoid", 8, 4, "top2_sum", True, 1e-20, 2.5)
ROUTERS = {
    "Qwen3-30B-A3B": QWEN,
    "Mixtral": Router(8, 2, renormalize=True),
    "groups by max, of 20 experts": Router(160, 6, num_groups=8, top_groups=3, scale=16.0),
    "DeepSeek-V3": V3,
    "every expert": Router(5, 5, "sigmoid"),
    "one expert": Router(1, 1),
}


@dataclass(frozen=True)
class Case:
    router: Router
    logits: np.ndarray
    bias: np.ndarray | None
    live: np.ndarray
    first: int = 0
    here: int = field(default=0)


def case(router: Router, tokens: int, *, biased: bool = False, first: int = 0, here: int | None = None) -> Case:
    random = np.random.default_rng(tokens)
    return Case(
        router,
        (3 * random.standard_normal((tokens, router.num_experts))).astype(np.float32),
        random.standard_normal(router.num_experts).astype(np.float32) if biased else None,
        random.random(tokens) < 0.8,
        first,
        router.num_experts if here is None else here,
    )


def step_of(live: np.ndarray) -> StepMetadata:
    """A step of one sequence of four; tokens that are not live are padding."""
    zeros, four = jnp.zeros(len(live), jnp.int32), jnp.zeros(4, jnp.int32)
    seq_ids = jnp.where(live, 0, 4).astype(jnp.int32)
    one = jnp.int32(1)
    return StepMetadata(
        zeros, seq_ids, four, jnp.zeros(5, jnp.int32), four[:, None], one, one, zeros, decode_only=False
    )


def expected_of(case: Case) -> tuple[np.ndarray, list[list[int]]]:
    """Weights in float64, and the pairs of each expert that is here."""
    weights, lists = np.zeros((len(case.live), case.router.top_k)), [[] for _ in range(case.here)]
    for token in np.flatnonzero(case.live):
        chosen = zip(*case.router.weights(case.logits[token].astype(np.float64), case.bias), strict=True)
        for place, (weight, expert) in enumerate(chosen):
            if case.first <= expert < case.first + case.here:
                weights[token, place] = weight
                lists[expert - case.first].append(token * case.router.top_k + place)
    return weights, lists


def groups_of(found: RowLists, num_groups: int, tile_rows: int) -> list[list[int]]:
    """The rows of each group's tiles, one tile after the other."""
    lists: list[list[int]] = [[] for _ in range(num_groups)]
    for group, first, count in np.asarray(found.tiles):
        assert count <= tile_rows
        if count:
            lists[group] += np.asarray(found.rows)[first : first + count].tolist()
    return lists


def check_routing(case: Case) -> None:
    found = route(
        jnp.asarray(case.logits), None if case.bias is None else jnp.asarray(case.bias), case.first, case.here,
        case.router, 16, step_of(case.live), interpret=INTERPRET,
    )  # fmt: skip
    weights, lists = expected_of(case)
    np.testing.assert_allclose(found.weights, weights, rtol=2e-5, atol=1e-30)
    assert groups_of(found.pairs, case.here, 16) == lists


@pytest.mark.parametrize("tokens", [1, 16, 77])
@pytest.mark.parametrize("router", ROUTERS)
def test_routing(router, tokens):
    """In one program and, of 77 tokens, in several."""
    check_routing(case(ROUTERS[router], tokens))


def test_many_tokens_are_routed_by_many_programs():
    check_routing(case(QWEN, 300))


@pytest.mark.parametrize("bias_mean", [-3, 3])
def test_a_correction_bias_counts_for_the_choice_only(bias_mean):
    """Where all are negative, an expert of another group must not win with a zero."""
    biased = case(V3, 40, biased=True)
    check_routing(Case(V3, biased.logits, biased.bias + bias_mean, biased.live, here=64))


@pytest.mark.parametrize("first", [0, 64, 96])
def test_experts_that_are_elsewhere_get_nobody(first):
    check_routing(case(QWEN, 21, first=first, here=32))
    check_routing(case(QWEN, 300, first=first, here=32))


@pytest.mark.parametrize("tokens", [3, 300])
def test_padding_chooses_nobody(tokens):
    everyone = case(QWEN, tokens)
    check_routing(Case(QWEN, everyone.logits, None, np.zeros(tokens, bool), here=128))


@pytest.mark.parametrize("tokens", [30, 300])
def test_one_expert_gets_all(tokens):
    """More than a tile of them; and others get none."""
    router = Router(128, 1)
    logits = np.zeros((tokens, 128), np.float32)
    logits[:, 77] = 1
    check_routing(Case(router, logits, None, np.ones(tokens, bool), here=128))


def test_of_equal_experts_the_first_are_chosen():
    check_routing(Case(V3, np.zeros((9, 64), np.float32), None, np.ones(9, bool), here=64))


def test_scores_that_are_all_zero_give_zero_weights():
    check_routing(Case(V3, np.full((2, 64), -200, np.float32), None, np.ones(2, bool), here=64))


def test_a_token_that_is_not_finite_has_no_finite_weight():
    """And chooses as many experts as others, so that nothing is left as it was in memory."""
    broken = case(QWEN, 9)
    logits = broken.logits.copy()
    logits[4, 3] = np.nan
    options = None, 0, 128, QWEN, 16, step_of(np.ones(9, bool))
    found, clean = (route(jnp.asarray(x), *options, interpret=INTERPRET) for x in (logits, broken.logits))
    assert np.isnan(found.weights[4]).all()
    np.testing.assert_array_equal(np.delete(found.weights, 4, axis=0), np.delete(clean.weights, 4, axis=0))
    pairs = sorted(pair for rows in groups_of(found.pairs, 128, 16) for pair in rows)
    assert pairs == list(range(9 * 8))


@pytest.mark.parametrize("rows", [1, 64, 1025])
@pytest.mark.parametrize("groups", [1, 5, 128])
def test_rows_are_listed_by_group(rows, groups):
    group = np.random.default_rng(rows).integers(0, groups + 1, rows)
    found = list_rows(jnp.asarray(group, jnp.int32), groups, rows, 16, interpret=INTERPRET)
    assert groups_of(found, groups, 16) == [np.flatnonzero(group == index).tolist() for index in range(groups)]


@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 16), (40, 16), (300, 32)])
def test_the_group_of_each_row_is_found_again(rows, tile_rows):
    """Of those that have one: 5 is nobody's."""
    group = np.random.default_rng(rows).integers(6, size=rows)
    lists = list_rows(jnp.asarray(group, jnp.int32), 5, rows, tile_rows, interpret=INTERPRET)
    found = np.asarray(groups_of_rows(lists, rows, tile_rows))
    np.testing.assert_array_equal(found[group < 5], group[group < 5])


def test_lists_are_as_documented():
    found = list_rows(jnp.asarray([2, 0, 2, 3, 2]), 3, 4, 2, interpret=INTERPRET)
    rows, tiles = np.asarray(found.rows), np.asarray(found.tiles)
    np.testing.assert_array_equal(rows[[0, 8, 9, 10]], [1, 0, 2, 4])
    np.testing.assert_array_equal(tiles[tiles[:, 2] > 0], [[0, 0, 1], [2, 8, 2], [2, 10, 1]])


SIZE, HIDDEN, EXPERTS = 96, 136, 4


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def check_layer(
    gate_up: Any, down: Any, tokens: int, *, tolerance: float = 1e-4, dtype: Any = jnp.float32, shared: bool = False,
    activation: Any = (jax.nn.silu, silu),
) -> None:  # fmt: skip
    """`gate_up` and `down` have the weights in one part or, with gates before the rest, several."""
    router = Router(EXPERTS, 2, renormalize=True)
    routed = case(router, tokens)
    random = np.random.default_rng(9)
    x = jnp.asarray(random.standard_normal((tokens, SIZE)), dtype)
    extra = jnp.asarray(random.standard_normal((tokens, SIZE)), jnp.float32) if shared else None
    mixture = experts(
        x,
        jnp.asarray(routed.logits),
        None,
        fuse(list(gate_up)),
        fuse(list(down)),
        first=0,
        here=EXPERTS,
        routing=router,
        activation=activation[0],
        meta=step_of(routed.live),
        interpret=INTERPRET,
    )
    mixture = Mixture(mixture.weights, mixture.outputs, extra)
    gates, downs = (
        np.concatenate([np.asarray(part.dequantize(), np.float64) for part in parts], axis=1)
        for parts in (gate_up, down)
    )
    weights, lists = expected_of(routed)
    expected = np.zeros((tokens, SIZE)) if extra is None else np.asarray(extra, np.float64)
    for expert, pairs in enumerate(lists):
        for pair in pairs:
            gate, up = np.split(gates[expert] @ np.asarray(x, np.float64)[pair // 2], 2)
            expected[pair // 2] += weights.reshape(-1)[pair] * (downs[expert] @ (activation[1](gate) * up))
    np.testing.assert_allclose(mixture.summed(), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    check_sum(x, mixture)


def check_sum(x: jax.Array, mixture: Mixture) -> None:
    """Added to the residual and normed in one kernel."""
    random = np.random.default_rng(10)
    norm = RootMeanSquare(jnp.asarray(random.uniform(0.5, 2, x.shape[1]), jnp.float32), 1e-5)
    total, normed = add_norm(x, mixture, norm, interpret=INTERPRET)
    assert total.dtype == normed.dtype == x.dtype
    tolerance = 1e-5 if x.dtype == jnp.float32 else 1e-2
    exact = np.asarray(x, np.float64) + np.asarray(mixture.summed(), np.float64)
    np.testing.assert_allclose(np.asarray(total, np.float64), exact, rtol=tolerance, atol=tolerance)
    own = np.asarray(total, np.float64)
    own *= np.asarray(norm.weight, np.float64) / np.sqrt((own**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.asarray(normed, np.float64), own, rtol=tolerance, atol=tolerance)


def values(*shape: int) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)


@pytest.mark.parametrize("kind", ["dense", "int8", "4 bits", "4 bits, levels", "fp8 blocks"])
def test_experts_are_the_dense_mixture(kind):
    """The activation inside of the first product, at sizes that no block divides."""
    make, wide = KINDS[kind], HIDDEN - HIDDEN % 32 + 32
    check_layer([make(values(EXPERTS, 2 * wide, SIZE))], [make(values(EXPERTS, SIZE, wide))], 13, shared=True)


@pytest.mark.parametrize("tokens", [1, 200])
def test_number_of_tokens(tokens):
    dense = KINDS["dense"]
    check_layer([dense(values(EXPERTS, 2 * HIDDEN, SIZE))], [dense(values(EXPERTS, SIZE, HIDDEN))], tokens)


def test_gates_of_a_kind_of_their_own():
    """Weights of several kinds are several products, and the activation is the compiler's."""
    dense, int8 = KINDS["dense"], KINDS["int8"]
    gate_up = [dense(values(EXPERTS, 64, SIZE)), int8(values(EXPERTS, 64, SIZE))]
    check_layer(gate_up, [dense(values(EXPERTS, 40, 64)), int8(values(EXPERTS, 56, 64))], 7)


def test_an_activation_that_no_kernel_can_have():
    dense, exact = KINDS["dense"], (partial(jax.nn.gelu, approximate=False), gelu)
    check_layer([dense(values(EXPERTS, 80, SIZE))], [dense(values(EXPERTS, SIZE, 40))], 5, activation=exact)


def test_bfloat16():
    def rounded(*shape: int) -> Any:
        return KINDS["dense"](jnp.asarray(values(*shape), jnp.bfloat16))

    check_layer(
        [rounded(EXPERTS, 2 * HIDDEN, SIZE)], [rounded(EXPERTS, SIZE, HIDDEN)], 30, dtype=jnp.bfloat16, tolerance=1e-2
    )


def test_what_no_expert_wrote_does_not_count():
    weights = jnp.asarray([[0.5, 0.0], [0.0, 0.0]])
    outputs = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 40)), jnp.float32)
    unwritten = outputs.at[0, 1].set(jnp.nan).at[1].set(jnp.inf)
    np.testing.assert_allclose(Mixture(weights, unwritten).summed(), [0.5 * outputs[0, 0], np.zeros(40)])
    check_sum(jnp.ones((2, 40)), Mixture(weights, unwritten))
