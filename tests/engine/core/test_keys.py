"""Executables' names: what covers what, and what the log shows."""

from __future__ import annotations

import pytest

from jaxllm.engine.core.keys import PLAIN, SAMPLED, USES, Key, covers
from jaxllm.engine.core.registry import Features
from jaxllm.engine.features import features_of, features_of_encoder
from tests.engine.step_sizes import step_sizes

MASKED = SAMPLED | {"grammar"}


@pytest.fixture(params=["decoder", "encoder"])
def features(request: pytest.FixtureRequest) -> Features:
    return features_of_encoder() if request.param == "encoder" else features_of(step_sizes(), widest_activation=16)


def test_a_variant_covers_those_that_ask_for_less() -> None:
    order = (PLAIN, SAMPLED, MASKED)
    for i, mighty in enumerate(order):
        for j, modest in enumerate(order):
            assert covers(mighty, modest) == (i >= j)


def test_room_for_more_covers_what_asks_for_less() -> None:
    four, none = frozenset({"captures4"}), frozenset({"steering"})
    assert covers(four, frozenset({"captures3"})) and covers(four, frozenset({"captures4"})) and covers(four, PLAIN)
    assert not covers(four, frozenset({"captures5"})) and not covers(four, none) and not covers(none, four)


@pytest.mark.parametrize(
    "wanted", [(), ("steering",), ("captures3", "patching5"), ("processors", "sampled"), ("steering", "captures1")]
)
def test_variants_are_listed_cheapest_first(features: Features, wanted: tuple[str, ...]) -> None:
    """The first one that covers a step is then the cheapest that does."""
    for kind in USES:
        variants = features.variants(kind, frozenset(wanted))
        for i, variant in enumerate(variants):
            assert covers(variant, frozenset(wanted))
            assert not any(covers(variant, later) for later in variants[i + 1 :])


def test_no_mask_is_applied_without_the_sampler() -> None:
    features = features_of(step_sizes(), widest_activation=16)
    for kind in USES:
        for words in ((), ("grammar",), ("processors",)):
            for variant in features.variants(kind, frozenset(words)):
                assert "sampled" in variant or not variant & {"grammar", "processors"}
    assert MASKED in features.variants("head")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (Key("read", 0, frozenset({"sums"})), "read-sums"),
        (Key("put", 0, frozenset({"admit"})), "put-admit"),
        (Key("backbone", 64), "backbone-64"),
        (Key("backbone", 64, frozenset({"captures16"})), "backbone-64-captures16"),
        (Key("decode", 4, SAMPLED), "decode-4-sampled"),
        (Key("head", 8, MASKED), "head-8-sampled+grammar"),
    ],
)
def test_keys_print_what_they_are(key: Key, name: str) -> None:
    assert str(key) == name
