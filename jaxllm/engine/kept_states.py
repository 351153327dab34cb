"""Which states a step keeps for other requests to go on from, and how they become findable."""

from __future__ import annotations

from jaxllm.engine.offload.cache_rows import CacheRow
from jaxllm.engine.prefix_search import FoundPrefix
from jaxllm.engine.request import Request
from jaxllm.engine.state_cache import StateCache
from jaxllm.engine.work import Batch, Chunk


def begin_from(request: Request, found: FoundPrefix, batch: Batch, states: StateCache, page_size: int) -> None:
    """Where the request's first chunk finds the state of the prefix that it begins with.

    One that comes back from the host takes a row where others find it as well; where there is none, its slot's.
    """
    request.state_row = found.state_row
    if found.state is None:
        return
    row = request.state_row = states.reserve()
    batch.returning.append((CacheRow("state", row or request.slot), found.state))
    if row:
        request.reserved_states.add(row, request.num_computed)
        if not found.returning:  # its pages are findable already
            keep_state(request, request.num_computed, states)


def place_states(chunk: Chunk, further: int, batch: Batch, states: StateCache, page_size: int) -> None:
    """Where the chunk's state comes from, and that it is kept at the last full page, if it reaches another one.

    A prompt that comes again needs its last token's logits, so that of its pages the ones before it count. Where drafts
    are in flight, only the device knows which page that is.
    """
    request = chunk.request
    chunk.state_read, request.state_row = request.state_row, 0
    end = chunk.start + chunk.length + further
    longest = end if chunk.length == 1 else min(end, request.num_total - 1)
    kept_tokens, unsettled = longest // page_size * page_size, request.num_unsettled
    row = states.reserve() if kept_tokens > chunk.start - unsettled else 0
    if not row:
        return
    chunk.state_kept, chunk.kept_tokens = row, kept_tokens
    tried = further if batch.most_drafts else 0
    if tried or unsettled:
        request.reserved_states.add_uncertain(row, chunk.start, tried, unsettled, page_size)
    else:
        request.reserved_states.add(row, kept_tokens)


def settle_states(request: Request, num_tried: int, num_taken: int, states: StateCache, page_size: int) -> None:
    """The step that ran the last known token of a request has taken so many of the drafts that it tried."""
    begin = len(request.token_ids) - 1
    for row in request.reserved_states.settle(begin, num_tried, num_taken, page_size):
        states.release(row)


def keep_state(request: Request, num_tokens: int, states: StateCache) -> None:
    """The host knows the request's first `num_tokens` tokens, whose pages are full: others find a state there.

    Of an answer only the last one is kept.
    """
    row = request.reserved_states.take(num_tokens)
    if row and states.keep(request.prefix_node, row) and num_tokens > request.num_prompt:
        states.discard(request.answer_node)
        request.answer_node = request.prefix_node


def release_states(request: Request, states: StateCache) -> None:
    """The request stops running: of what its steps were to keep nothing will be found."""
    for row in request.reserved_states.rows:
        states.release(row)
    request.reserved_states.clear()
