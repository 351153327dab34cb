"""What the model is told, from what is sent and what the slots hold, against a batch built on the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.core.batch import decode_batch, mixed_batch
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import SETTING_FLOATS, SETTING_INTS, Packing, admit_packing, core_fields
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.slots import Slots, admit, slot_shapes
from tests.engine.step_sizes import step_sizes

SLOTS, PAGES, PAGE, MODEL_LEN = 6, 5, 4, 20
SIZES = step_sizes(max_num_seqs=SLOTS, max_model_len=MODEL_LEN, page_size=PAGE)
NOBODY = SLOTS


class Device:
    """Slots as an engine would fill them, and what they should hold."""

    def __init__(self, rng: np.random.Generator):
        shapes = slot_shapes(SIZES, Features())
        # What earlier requests left behind is anything.
        self.slots: Slots = jax.tree.map(lambda a: jnp.asarray(rng.integers(0, 9, a.shape), a.dtype), shapes)
        self.position = np.zeros(SLOTS, np.int64)
        self.rotary = np.zeros(SLOTS, np.int64)
        self.pages: list[list[int]] = [[] for _ in range(SLOTS)]

    def admit(self, slot: int, position: int, pages: list[int], rotary_len: int) -> None:
        packing = admit_packing(PAGES)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["slot"][...], x["position"][...] = slot, position
        x["page_table"][: len(pages)] = pages
        SETTING_INTS.views(x["settings"])["rotary_len"][...] = rotary_len
        self.slots = admit(self.slots, jnp.asarray(ints), jnp.zeros(SETTING_FLOATS.size), Features())
        self.position[slot], self.pages[slot], self.rotary[slot] = position, list(pages), rotary_len


def table_of(device: Device, slots: list[int], rows: int) -> np.ndarray:
    table = np.zeros((rows, PAGES), np.int32)
    for row, slot in enumerate(slots):
        table[row, : len(device.pages[slot])] = device.pages[slot]
    return table


@pytest.fixture
def device() -> Device:
    found = Device(np.random.default_rng(1))
    found.admit(0, 8, [3, 9], 11)
    found.admit(5, 2, [5], 3)
    found.admit(2, 4, [1, 7], 40)
    return found


def packed(key: Key, **values: Any) -> Any:
    packing = Packing(**core_fields(key, SIZES))
    ints = np.zeros(packing.size, np.int32)
    for name, view in packing.views(ints).items():
        given = np.asarray(values[name])
        view[tuple(slice(n) for n in given.shape)] = given
        if name == "slot":
            view[len(given) :] = NOBODY
        if name == "new_pages":
            view[len(given) :, 0] = NOBODY
    return packing.unpack(jnp.asarray(ints))


def test_decode_step_by_step_with_pages_gained(device):
    decode = jax.jit(decode_batch, static_argnums=2)
    order = [0, 2, 5]
    for turn in range(6):
        gained = []
        for slot in order:
            new = device.position[slot] // PAGE >= len(device.pages[slot])
            gained.append(20 + 10 * turn + slot if new else 0)
            device.pages[slot] += [gained[-1]] if new else []
        x = packed(Key("decode", 4), num_decodes=3, num_steps=1, tokens=[-1, 6, -1], slot=order, new_page=gained)
        tokens, meta, device.slots = decode(x, device.slots, PAGE)
        at = device.position[order]
        np.testing.assert_array_equal(meta.positions, [*at, 0])
        np.testing.assert_array_equal(meta.context_len, [*(at + 1), 0])
        np.testing.assert_array_equal(meta.seq_ids, [0, 1, 2, 4])
        np.testing.assert_array_equal(meta.query_start, [0, 1, 2, 3, 3])
        np.testing.assert_array_equal(meta.page_table, table_of(device, order, 4))
        np.testing.assert_array_equal(meta.rotary_lengths[:3], np.maximum(device.rotary[order], at + 1))
        history = np.asarray(device.slots.history)
        np.testing.assert_array_equal(tokens[:3], [history[0, at[0]], 6, history[5, at[2]]])
        device.position[order] += 1
        np.testing.assert_array_equal(np.asarray(device.slots.position)[order], device.position[order])


def test_a_mixed_step_of_a_decode_and_chunks(device):
    lengths = {5: 1, 0: 5, 2: 3}
    gained = [(0, 2, 11), (0, 3, 12)]
    device.pages[0] += [11, 12]
    x = packed(
        Key("backbone", 12), num_decodes=1, num_seqs=3, tokens=[-1, 1, 2, 3, 4, 5, 6, 7, 8],
        query_start=[0, 1, 6, 9, 9, 9, 9], slot=list(lengths), new_pages=gained,
    )  # fmt: skip
    before = np.asarray(device.slots.history)
    tokens, meta, slots = jax.jit(mixed_batch)(x, device.slots)
    at = [device.position[slot] + i for slot, length in lengths.items() for i in range(length)]
    np.testing.assert_array_equal(meta.positions, [*at, 0, 0, 0])
    np.testing.assert_array_equal(meta.seq_ids, [0, *[1] * 5, *[2] * 3, 6, 6, 6])
    np.testing.assert_array_equal(meta.context_len, [3, 13, 7, 0, 0, 0])
    np.testing.assert_array_equal(meta.page_table, table_of(device, list(lengths), 6))
    np.testing.assert_array_equal(meta.live, [True] * 9 + [False] * 3)
    rotary = np.maximum([device.rotary[s] for s, n in lengths.items() for _ in range(n)], np.add(at, 1))
    np.testing.assert_array_equal(meta.rotary_lengths[:9], rotary)
    np.testing.assert_array_equal(tokens[:9], [before[5, 2], 1, 2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(np.asarray(slots.position)[[5, 0, 2]], [3, 13, 7])
    np.testing.assert_array_equal(np.asarray(slots.position)[[1, 3, 4]], np.asarray(device.slots.position)[[1, 3, 4]])


def test_a_slot_keeps_nothing_of_its_last_request(device):
    device.admit(0, 0, [4], 1)
    x = packed(Key("decode", 2), num_decodes=1, num_steps=1, tokens=[3], slot=[0], new_page=[0])
    _, meta, _ = decode_batch(x, device.slots, PAGE)
    np.testing.assert_array_equal(meta.page_table, [[4, 0, 0, 0, 0], [0] * PAGES])
    assert int(meta.positions[0]) == 0 and int(meta.rotary_lengths[0]) == 1
