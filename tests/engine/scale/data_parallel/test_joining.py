"""What several batches ask for becomes one step, in which each finds what it asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm.engine.core.keys import PLAIN, SAMPLED, Key, Kind, Variant
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sampler import ALL
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.features import features_of
from jaxllm.engine.scale.data_parallel import Joiner, WantedStep
from jaxllm.models.caches import PerSlot
from tests.engine.step_sizes import PAGED, step_sizes

SEQS = step_sizes().max_num_seqs
NOBODY = SEQS
STATE = PerSlot(((4,),), (None,))
MASKED = SAMPLED | {"grammar"}


def features(of: StepSizes) -> Features:
    return features_of(of, widest_activation=16)


def packing_of(key: Key, of: StepSizes) -> Packing:
    return features(of).packing(key, of)


def joiner(of: StepSizes) -> Joiner:
    return Joiner(of, covering, features(of))


def put(word: str = "admit") -> Key:
    return Key("put", 0, frozenset({word}))


def covering(kind: Kind, needed: int, variant: Variant = PLAIN) -> Key:
    """Sizes double; a variant is the one asked for."""
    return Key(kind, 1 << (needed - 1).bit_length(), variant)


def asked(key: Key, of: StepSizes, **fields: Any) -> WantedStep:
    """A step with these values in front of its fields, the rest of which are padding as a Runner makes it."""
    vector, views = packing_of(key, of).new()
    views["slot"][:] = NOBODY
    if "mask" in views:
        views["mask"][:] = 7
    if "new_pages" in views:
        views["new_pages"][:, 0] = NOBODY
    for name, value in fields.items():
        found = np.asarray(value)
        views[name][tuple(map(slice, found.shape))] = found
    return WantedStep(key, (vector,))


def parts(step: WantedStep, of: StepSizes, count: int) -> list[dict[str, np.ndarray]]:
    """The fields of each batch's part."""
    packing = packing_of(step.key, of)
    return [packing.views(part) for part in np.split(step.vectors[0], count)]


def test_a_smaller_decode_runs_as_the_larger_one() -> None:
    of = step_sizes(caches=(PAGED, STATE))
    small = asked(Key("decode", 2), of, num_decodes=2, num_steps=1, tokens=[5, -1], slot=[3, 1], state_read=[9, 0])
    large = asked(Key("decode", 4, SAMPLED), of, num_decodes=3, tokens=[1, 2, 3], slot=[0, 1, 2], new_page=[0, 7, 0])
    step = joiner(of).join([small, None, large])
    assert step.key == Key("decode", 4, SAMPLED)
    first, idle, last = parts(step, of, 3)
    assert (first["num_decodes"], idle["num_decodes"], last["num_decodes"]) == (2, 0, 3)
    assert first["tokens"].tolist() == [5, -1, 0, 0] and first["slot"].tolist() == [3, 1, NOBODY, NOBODY]
    assert first["state_read"].tolist() == [9, 0, 0, 0]
    assert idle["slot"].tolist() == [NOBODY] * 4
    assert np.array_equal(step.vectors[0][-len(large.vectors[0]) :], large.vectors[0])


def test_a_smaller_backbone_ends_where_it_ended() -> None:
    of = step_sizes()
    small = asked(
        Key("backbone", 8), of, num_seqs=2, tokens=range(6), query_start=[0, 1, 6, 6, 6, 6, 6, 6, 6], slot=[4, 5],
        new_pages=[[4, 0, 9], [5, 1, 3]],
    )  # fmt: skip
    large = asked(Key("backbone", 32), of, num_seqs=1, tokens=range(20), query_start=[0] + [20] * SEQS, slot=[1])
    first, last = parts(joiner(of).join([small, large]), of, 2)
    assert first["query_start"].tolist() == [0, 1] + [6] * (SEQS - 1)
    assert first["tokens"].tolist() == [*range(6), *[0] * 26] and first["slot"].tolist() == [4, 5] + [NOBODY] * 6
    assert first["new_pages"][:2].tolist() == [[4, 0, 9], [5, 1, 3]]
    assert (first["new_pages"][2:, 0] == NOBODY).all() and len(first["new_pages"]) == len(last["new_pages"])


def test_rows_without_a_mask_may_become_any_token() -> None:
    of = step_sizes()
    plain = asked(Key("head", 2, SAMPLED), of, hidden_row=[3, 4], slot=[0, 1])
    masked = asked(Key("head", 2, MASKED), of, hidden_row=[1], slot=[2])
    step = joiner(of).join([plain, masked, None])
    first, second, idle = parts(step, of, 3)
    assert step.key == Key("head", 2, MASKED)
    assert (first["mask"] == ALL).all() and (idle["mask"] == ALL).all() and (second["mask"] == 7).all()


@pytest.mark.parametrize("word", ["admit", "adjustments", "history"])
def test_what_one_batch_tells_a_slot_the_others_tell_nobody(word: str) -> None:
    told = WantedStep(put(word), (np.array([3, 5], np.int32), np.ones((2, 2), np.float32)))
    step = joiner(step_sizes()).join([None, told])
    assert step.vectors[0].tolist() == [NOBODY, 0, 3, 5]
    assert step.vectors[1].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_prompts_come_before_decodes_and_what_few_ask_for_runs_alone() -> None:
    several, nothing = joiner(step_sizes()), (np.zeros(1, np.int32),)

    def chosen(*keys: Key) -> list[int]:
        return several.choose({batch: WantedStep(key, nothing) for batch, key in enumerate(keys)})

    assert chosen(Key("decode", 8), put()) == [1]
    assert chosen(Key("decode", 8), Key("head", 2), Key("backbone", 8)) == [2]
    assert chosen(Key("decode", 8), Key("head", 2), Key("decode", 8)) == [1]
    assert chosen(Key("decode", 8), Key("decode", 2, SAMPLED)) == [0, 1]
    steered: Variant = frozenset({"steering"})
    assert chosen(Key("decode", 8, steered), Key("decode", 8)) == [0]
    assert chosen(Key("decode", 8), Key("decode", 8, steered)) == [0]
    assert chosen(Key("decode", 8, steered), Key("decode", 8, steered)) == [0, 1]
