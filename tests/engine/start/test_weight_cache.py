"""Packed weights are kept for the next start, which maps them; the start is right whatever happens to the file."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, compat
from jaxllm.engine.start import build
from jaxllm.engine.start.weight_cache import ENDING, WeightCache, identity
from jaxllm.folders import UNFINISHED
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS

LIMIT = 2**20


def arrays(seed: int = 0) -> tuple[jax.Array, ...]:
    drawn = np.random.default_rng(seed)
    shapes = ((7, 3), (), (0, 4), (129,))
    return tuple(jax.device_put(drawn.integers(0, 99, shape).astype(np.int16)) for shape in shapes)


def wanted(weights: tuple[jax.Array, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in weights]


def write(cache: WeightCache, weights: tuple[jax.Array, ...]) -> None:
    cache.write(weights)
    for thread in threading.enumerate():
        if thread.name == "keep weights":
            thread.join()


def test_they_are_mapped_as_they_were_written(tmp_path: Path) -> None:
    weights, cache = arrays(), WeightCache(tmp_path, "model", "plan", LIMIT)
    assert cache.take(wanted(weights)) is None
    write(cache, weights)
    taken = cache.take(wanted(weights))
    assert taken is not None
    for there, here in zip(weights, taken, strict=True):
        np.testing.assert_array_equal(there, here)
    maps = Path("/proc/self/maps").read_text()
    begin = taken[-1].addressable_shards[0].data.unsafe_buffer_pointer()
    mapped = [line.split("-")[0] for line in maps.splitlines() if line.endswith(str(cache.path))]
    assert any(int(start, 16) <= begin < int(start, 16) + LIMIT for start in mapped), "it is a copy"
    assert cache.path.stat().st_mode & 0o077 == 0


def test_a_file_of_another_plan_or_of_other_arrays_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, cache = arrays(), WeightCache(tmp_path, "model", "plan", LIMIT)
    other = WeightCache(tmp_path, "model", "another plan", LIMIT)
    write(cache, weights)
    shutil.copy(cache.path, other.path)  # swapped: it has the right size
    assert other.take(wanted(weights)) is None
    assert "they are of another plan" in caplog.text
    assert cache.take([*wanted(weights), *wanted(arrays())]) is None


@pytest.mark.parametrize("damage", [lambda size: 0, lambda size: 7, lambda size: size // 2, lambda size: size - 1])
def test_a_file_that_is_cut_short_is_not_taken_and_written_again(tmp_path: Path, damage: Any) -> None:
    weights, cache = arrays(), WeightCache(tmp_path, "model", "plan", LIMIT)
    write(cache, weights)
    os.truncate(cache.path, damage(cache.path.stat().st_size))
    assert cache.take(wanted(weights)) is None
    write(cache, weights)
    assert cache.take(wanted(weights)) is not None


def test_a_file_that_others_may_have_written_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, cache = arrays(), WeightCache(tmp_path, "model", "plan", LIMIT)
    write(cache, weights)
    cache.path.chmod(0o666)
    assert cache.take(wanted(weights)) is None and "others than this user" in caplog.text


def test_what_a_killed_process_left_is_deleted_and_what_another_writes_is_not(tmp_path: Path) -> None:
    left, busy = tmp_path / f"{UNFINISHED}left{ENDING}", tmp_path / f"{UNFINISHED}busy{ENDING}"
    left.write_bytes(b"some")
    with busy.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(WeightCache(tmp_path, "model", "plan", LIMIT), arrays())
        assert busy.exists()
    assert not left.exists()
    assert len(list(tmp_path.glob(f"model-*{ENDING}"))) == 1


def test_two_processes_do_not_write_the_same(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, "model", "plan", LIMIT)
    with (tmp_path / (UNFINISHED + cache.path.name)).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(cache, arrays())
    assert not cache.path.exists()


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = WeightCache(tmp_path, "model", "plan", LIMIT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        write(cache, arrays())
    assert "are not kept for the next start: [Errno 28] No space left on device" in caplog.text
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**30))
    write(cache, arrays())
    assert "has 1 GiB free" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = WeightCache(tmp_path / "file" / "weights", "model", "plan", LIMIT)
    assert cache.take(wanted(arrays())) is None
    write(cache, arrays())
    assert "are not kept for the next start: " in caplog.text


def test_weights_that_are_forgotten_are_not_written_to_the_end(tmp_path: Path) -> None:
    weights = arrays()
    weights[-1].delete()
    write(WeightCache(tmp_path, "model", "plan", LIMIT), weights)
    assert not list(tmp_path.iterdir())


def test_what_was_unused_longest_goes_first(tmp_path: Path) -> None:
    weights = arrays()
    caches = [WeightCache(tmp_path, "model", str(number), LIMIT) for number in range(3)]
    for number, cache in enumerate(caches):
        write(cache, weights)
        os.utime(cache.path, (number, number))
    assert caches[0].take(wanted(weights)) is not None  # used now
    size = caches[0].path.stat().st_size
    last = WeightCache(tmp_path, "model", "last", 3 * size)
    write(last, weights)
    assert [cache.path.exists() for cache in (*caches, last)] == [True, False, True, True]
    small = WeightCache(tmp_path, "model", "small", size // 4)
    write(small, weights)
    assert not small.path.exists() and last.path.exists()


def test_a_model_that_is_written_anew_is_another_whatever_its_size(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1234")
    before, times = identity([tmp_path]), file.stat()
    file.write_bytes(b"5678")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity([tmp_path]) != before
    assert identity([tmp_path]) == identity([tmp_path])


def answer(path: Path) -> list[int]:
    """The tokens that an engine of the model answers with, once it has kept its weights."""
    with LLM(path, **FIELDS) as llm:
        found = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        for thread in threading.enumerate():
            if thread.name == "keep weights":
                thread.join()
        return list(found[0].outputs[0].token_ids)


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that weights are packed, all of which are worth keeping."""
    found: list[int] = []
    pack = build._pack_weights
    monkeypatch.setattr(compat, "compile_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(build, "QUICK", 0.0)
    monkeypatch.setattr(build, "_pack_weights", lambda *given: found.append(1) or pack(*given))
    return found


def test_the_next_engine_maps_them_and_says_the_same(tmp_path: Path, packed: list[int]) -> None:
    path = write_checkpoint("qwen3", tmp_path / "model")
    first = answer(path)
    assert answer(path) == first and len(packed) == 1
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes())
    assert answer(path) == first and len(packed) == 2, "a file that was written anew was taken for the old one"


