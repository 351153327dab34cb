"""Latent attention, absorbed and paged, against its definition: expanded keys and values, full causal softmax."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels import REFERENCE
from tests.models.mla_layer import CASES, INTERPRETED, hidden_states, oracle, run
from tests.support.devices import over_devices

SHARDED = {
    "q_lora:2": "the queries' latent is whole on both",
    "one_step_queries:4": "two heads a device",
    "biases:4": "one head a device; latents have their biases on every device, the summed output once",
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict[str, np.ndarray]:
    """Outputs of every case."""
    return over_devices(4, "tests.models.mla_layer", tmp_path_factory.mktemp("mla") / "outputs.npz", *SHARDED)


@pytest.mark.parametrize("kernels", [REFERENCE, INTERPRETED], ids=["reference", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_definition_s(name, kernels):
    for out, x in zip(run(CASES[name], tp=1, kernels=kernels), hidden_states(), strict=True):
        np.testing.assert_allclose(out, oracle(CASES[name], x), rtol=2e-5, atol=2e-5)


def test_bfloat16_stays_close():
    case = CASES["q_lora"]
    for out, x in zip(run(case, tp=1, dtype=jnp.bfloat16), hidden_states(), strict=True):
        expected = oracle(case, x)
        assert np.abs(out - expected).max() <= 3e-2 * np.abs(expected).max()


@pytest.mark.parametrize("case", SHARDED)
def test_outputs_do_not_depend_on_the_degree(sharded, case):
    expected = np.concatenate([oracle(CASES[case.split(":")[0]], x) for x in hidden_states()])
    np.testing.assert_allclose(sharded[case], expected, rtol=2e-5, atol=2e-5)
