"""The stored goldens belong to the weights and prompts that tiny.py draws here and now."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import load_golden
from tests.reference.tiny import TINY_MODELS, tiny_config, tiny_prompt, tiny_weights


@pytest.mark.parametrize("name", TINY_MODELS)
def test_golden_is_of_these_weights_and_this_prompt(name: str) -> None:
    golden = load_golden(name)
    norm = np.sqrt(sum(np.square(w, dtype=np.float64).sum() for w in tiny_weights(name).values()))
    np.testing.assert_allclose(norm, golden.weights_norm, rtol=1e-9)
    assert tiny_prompt(name) == golden.prompt_token_ids
    assert golden.logits.shape == (len(golden.prompt_token_ids), tiny_config(name)["vocab_size"])
