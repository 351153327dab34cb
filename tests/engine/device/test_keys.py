"""Executables' names: what covers what, and what the log shows."""

import pytest

from jaxllm.engine.device.keys import MASKED, PLAIN, SAMPLED, VARIANTS, Key, Variant


def test_a_variant_covers_those_that_ask_for_less():
    order = (PLAIN, SAMPLED, MASKED)
    for i, mighty in enumerate(order):
        for j, modest in enumerate(order):
            assert mighty.covers(modest) == (i >= j)


def test_variants_are_listed_cheapest_first():
    """The first one that covers a step is then the cheapest that does."""
    for variants in VARIANTS.values():
        for i, variant in enumerate(variants):
            assert not any(variant.covers(later) for later in variants[i + 1 :])


def test_a_mask_without_the_sampler_is_refused():
    with pytest.raises(ValueError, match="must be sampled"):
        Variant(masked=True)


def test_keys_print_what_they_are():
    keys = [Key("pool"), Key("backbone", 64), Key("decode", 4, SAMPLED), Key("head", 8, MASKED)]
    assert [str(key) for key in keys] == ["pool", "backbone-64", "decode-4-sampled", "head-8-sampled+masked"]
