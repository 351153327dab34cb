"""States of prefixes beyond the devices: which are copied, and from which of its prefixes a prompt goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxllm.engine.core.pages import PagePool, PrefixNode
from jaxllm.engine.features.offload.pages import CacheRow, Digest, DiskPages, Page, chain, of_state
from jaxllm.engine.features.offload.tiers import PageTiers
from jaxllm.engine.features.states import StateCache

SIZES = {"page": 100, "state": 250}
"""Bytes."""
TOKENS = [*range(8)]
"""Four pages of two tokens."""


def content(row: CacheRow) -> Page:
    return np.full(SIZES[row.kind], row.number, np.uint8)


class Below:
    """A pool of four pages and rows for states, all that is below them, and whoever copies."""

    def __init__(self, folder: Path, rows: int = 4, host_bytes: int = 10**6, *, has_pages: bool = True):
        self.pool = PagePool(5, 2)
        self.states = StateCache(10, rows)
        self.disk = DiskPages(folder, "model", 10**6, tuple(SIZES.values()))
        self.tiers = PageTiers(self.pool, host_bytes, self.disk, has_states=True, has_pages=has_pages)
        self.pool.on_forget = self.states.forget
        self.states.on_keep, self.states.on_forget = self.tiers.state_kept, self.tiers.state_forgotten
        self.digests = chain(self.tiers._digests.of_root(None), TOKENS, 2)
        self.nodes: list[PrefixNode] = []

    def compute(self, *kept: int) -> list[int]:
        """The pages of TOKENS, and a state after each of so many pages."""
        pages = self.pool.allocate(4)
        assert pages is not None
        node: PrefixNode = None
        self.nodes = []
        for index, page in enumerate(pages):
            node = self.pool.register(page, node, TOKENS[2 * index : 2 * index + 2])
            self.nodes.append(node)
            if index + 1 in kept:
                self.states.begin_step()
                self.states.keep(node, self.states.reserve())
        self.states.begin_step()
        self.pool.release(pages)
        return pages

    def copy(self) -> list[tuple[CacheRow, Digest]]:
        """What has been given away arrives in host memory."""
        leaving = self.tiers.take_leaving()
        self.tiers.keep([digest for _, digest in leaving], lambda: [content(row) for row, _ in leaving])
        self.tiers.wait()
        return leaving

    def give_away(self) -> list[tuple[CacheRow, Digest]]:
        pages = self.pool.allocate(4)
        assert pages is not None
        self.pool.release(pages)
        return self.copy()

    def save(self) -> list[tuple[CacheRow, Digest]]:
        """What one turn of an idle engine copies to disk."""
        some = self.tiers.take_unsaved()
        self.tiers.save([digest for _, digest in some], lambda: [content(row) for row, _ in some])
        self.tiers.wait()
        return some


@pytest.fixture
def below(tmp_path: Path) -> Below:
    return Below(tmp_path)


def test_a_state_leaves_with_the_page_of_its_prefix(below: Below) -> None:
    below.compute(2, 4)
    rows = dict((digest, row) for row, digest in below.give_away())
    assert sorted(row.kind for row in rows.values()) == ["page"] * 4 + ["state"] * 2
    assert rows[of_state(below.digests[1])] == CacheRow("state", 10)
    assert rows[of_state(below.digests[3])] == CacheRow("state", 11)
    back = below.tiers.find_state(None, [], TOKENS, 0)
    assert back.depth == back.known == 4 and [page[0] for page in back.pages] == [1, 2, 3, 4] and back.state[0] == 11
    below.states.check([])


def test_a_state_that_gives_way_alone_is_found_for_pages_on_the_devices(tmp_path: Path) -> None:
    below = Below(tmp_path, rows=1)
    below.compute(2)
    assert below.states.reserve() == 10
    assert below.copy() == [(CacheRow("state", 10), of_state(below.digests[1]))]
    back = below.tiers.find_state(None, below.nodes, [], 0)
    assert (back.depth, back.pages, back.known) == (2, [], 4) and back.state[0] == 10
    assert below.tiers.find_state(None, below.nodes, [], 2).depth == 0, "the devices have that already"


def test_what_no_step_has_written_and_what_is_outdone_is_not_copied(below: Below) -> None:
    below.compute(2)
    below.states.discard(below.nodes[1])
    assert [row.kind for row, _ in below.give_away()] == ["page"] * 4
    pages = below.pool.allocate(4)
    assert pages is not None
    below.pool.release(pages)
    node = below.pool.register(pages[0], None, [8, 9])
    below.states.keep(node, below.states.reserve())
    assert below.give_away() == [(CacheRow("page", pages[0]), chain(below.tiers._digests.of_root(None), [8, 9], 2)[0])]
    below.states.check([])


def test_a_prompt_goes_on_from_the_last_prefix_with_all_its_pages_and_a_state(below: Below) -> None:
    below.compute(1, 3)
    below.give_away()
    host = below.tiers._host
    assert below.tiers.find_state(None, [], TOKENS, 0).depth == 3
    assert len(below.tiers.find_state(None, [], TOKENS, 0).pages) == 3, "the fourth is of no use"
    host._kept.pop(below.digests[1])
    back = below.tiers.find_state(None, [], TOKENS, 0)
    assert (back.depth, len(back.pages), back.known) == (1, 1, 1)
    host._kept.pop(of_state(below.digests[0]))
    assert below.tiers.find_state(None, [], TOKENS, 0).depth == 0


def test_what_is_read_from_disk_ends_at_a_state_which_comes_first(tmp_path: Path) -> None:
    first = Below(tmp_path)
    first.compute(3)
    while first.tiers.has_unsaved:
        assert len(first.save()) <= 4
    later = Below(tmp_path)
    wanted = later.tiers.on_disk(None, TOKENS)
    assert wanted == [of_state(later.digests[2]), *later.digests[:3]]
    later.tiers.read(wanted)
    assert later.tiers.find_state(None, [], TOKENS, 0).depth == 3
    assert later.tiers.on_disk(None, TOKENS) == []
    (tmp_path / "model" / of_state(later.digests[2]).hex()).write_bytes(b"damaged")
    third = Below(tmp_path)
    third.tiers.read(third.tiers.on_disk(None, TOKENS))
    assert third.tiers.num_host == 0, "pages without a state are of no use"
    assert third.tiers.on_disk(None, TOKENS) == []


def test_an_idle_engine_saves_one_state_at_a_time(below: Below) -> None:
    below.compute(1, 2)
    assert [row.kind for row, _ in below.save()] == ["page", "state"]
    assert [row.kind for row, _ in below.save()] == ["page", "state"]
    assert [row.kind for row, _ in below.save()] == ["page", "page"]
    assert not below.tiers.has_unsaved and len(below.disk) == 6
    assert below.disk.nbytes == sum(file.stat().st_size for file in below.disk._folder.iterdir())


def test_what_is_handed_on_has_the_state_that_another_server_goes_on_from(below: Below) -> None:
    """The last token is computed again there: of a prompt of whole pages the last page is of no use."""
    pages = below.compute(3, 4)
    handed = below.tiers.to_hand_on(None, TOKENS, pages)
    assert [digest for _, digest in handed] == [*below.digests, of_state(below.digests[2])]
    assert below.tiers.to_hand_on(None, [*TOKENS, 9], pages)[-1][1] == of_state(below.digests[3])
    below.give_away()
    assert below.tiers.to_hand_on(None, TOKENS, pages) == []


def test_what_is_on_its_way_to_the_host_is_waited_for(below: Below) -> None:
    below.compute(4)
    pages = below.pool.allocate(4)
    assert pages is not None
    leaving = below.tiers.take_leaving()
    below.tiers.keep([digest for _, digest in leaving], lambda: [content(row) for row, _ in leaving])
    assert below.tiers.find_state(None, [], TOKENS, 0).depth == 4


def test_where_no_layer_attends_states_alone_are_kept(tmp_path: Path) -> None:
    below = Below(tmp_path, has_pages=False)
    below.compute(3)
    assert [row.kind for row, _ in below.give_away()] == ["state"] and below.tiers.num_host == 1
    back = below.tiers.find_state(None, [], TOKENS, 0)
    assert back.depth == 3 and [page.nbytes for page in back.pages] == [0] * 3 and back.known == 0
