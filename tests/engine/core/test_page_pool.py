"""The page pool as a state machine, beside a model of what sequences wrote into which page."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.engine.core.pages import PagePool, PrefixNode

PAGE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few tokens, so that prefixes meet often
SALTS = st.sampled_from([None, "", "a"])


@dataclass
class Sequence:
    salt: str | None
    tokens: list[int]
    pages: list[int]
    node: PrefixNode
    registered: int
    written: int = 0


@dataclass
class Written:
    """What is in a page: the whole sequence up to the page's end decides its keys and values."""

    salt: str | None
    tokens: tuple[int, ...]


@dataclass
class Model:
    content: dict[int, Written] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    """When a free page was let go; absent for pages that hold nothing findable."""
    clock: int = 0


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(2, 12), caching=st.booleans())
    def start(self, num_pages: int, caching: bool) -> None:
        self.pool = PagePool(num_pages, PAGE, enable_prefix_caching=caching)
        self.caching = caching
        self.model = Model()
        self.live: list[Sequence] = []
        self.findable: set[int] = set()

    @rule(tokens=TOKENS, salt=SALTS)
    def admit(self, tokens: list[int], salt: str | None) -> None:
        cached, node = self.pool.acquire_prefix(tokens, salt)
        assert len(set(cached)) == len(cached)
        assert not cached or self.caching
        for index, page in enumerate(cached):
            assert self.model.content[page] == Written(salt, tuple(tokens[: (index + 1) * PAGE]))
            self.model.last_use.pop(page, None)
        pages = self.allocate(self.pool.pages_for(len(tokens)) - len(cached))
        if pages is None:
            self.let_go(cached)
            return
        self.live.append(Sequence(salt, list(tokens), cached + pages, node, len(cached), len(cached) * PAGE))
        self.fill(self.live[-1])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=TOKENS)
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        missing = self.pool.pages_for(len(sequence.tokens) + len(tokens)) - len(sequence.pages)
        pages = self.allocate(missing)
        if pages is not None:
            sequence.tokens += tokens
            sequence.pages += pages
            self.fill(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.let_go(sequence.pages)

    @rule()
    def ask_for_too_much(self) -> None:
        before = self.pool.num_free
        assert self.pool.allocate(before + 1) is None
        assert self.pool.num_free == before

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = {page for sequence in self.live for page in sequence.pages}
        assert self.pool.num_free + len(held) == self.pool.num_pages - 1
        assert self.pool.num_cached == len(self.findable)
        self.pool.check([sequence.pages for sequence in self.live])

    def allocate(self, count: int) -> list[int] | None:
        """Empty pages go first, then those let go the longest ago."""
        held = {page for sequence in self.live for page in sequence.pages}
        free = self.pool.num_free
        pages = self.pool.allocate(count)
        if pages is None:
            assert count > free
            return None
        assert len(set(pages)) == count and 0 not in pages and not held & set(pages)
        unused = [p for p in self.model.last_use if p not in pages]
        taken = [self.model.last_use[p] for p in pages if p in self.model.last_use]
        assert taken == sorted(taken)
        assert not taken or all(self.model.last_use[p] > taken[-1] for p in unused)
        if taken:
            assert self.pool.num_free == len(unused), "an empty page was left while a warm one was taken"
        for page in pages:
            self.findable.discard(page)
            self.model.last_use.pop(page, None)
            self.model.content.pop(page, None)
        return pages

    def fill(self, sequence: Sequence) -> None:
        """Write every token that has no keys and values yet, then register the pages that are full."""
        for position in range(sequence.written, len(sequence.tokens)):
            page = sequence.pages[position // PAGE]
            assert sum(page in other.pages for other in self.live) == 1, "a shared page is written"
            self.model.content[page] = Written(sequence.salt, tuple(sequence.tokens[: position + 1]))
        sequence.written = len(sequence.tokens)
        for index in range(sequence.registered, len(sequence.tokens) // PAGE):
            page, cached = sequence.pages[index], self.pool.num_cached
            sequence.node = self.pool.register(page, sequence.node, sequence.tokens[index * PAGE : (index + 1) * PAGE])
            if self.pool.num_cached > cached:
                self.findable.add(page)
            sequence.registered = index + 1

    def let_go(self, pages: list[int]) -> None:
        self.pool.release(pages)
        held = {page for sequence in self.live for page in sequence.pages}
        for page in reversed(pages):
            self.model.clock += 1
            if page not in held and page in self.findable:
                self.model.last_use[page] = self.model.clock

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.live:
                self.let_go(self.live.pop().pages)
            self.pool.check([])
            assert self.pool.num_free == self.pool.num_pages - 1


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def admit(pool: PagePool, tokens: list[int], salt: str | None = None) -> tuple[list[int], int]:
    """Hold pages for `tokens`, all full ones registered; also how many of them were found."""
    cached, node = pool.acquire_prefix(tokens, salt)
    new = pool.allocate(pool.pages_for(len(tokens)) - len(cached))
    assert new is not None
    pages = cached + new
    size = pool.page_size
    for index in range(len(cached), len(tokens) // size):
        node = pool.register(pages[index], node, tokens[index * size : (index + 1) * size])
    return pages, len(cached)


def test_a_finished_prompt_is_found_whole_pages_at_a_time():
    pool = PagePool(20, 4)
    pages, _ = admit(pool, list(range(11)))
    pool.release(pages)
    for prompt, found in [
        (list(range(11)), 2), (list(range(8)), 2), (list(range(7)), 1), ([*range(4), 9, 9, 9, 9], 1), ([1, 2, 3], 0),
    ]:  # fmt: skip
        again, _ = pool.acquire_prefix(prompt)
        assert again == pages[:found]
        pool.release(again)
    assert pool.num_free == 19


def test_running_sequences_share_a_prefix():
    pool = PagePool(20, 4)
    first, _ = admit(pool, [1] * 8)
    second, found = admit(pool, [1] * 8 + [2])
    assert found == 2 and second[:2] == first
    pool.release(first)
    pool.check([second])
    assert pool.num_free == 19 - 3


@pytest.mark.parametrize("other", ["b", "", None])
def test_salts_do_not_share(other):
    pool = PagePool(20, 4)
    pages, _ = admit(pool, [1] * 8, "a")
    assert pool.acquire_prefix([1] * 8, other)[0] == []
    assert pool.acquire_prefix([1] * 8, "a")[0] == pages


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning():
    pool = PagePool(5, 4)
    tokens = list(range(16))
    pages, _ = admit(pool, tokens)
    pool.release(pages)
    for left in (3, 2, 1, 0):
        taken = pool.allocate(1)
        found, _ = pool.acquire_prefix(tokens)
        assert found == pages[:left]
        pool.release(found)
        assert taken == [pages[left]]


def test_a_prefix_in_use_stays_warm_longer():
    pool = PagePool(7, 4)
    old, _ = admit(pool, [1] * 8)
    pool.release(old)
    new, _ = admit(pool, [2] * 8)
    pool.release(new)
    again, found = admit(pool, [1] * 8)
    assert found == 2
    pool.release(again)
    pool.allocate(4)  # two pages were never used; two more must go
    assert pool.acquire_prefix([2] * 8)[0] == []
    assert pool.acquire_prefix([1] * 8)[0] == old


def test_of_two_pages_with_the_same_tokens_the_first_stays_findable():
    pool = PagePool(9, 4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None and second is not None
    node = pool.register(first[0], None, [1] * 4)
    assert pool.register(second[0], None, [1] * 4) == node
    assert pool.num_cached == 1
    pool.release(second)
    assert pool.acquire_prefix([1] * 4)[0] == first
    assert pool.allocate(1) == second, "the duplicate holds nothing reusable, so it goes first"


def test_without_prefix_caching_nothing_is_found():
    pool = PagePool(9, 4, enable_prefix_caching=False)
    pages, _ = admit(pool, [1] * 8)
    pool.release(pages)
    assert pool.acquire_prefix([1] * 8)[0] == []
    assert pool.num_cached == 0


def test_check_notices_a_lost_page():
    pool = PagePool(5, 4)
    pages = pool.allocate(2)
    assert pages is not None
    with pytest.raises(AssertionError):
        pool.check([pages[:1]])
