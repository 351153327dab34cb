"""Rows of images: who holds them, who waits, who is next."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxllm.engine.features.images.feature import ImagesFeature, SeenByRequest
from jaxllm.engine.features.images.store import RowStore, Waiter
from jaxllm.engine.messages import SeenImage
from jaxllm.errors import EngineDeadError, InvalidRequestError


def image(name: str, rows: int) -> SeenImage:
    return SeenImage(name.encode() * 32, b"", ((1, rows),), (1, 1), rows)


def took(store: RowStore, *images: SeenImage) -> Waiter:
    waiter = Waiter()
    store.take(images, waiter)
    return waiter


def test_an_image_has_its_rows_once_as_long_as_somebody_holds_it() -> None:
    store = RowStore(10)
    a, b = image("a", 6), image("b", 4)
    first, second = took(store, a, a), took(store, b, a)
    assert first.held[0] is first.held[1] is second.held[1]
    assert sorted([*second.held[0].rows, *second.held[1].rows]) == list(range(10))
    store.give_back(first)
    store.give_back(second)
    assert store.num_held == 0
    assert took(store, image("c", 4)).held[0].rows.tolist() != []  # b, which was unused longest, made room


def test_tokens_that_see_each_other_are_run_together() -> None:
    """Ten tokens, of which 3 to 6 see each other: chunks end before them or after them, or wait."""
    until = np.array([0, 1, 2, 6, 6, 6, 6, 7, 8, 9], np.int32)
    rows = np.where(until > np.arange(10), 0, -1).astype(np.int32)
    seen = SeenByRequest((), rows, until, None, 7, [])

    def cut(start: int, length: int, most: int) -> int:
        return ImagesFeature.cut(None, None, seen, start, length, most)  # type: ignore[arg-type]

    assert [cut(0, length, 16) for length in range(11)] == [0, 1, 2, 3, 3, 3, 3, 7, 8, 9, 10]
    assert [cut(3, length, most) for length, most in ((2, 16), (2, 4), (2, 3), (0, 16), (4, 4), (7, 7))] == [
        4,
        4,
        0,
        0,
        4,
        7,
    ]
    assert cut(9, 20, 20) == 20


def test_who_came_first_has_room_first() -> None:
    store, order = RowStore(4), list[str]()
    holder = took(store, image("a", 4))

    def take(name: str, rows: int) -> Waiter:
        found = took(store, image(name, rows))
        order.append(name)
        return found

    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(take, "b", 4)
        while not store._turns:
            time.sleep(0.001)
        small = pool.submit(take, "c", 1)
        time.sleep(0.05)
        assert order == []
        store.give_back(holder)
        store.give_back(large.result())
        small.result()
    assert order == ["b", "c"]


def test_an_image_that_is_given_up_half_filled_is_another_ones_to_fill() -> None:
    store, a = RowStore(8), image("a", 8)
    first, second = took(store, a), took(store, a)
    shared = first.held[0]
    assert store.claim(shared, first)
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(store.claim, shared, second)
        store.fill(shared, 3)
        time.sleep(0.05)
        assert not claimed.done()
        store.give_back(first)
        assert claimed.result() and shared.filled == 3
    store.fill(shared, 8)
    assert store.num_encoded == 1
    third = took(store, a)
    assert not store.claim(third.held[0], third)
    store.forget()
    assert took(RowStore(8), a).held[0].filled == 0


def test_forgotten_images_are_filled_anew_and_those_in_use_stay() -> None:
    store, a = RowStore(8), image("a", 4)
    old = took(store, a)
    store.fill(old.held[0], 4)
    store.forget()
    new = took(store, a)
    assert new.held[0] is not old.held[0] and not set(new.held[0].rows) & set(old.held[0].rows)
    store.give_back(old)
    store.give_back(new)
    assert took(store, image("b", 8)).held


@pytest.mark.parametrize("close", [True, False])
def test_who_waits_is_told_of_the_end(close: bool) -> None:
    store, waiter = RowStore(4), Waiter()
    holder = took(store, image("a", 4))
    threading.Timer(0.05, store.close if close else lambda: store.give_back(waiter)).start()
    with pytest.raises(EngineDeadError):
        store.take([image("b", 2)], waiter)
    assert not waiter.held and not store._turns
    store.give_back(holder)
    with pytest.raises(InvalidRequestError, match="5 rows; there is room for 4"):
        took(store, image("c", 5))