def test_a_process_that_ends_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
import jax.numpy as jnp
from jaxllm.engine.start import weight_cache
os.fsync, weights = lambda file: time.sleep(60), (jnp.zeros(3),)
weight_cache.WeightCache(Path({str(tmp_path)!r}), "model", "plan", {LIMIT}).write(weights)
while not list(Path({str(tmp_path)!r}).iterdir()) or next(Path({str(tmp_path)!r}).iterdir()).stat().st_size == 0:
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
    assert not list(tmp_path.iterdir())


def test_a_file_that_another_process_has_just_finished_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is mapped by then; cutting it short would end whoever reads it."""
    cache = WeightCache(tmp_path, "model", "plan", LIMIT)
    lock = fcntl.flock

    def finished_meanwhile(file: Any, kind: int) -> None:
        unfinished = tmp_path / (UNFINISHED + cache.path.name)
        unfinished.write_bytes(b"theirs")
        unfinished.replace(cache.path)
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", finished_meanwhile)
    write(cache, arrays())
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"theirs"]


def test_a_model_that_is_replaced_after_the_start_began_is_not_kept_as_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: list[int]
) -> None:
    path, opened = write_checkpoint("qwen3", tmp_path / "model"), build.open_model

    def open_and_replace(*given: Any) -> Any:
        checkpoint = opened(*given)
        (write_checkpoint("qwen3", tmp_path / "new") / "model.safetensors").replace(path / "model.safetensors")
        return checkpoint

    with monkeypatch.context() as patch:
        patch.setattr(build, "open_model", open_and_replace)
        answer(path)
    answer(path)
    assert len(packed) == 2, "the old weights were kept for the new files"
    answer(path)
    assert len(packed) == 2
