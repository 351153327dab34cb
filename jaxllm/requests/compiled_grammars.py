"""Grammars that are known to be enforceable: other processes find out, and those last used are kept."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict

from jaxllm.requests.grammar_process import GrammarProcesses
from jaxllm.requests.structured_outputs import StructuredOutputs, check_length


def compile_grammar(outputs: StructuredOutputs) -> str:
    """The constraint as llguidance's grammar text, known to be enforceable; blocks while another process finds out.

    Raises:
        InvalidRequestError: it is malformed, uses what llguidance cannot enforce, or needs more time, stack or memory
            than one grammar may have. Its pieces are the field and what is wrong with it.
    """
    kind = outputs.kind
    value = getattr(outputs, kind)
    length = sum(map(len, value)) if kind == "choice" else 0 if kind == "json_object" else len(value)
    check_length(kind, length)
    key = hashlib.sha256(json.dumps([kind, value]).encode()).digest()
    grammar = _compiled.get(key)
    if grammar is None:
        grammar = _processes.compile(kind, value)
        _compiled.put(key, grammar)
    return grammar


def end_compiling() -> None:
    """End the processes that compile grammars now: their callers' grammars are refused. A later one starts another."""
    _processes.close()


class GrammarCache:
    """The grammars last used, as many as `max_characters` hold. Any thread may use it."""

    def __init__(self, max_characters: int):
        self._left = max_characters
        self._grammars: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
            return self._grammars.get(key)

    def put(self, key: bytes, grammar: str) -> None:
        with self._lock:
            self._left += len(self._grammars.pop(key, "")) - len(grammar)
            self._grammars[key] = grammar
            while self._left < 0:
                self._left += len(self._grammars.popitem(last=False)[1])


_compiled = GrammarCache(16 * 2**20)
_processes = GrammarProcesses()
