"""The stored goldens belong to the weights and prompts that tiny.py draws here and now."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import GOLDENS, load_golden
from tests.reference.peft_adapters import ADAPTER_GOLDENS, ADAPTERS
from tests.reference.tiny import ISOLATES, TINY_MODELS, tiny_config, tiny_prompt, tiny_weights
from tests.reference.tiny_configs import CLASSIFIERS, ENCODERS


@pytest.mark.parametrize("name", [*TINY_MODELS, *CLASSIFIERS])
def test_golden_is_of_these_weights_and_this_prompt(name: str) -> None:
    golden = load_golden(name)
    norm = np.sqrt(sum(np.square(w, dtype=np.float64).sum() for w in tiny_weights(name).values()))
    np.testing.assert_allclose(norm, golden.weights_norm, rtol=1e-9)
    assert tiny_prompt(name) == golden.prompt_token_ids
    config = tiny_config(name)
    classes = {"qwen3_classifier": 3, "gemma2_classifier": 2}
    columns = classes.get(name) or config.get("text_config", config)["vocab_size"]
    assert golden.logits.shape == (len(golden.prompt_token_ids), columns)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_of_order_one(name: str) -> None:
    """So that a tolerance means the same for every model."""
    logits = load_golden(name).logits
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


def test_every_model_isolates_something_of_its_own() -> None:
    assert len({*ISOLATES.values()}) == len(TINY_MODELS)


def test_goldens_are_small() -> None:
    assert sum(file.stat().st_size for file in GOLDENS.iterdir()) < 5_000_000


def test_no_golden_is_left_of_a_model_that_is_gone() -> None:
    assert {file.stem for file in GOLDENS.glob("*.npz")} == {*TINY_MODELS, *CLASSIFIERS, *ENCODERS}


def test_goldens_of_adapters_are_small_and_those_that_are_wanted() -> None:
    files = [*ADAPTER_GOLDENS.iterdir()]
    assert {file.stem for file in files} == {*ADAPTERS}
    assert sum(file.stat().st_size for file in files) < 1_000_000
