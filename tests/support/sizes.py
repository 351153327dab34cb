"""The sizes of the engines that tests start of tiny models.

Engines of the same model and sizes share their compiled steps, whichever test starts them (see
`tests.support.remembered_steps`), and compiling steps is most of what the tests do. So a test says its own sizes only
where it is about them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.start import build

PAGE = 8
"""Tokens."""
FIELDS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 8,
    "max_num_batched_tokens": 32, "kv_cache_memory": "16MiB", "block_size": PAGE,
    "decode_buckets": (), "prefill_buckets": (),
}  # fmt: skip
"""One bucket of each phase, of the largest size: a test that is about padding asks for more."""


@contextmanager
def few_pages(count: int) -> Iterator[None]:
    """Engines that start here hand out at most `count - 1` pages. Their caches have room for more, so that their steps
    are those of engines with all pages.
    """

    def pool(num_pages: int, page_size: int, shares: bool) -> PagePool:
        return PagePool(min(count, num_pages), page_size, shares)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "PagePool", pool)
        yield
