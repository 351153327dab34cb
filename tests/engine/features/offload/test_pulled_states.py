"""A state between two servers comes before the pages that are of no use without it, and has another length."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.engine.features.offload import page_listener
from jaxllm.engine.features.offload.page_listener import SomePages
from jaxllm.sharding.wire import frame
from tests.engine.features.offload.test_pulls import (
    NAMES,
    SIZE,
    STATE_SIZE,
    at,
    giving,
    name,
    page,
    pulling,
    strange,
    with_proof,
)

STATE = name(100)
WHOLE = np.random.default_rng(100).integers(0, 256, STATE_SIZE, np.uint8)
PAGES = {digest: page(number) for number, digest in enumerate(NAMES)}
WANTED = [STATE, *NAMES]


@pytest.mark.parametrize("part", [1, 3 * SIZE, 10**6])
def test_both_arrive_as_they_were(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_listener, "PART_BYTES", part)
    with giving(PAGES | {STATE: WHOLE}) as listener, pulling() as pulls:
        pulls.begin(at(listener.port), WANTED, STATE).run()
        np.testing.assert_array_equal(pulls.host.get(STATE), WHOLE)
        np.testing.assert_array_equal([pulls.host.get(digest) for digest in NAMES], list(PAGES.values()))
        assert (pulls.num_failed, pulls.num_pages, listener.num_given) == (0, 9, 9)


def test_no_page_is_sent_where_the_state_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with giving(PAGES) as listener, pulling() as pulls:
        pulls.begin(at(listener.port), WANTED, STATE).run()
        assert (pulls.num_failed, len(pulls.host), listener.num_given) == (
            1,
            0,
            0,
        ) and "it has 0 of the 9" in caplog.text


def test_nothing_is_asked_for_where_not_all_of_it_has_room(caplog: pytest.LogCaptureFixture) -> None:
    with giving(PAGES | {STATE: WHOLE}) as listener, pulling(budget=STATE_SIZE + 7 * SIZE) as pulls:
        pulls.begin(at(listener.port), WANTED, STATE).run()
        pulls.begin(at(listener.port), WANTED[1:], STATE).run()
        assert (pulls.num_failed, listener.num_given) == (1, 8), "without the state, which is here, there is room"
        assert "has room for 8 of its 9 pages" in caplog.text


@pytest.mark.parametrize(
    "sent", [np.stack([page(0)]), np.stack([WHOLE, WHOLE]), WHOLE[None, :-1]], ids=["a page", "two states", "cut"]
)
def test_what_is_no_state_is_refused_in_its_place(sent: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    answer = with_proof(lambda connection: connection.sendall(frame(SomePages(), [sent])))
    with strange(answer) as port, pulling() as pulls:
        pulls.begin(at(port), WANTED, STATE).run()
        assert (pulls.num_failed, len(pulls.host)) == (1, 0) and "no pages of this model" in caplog.text
