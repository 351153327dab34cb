"""Reads a stream to its end on the thread that asked, under a progress bar."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.engine.doors.sequences import failure
from jaxllm.engine.doors.streams import Stream
from jaxllm.engine.messages import TokenDelta
from jaxllm.progress import has_widgets


def drive(stream: Stream, take: Callable[[int, TokenDelta], bool], total: int, use_tqdm: bool) -> None:
    """Hand a stream's deltas to `take`, which says whether one completes its request, under a progress bar."""
    if has_widgets():
        from tqdm.auto import tqdm
    else:
        from tqdm.std import tqdm

    generated = 0
    with stream, tqdm(total=total, desc="Requests", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
        for events in stream:
            for sequence, delta in events:
                if delta.error is not None:
                    raise failure(delta)
                generated += len(delta.token_ids)
                if take(sequence, delta):
                    if generated:
                        bar.set_postfix_str(
                            f"{generated / max(bar.format_dict['elapsed'], 1e-9):,.0f} tok/s", refresh=False
                        )
                    bar.update()
