"""Pages in host memory and on disk: what stays, what goes, and what is never believed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.features.offload.pages import CHECKSUM, CacheRow, DiskPages, HostPages, Page, PrefixDigests, chain
from jaxllm.engine.features.offload.tiers import PageTiers
from jaxllm.errors import ConfigError

SIZE = 100
"""Bytes of a page."""


def page(number: int) -> Page:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_longest_unused_page_gives_way():
    gone: list[bytes] = []
    pages = HostPages(3 * SIZE, lambda digest, content: gone.append(digest))
    for number in (1, 2, 3):
        pages.add(name(number), page(number))
    assert pages.get(name(1)) is not None
    pages.add(name(2), page(2))  # it is there, and used
    for number in (4, 5):
        pages.add(name(number), page(number))
    assert gone == [name(3), name(1)]
    assert len(pages) == 3 and pages.nbytes == 3 * SIZE
    np.testing.assert_array_equal(pages.get(name(2)), page(2))
    assert pages.get(name(1)) is None and name(1) not in pages


def test_a_page_larger_than_the_budget_is_not_kept():
    gone: list[bytes] = []
    pages = HostPages(SIZE - 1, lambda digest, content: gone.append(digest))
    pages.add(name(1), page(1))
    assert gone == [name(1)] and len(pages) == 0


def disk(folder: Path, budget: int = 10**6) -> DiskPages:
    return DiskPages(folder, "model", budget, (SIZE,))


def test_a_file_outlives_its_process(tmp_path: Path):
    disk(tmp_path).write(name(7), page(7))
    later = disk(tmp_path)
    assert name(7) in later and len(later) == 1
    np.testing.assert_array_equal(later.read(name(7)), page(7))
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o700


def test_the_longest_unused_file_is_deleted(tmp_path: Path):
    first = disk(tmp_path)
    for number in range(4):
        first.write(name(number), page(number))
        os.utime(tmp_path / "model" / name(number).hex(), (number, number))
    assert first.read(name(0)) is not None
    later = disk(tmp_path, 4 * (SIZE + CHECKSUM))
    later.write(name(9), page(9))
    assert name(1) not in later and sorted(os.listdir(tmp_path / "model")) == [name(i).hex() for i in (0, 2, 3, 9)]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "longer"])
def test_a_damaged_file_is_not_believed_and_deleted(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture):
    pages = disk(tmp_path)
    pages.write(name(1), page(1))
    file = tmp_path / "model" / name(1).hex()
    content = bytearray(file.read_bytes())
    match damage:
        case "cut":
            del content[-1:]
        case "changed":
            content[-1] ^= 1
        case "empty":
            content.clear()
        case "longer":
            content += b"x"
    file.write_bytes(content)
    assert pages.read(name(1)) is None and name(1) not in pages and not file.exists()
    assert "damaged" in caplog.text


def test_files_that_have_changed_places_are_not_believed(tmp_path: Path):
    pages = disk(tmp_path)
    first, second = (tmp_path / "model" / name(number).hex() for number in (1, 2))
    for number in (1, 2):
        pages.write(name(number), page(number))
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    assert pages.read(name(1)) is None and pages.read(name(2)) is None and len(pages) == 0


def test_what_another_process_has_deleted_is_not_found(tmp_path: Path):
    pages = disk(tmp_path)
    pages.write(name(1), page(1))
    (tmp_path / "model" / name(1).hex()).unlink()
    assert name(1) in pages and pages.read(name(1)) is None and name(1) not in pages


def test_what_was_never_finished_is_cleaned_up_after_a_while(tmp_path: Path):
    disk(tmp_path)
    old, new = (tmp_path / "model" / f".unfinished-{number}" for number in (1, 2))
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert len(disk(tmp_path)) == 0
    assert not old.exists() and new.exists()


def test_a_disk_that_takes_no_more_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pages = disk(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            pages.write(name(number), page(number))
    assert len(pages) == 0 and os.listdir(tmp_path / "model") == []
    assert [record.message for record in caplog.records] == [
        f"pages of the KV cache cannot be written in {tmp_path / 'model'}: No space left on device"
    ]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=r"kv_offload_dir is .* others than this user may write there"):
        disk(folder)


def test_a_folder_that_is_made_is_for_this_user_alone_whatever_the_umask(tmp_path: Path):
    before = os.umask(0o002)
    try:
        disk(tmp_path / "new" / "pages").write(name(1), page(1))
        assert name(1) in disk(tmp_path / "new" / "pages")
    finally:
        os.umask(before)
    assert [place.stat().st_mode & 0o777 for place in (tmp_path / "new").rglob("*")] == [0o700, 0o700, 0o600]


def test_a_file_in_the_folders_place_is_refused_in_a_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_offload_dir is '.*file': Not a directory"):
        disk(tmp_path / "file")


def test_digests_are_of_all_tokens_and_of_where_they_begin():
    one, other = PrefixDigests(), PrefixDigests()
    tokens = list(range(12))
    begin = one.of_root(None)
    digests = chain(begin, tokens, 4)
    assert len(digests) == 3 and digests == chain(other.of_root(None), [*tokens, 99], 4)
    assert chain(begin, [100, *tokens[1:]], 4)[2] != digests[2]
    assert one.of_root("salt") == other.of_root("salt") != begin
    assert one.of_root("None") != begin
    assert one.of_root(("salt", 1)) == one.of_root(("salt", 1)) != other.of_root(("salt", 1)), "known by numbers here"


def test_what_hangs_on_a_page_that_is_gone_is_not_kept():
    pool = PagePool(5, 2)
    tiers = PageTiers(pool, 10 * SIZE)
    (parent,) = pool.allocate(1)
    node = pool.register(parent, None, [1, 2])
    pool.release([parent])
    assert len(pool.allocate(4)) == 4
    assert [row for row, _ in tiers.take_leaving()] == [CacheRow("page", parent)]
    child = pool.register(2, node, [3, 4])
    assert child != node and tiers._digests[child] is None
    tiers.close()


def test_pages_wait_for_each_other_on_their_way(tmp_path: Path):
    """What gives way in host memory goes to disk, and is read from there for a prompt that begins with it."""
    pool = PagePool(9, 2)
    tiers = PageTiers(pool, 2 * SIZE, disk(tmp_path))
    held = pool.allocate(4)
    tokens = [*range(8)]
    node = None
    for index, number in enumerate(held):
        node = pool.register(number, node, tokens[2 * index : 2 * index + 2])
    pool.release(held)
    assert tiers.has_unsaved and tiers.on_disk(None, tokens) == []
    pool.allocate(8)
    leaving = tiers.take_leaving()
    assert sorted(row.number for row, _ in leaving) == sorted(held) and not tiers.has_unsaved
    tiers.keep([digest for _, digest in leaving], lambda: [page(row.number) for row, _ in leaving])
    tiers.wait()
    assert (tiers.num_host, tiers.num_disk) == (2, 2)
    assert tiers.has_unsaved, "the two in host memory"
    wanted = tiers.on_disk(None, tokens)
    assert len(wanted) == 2 and tiers.on_disk("salt", tokens) == []
    tiers.read(wanted)
    assert (tiers.num_host, tiers.num_disk) == (2, 4), "those that gave way for them are written"
    assert tiers.find(None, tokens) == [], "memory is too small for the whole prompt, whose beginning gave way"
    tiers.read(tiers.on_disk(None, tokens[:4]))
    found = tiers.find(None, tokens)
    np.testing.assert_array_equal(found, [page(number) for number in held[:2]])
    tiers.close()


def test_pages_that_were_given_away_unsaved_are_saved_from_host_memory(tmp_path: Path):
    """Of an engine that was never idle before they lost their place."""
    pool = PagePool(5, 2)
    tiers = PageTiers(pool, 10 * SIZE, disk(tmp_path))
    held = pool.allocate(4)
    node = None
    for index, number in enumerate(held):
        node = pool.register(number, node, [2 * index, 2 * index + 1])
    pool.release(held)
    pool.allocate(3)
    leaving = tiers.take_leaving()
    tiers.keep([digest for _, digest in leaving], lambda: [page(row.number) for row, _ in leaving])
    tiers.wait()
    on_device = tiers.take_unsaved()
    tiers.save([digest for _, digest in on_device], lambda: [page(row.number) for row, _ in on_device])
    assert tiers.has_unsaved
    tiers.save_from_host()
    tiers.wait()
    assert not tiers.has_unsaved and len(disk(tmp_path)) == tiers.num_disk == 4
    for row, digest in [*leaving, *on_device]:
        np.testing.assert_array_equal(disk(tmp_path).read(digest), page(row.number))
    tiers.close()
