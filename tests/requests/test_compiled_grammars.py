"""Grammars that were compiled are kept."""

from __future__ import annotations

from jaxllm.requests.structured_outputs import GrammarCache


def test_grammars_are_kept_by_their_size():
    cache = GrammarCache(10)
    cache.put(b"a", "12345")
    cache.put(b"b", "1234")
    assert cache.get(b"a") == "12345"
    cache.put(b"c", "12")  # for which the one used least recently makes room
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == ["12345", None, "12"]
    cache.put(b"d", "x" * 11)
    assert [cache.get(key) for key in (b"a", b"b", b"c", b"d")] == [None] * 4
    cache.put(b"a", "1234567890")
    assert cache.get(b"a") == "1234567890"
