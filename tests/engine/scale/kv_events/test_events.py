"""Whoever hears all events knows what a pool's pages hold, and nothing of prompts that are somebody's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm.engine.core.pages import PagePool, PrefixNode
from jaxllm.engine.scale.kv_events import AllBlocksCleared, KVEvent, KVEvents, as_array, as_map, hash_of
from tests.engine.scale.kv_events.subscriber import Subscriber

SIZE = 2


def gathered(pool: PagePool) -> tuple[KVEvents, list[list[KVEvent]]]:
    batches: list[list[KVEvent]] = []
    return KVEvents(pool, batches.append, lambda: None), batches


def prefixes_of(pool: PagePool, root: PrefixNode) -> set[tuple[int, ...]]:
    """Those behind `root` whose every page is still there, of the pool's own books."""
    by_node = {node: pool._key_of[page] for page, node in pool._node_of.items()}
    found = set()
    for node in by_node:
        tokens: tuple[int, ...] = ()
        at: PrefixNode = node
        while at in by_node:
            at, part = by_node[at]
            tokens = part + tokens
        if at == root:
            found.add(tokens)
    return found


def put(pool: PagePool, prompt: list[int], root: PrefixNode) -> list[int]:
    """A prompt's pages, found or filled; fewer where the pool has no more."""
    held, node = pool.acquire_prefix(prompt, root)
    for start in range(len(held) * SIZE, len(prompt) - SIZE + 1, SIZE):
        pages = pool.allocate(1)
        if pages is None:
            break
        held += pages
        node = pool.register(pages[0], node, prompt[start : start + SIZE])
    return held


@pytest.mark.parametrize("seed", range(8))
def test_a_subscriber_knows_what_is_cached(seed: int) -> None:
    dice = np.random.default_rng(seed)
    pool = PagePool(int(dice.integers(4, 24)), SIZE)
    events, batches = gathered(pool)
    router, root, running = Subscriber(), None, []
    for step in range(200):
        if running and dice.random() < 0.5:
            pool.release(running.pop(dice.integers(len(running))))
        else:
            prompt = dice.integers(0, 3, dice.integers(1, 14)).tolist()
            running.append(put(pool, prompt, "salt" if dice.random() < 0.2 else root))
        if step in (90, 150):
            root = (None, "since reset", step)
            events.reset(root)
        events.turned()
        for batch in batches:
            for event in batch:
                router.hear(as_map(event))
        batches.clear()
        assert router.prefixes == prefixes_of(pool, root)


def test_the_pages_of_a_prompt_are_one_event_and_a_step_one_batch() -> None:
    pool = PagePool(9, SIZE)
    events, batches = gathered(pool)
    events.turned()
    assert batches == []
    put(pool, [1, 2, 3, 4, 5, 6, 7], None)
    put(pool, [1, 2, 9, 9], None)
    events.turned()
    ((first, second),) = batches
    one, two, three = hash_of(None, [1, 2]), hash_of(hash_of(None, [1, 2]), [3, 4]), 0
    three = hash_of(two, [5, 6])
    assert as_map(first) == {
        "type": "BlockStored", "block_hashes": [one, two, three], "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6], "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    assert as_array(second) == ["BlockStored", [hash_of(one, [9, 9])], one, [9, 9], SIZE, None, "GPU", None]
    assert as_array(AllBlocksCleared()) == ["AllBlocksCleared"]


def test_what_hangs_on_something_unknown_is_not_told() -> None:
    """As the pages of a request that began before the cache was reset."""
    pool = PagePool(9, SIZE)
    events, batches = gathered(pool)
    (page,) = pool.allocate(1) or []
    node = pool.register(page, None, [1, 2])
    events.reset((None, "since reset", 1))
    (page,) = pool.allocate(1) or []
    pool.register(page, node, [3, 4])
    events.turned()
    told: list[Any] = [as_map(event)["type"] for event in batches[0]]
    assert told == ["BlockStored", "AllBlocksCleared"]
