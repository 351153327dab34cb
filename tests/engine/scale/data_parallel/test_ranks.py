"""Where turns meet: each step runs once for all that ask for it, and nobody waits for one who does not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.core.keys import Key
from jaxllm.engine.scale.data_parallel import Ranks
from tests.engine.scale.data_parallel.test_joining import NOBODY, covering, features, put
from tests.engine.step_sizes import step_sizes

SECONDS = 60


class FakeDevice:
    """Gives each batch the first number of what it sent, and remembers what ran."""

    def __init__(self, count: int):
        self.ran: list[tuple[str, list[int]]] = []
        self._count = count

    covering = staticmethod(covering)
    features = features(step_sizes())

    def run(self, key: Key, *vectors: Any) -> Any:
        firsts = [int(part[0]) for part in np.split(vectors[0], self._count)]
        self.ran.append((str(key), firsts))
        if key == SUMS:
            raise RuntimeError("out of memory")
        return None if key.kind == "put" else [10 * first for first in firsts]


def turns(count: int, *takes: Callable[[Callable[..., Any]], Any]) -> tuple[FakeDevice, list[Any]]:
    """What ran, and what came of a turn of each rank; a turn runs steps by what it is given."""
    device = FakeDevice(count)
    ranks = Ranks(device, step_sizes(), count)  # type: ignore[arg-type]
    ranks.begin(list(range(len(takes))))

    def turn(rank: int) -> Any:
        try:
            return takes[rank](lambda key, *vectors: ranks.run(rank, key, vectors))
        except RuntimeError as error:
            return str(error)
        finally:
            ranks.end(rank)

    with ThreadPoolExecutor(len(takes)) as pool:
        return device, [future.result(SECONDS) for future in [pool.submit(turn, rank) for rank in range(len(takes))]]


def one(number: int) -> np.ndarray:
    return np.array([number], np.int32)


SCORE, SUMS = (Key("read", size, frozenset({word})) for size, word in ((1, "score"), (0, "sums")))
LOGITS = Key("read", 4, frozenset({"token_logits"}))


def test_each_is_given_its_own_part() -> None:
    device, found = turns(3, *(lambda run, n=number: run(SCORE, one(n)) for number in range(3)))
    assert found == [0, 10, 20] and device.ran == [("read-1-score", [0, 1, 2])]


def test_one_that_has_ended_is_waited_for_no_longer() -> None:
    device, found = turns(2, lambda run: [run(SCORE, one(n)) for n in (1, 2, 3)], lambda run: run(SCORE, one(4)))
    assert found == [[10, 20, 30], 40]
    assert device.ran == [("read-1-score", [1, 4]), ("read-1-score", [2, 0]), ("read-1-score", [3, 0])]


def test_one_that_begins_a_request_does_so_while_the_others_wait() -> None:
    def admits(run: Callable[..., Any]) -> Any:
        assert run(put(), one(5)) is None
        return run(SCORE, one(6))

    device, found = turns(2, lambda run: run(SCORE, one(1)), admits)
    assert found == [10, 60]
    assert device.ran == [("put-admit", [NOBODY, 5]), ("read-1-score", [1, 6])]


def test_a_step_between_turns_runs_at_once() -> None:
    device = FakeDevice(2)
    ranks = Ranks(device, step_sizes(), 2)  # type: ignore[arg-type]
    assert ranks.run(1, SCORE, (one(3),)) == 30
    assert device.ran == [("read-1-score", [0, 3])]


def test_all_that_take_part_hear_that_a_step_has_failed() -> None:
    device, found = turns(
        3, lambda run: run(SUMS, one(1)), lambda run: run(SUMS, one(2)), lambda run: run(SCORE, one(3))
    )
    assert sorted(map(str, found)) == ["30", "out of memory", "out of memory"]
    assert len(device.ran) == 2


@pytest.mark.parametrize("both", [True, False])
def test_all_decode_or_none(both: bool) -> None:
    """Whoever has a request to begin does that first, while the other waits."""
    device = FakeDevice(2)
    ranks = Ranks(device, step_sizes(), 2)  # type: ignore[arg-type]
    ranks.begin([0, 1])

    def turn(rank: int) -> bool:
        try:
            if rank:
                ranks.run(rank, put(), (one(4),))
            return ranks.all_decode(rank, both or rank == 0)
        finally:
            ranks.end(rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(turn, [0, 1], timeout=SECONDS)) == [both, both]
    assert device.ran == [("put-admit", [NOBODY, 4])]


def test_who_decodes_alone_does_so() -> None:
    ranks = Ranks(FakeDevice(2), step_sizes(), 2)  # type: ignore[arg-type]
    ranks.begin([1])
    assert ranks.all_decode(1, True) and not ranks.all_decode(1, False)


@pytest.mark.parametrize("seed", range(5))
def test_any_turns_end(seed: int) -> None:
    """Whatever ranks ask for, each is given its own, in its order."""
    dice = np.random.default_rng(seed)
    count = int(dice.integers(2, 6))
    keys = [put(), SCORE, LOGITS]
    wanted = [
        [(keys[dice.integers(3)], int(dice.integers(1, 90))) for _ in range(dice.integers(0, 12))] for _ in range(count)
    ]
    _, found = turns(count, *(lambda run, steps=steps: [run(key, one(n)) for key, n in steps] for steps in wanted))
    assert found == [[None if key.kind == "put" else 10 * n for key, n in steps] for steps in wanted]
