"""Grammars that are known to be enforceable: processes of their own find out, and those last used are kept.

llguidance walks chains of rules and of `$ref`s on the stack, whose overflow ends a process; GBNF and choices of odd
shapes take minutes. `python -m jaxllm.requests.compiled_grammars` is such a process, which may crash, hang or run out
of memory and harm nothing else. What it accepts has been compiled, and asked for its first tokens, in less stack than
`jaxllm.engine` gives.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections import OrderedDict
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.own_process import AskedProcesses, Died, TimedOut, answer_questions
from jaxllm.requests.structured_outputs import (
    StructuredOutputs,
    check_length,
    early_failure,
    grammar_text,
    new_matcher,
)
from jaxllm.threads import call_with_stack

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILE_SECONDS = 10.0
"""Of processor time that one grammar may take, the start of its process included."""
COMPILE_STACK_BYTES = 128 * 2**20
COMPILE_MEMORY_BYTES = 2**30
"""Beside the stack."""
MAX_PROCESSES = 4
IDLE_SECONDS = 300
"""A process that is asked nothing for that long ends."""

_MASK_STACK_BYTES = 2**20
"""Half of what the threads have on which llguidance fills masks."""
MAX_TOKEN_ID = 2**19 - 1
_TOKENS = re.compile(r"<\[[^]]*]>")
"""Tokens by their ids, as llguidance writes them."""


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


class GrammarProcesses:
    """At most MAX_PROCESSES at once, started when they are needed; waiting for one does not hold up the others."""

    def __init__(self, seconds: float = COMPILE_SECONDS, stack_bytes: int = COMPILE_STACK_BYTES) -> None:
        self._seconds = seconds
        self._stack_bytes = stack_bytes
        self._processes = AskedProcesses("jaxllm.requests.compiled_grammars", str(stack_bytes), most=MAX_PROCESSES)

    def compile(self, kind: str, value: Any) -> str:
        """The grammar text of `StructuredOutputs(**{kind: value})`. Blocks; any thread may call it.

        Raises InvalidRequestError when it is refused, or needs more time, stack or memory than it may have.
        """
        try:
            question = json.dumps({kind: value}).encode()
            reply = json.loads(self._processes.ask(question, processor_seconds=self._seconds))
        except TimedOut:
            problem = f" takes more than {self._seconds:g} seconds of processor time to compile"
            raise InvalidRequestError([Field(kind), problem]) from None
        except Died:
            problem = (
                " is nested too deeply, or a chain of too many rules or $refs: to compile it takes more than "
                f"{self._stack_bytes:,} bytes of stack or {COMPILE_MEMORY_BYTES:,} of memory"
            )
            raise InvalidRequestError([Field(kind), problem]) from None
        if "error" in reply:
            raise InvalidRequestError([Field(kind), reply["error"]])
        return reply["grammar"]

    def close(self) -> None:
        """End the processes; what they compile now is refused, and a later `compile` starts another."""
        self._processes.close()


_compiled = GrammarCache(16 * 2**20)
_processes = GrammarProcesses()


def _answer(stack_bytes: int, asked: bytes) -> bytes:
    return json.dumps(_reply(json.loads(asked), stack_bytes)).encode()


def _reply(fields: dict[str, Any], stack_bytes: int) -> dict[str, str]:
    outputs = StructuredOutputs(**fields)
    try:
        grammar = call_with_stack("compile", stack_bytes, lambda: grammar_text(outputs))
    except InvalidRequestError as error:
        return {"error": str(error.pieces[1])}
    ids = [int(token_id) for token in _TOKENS.findall(grammar) for token_id in re.findall("[0-9]{1,9}", token)]
    vocabulary = _vocabulary(min(max(ids, default=0), MAX_TOKEN_ID).bit_length())
    matcher = call_with_stack("build", stack_bytes, lambda: new_matcher(vocabulary, grammar))
    problem = call_with_stack("follow", _MASK_STACK_BYTES, lambda: early_failure(matcher))
    return {"error": f" cannot be enforced: {problem}"} if problem else {"grammar": grammar}


@lru_cache(maxsize=1)
def _vocabulary(bits: int) -> LLTokenizer:
    """A token for each byte, and ids up to 2**bits that mean nothing but themselves."""
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    eos = len(letters)
    return LLTokenizer(backend.to_str(), n_vocab=max(eos + 1, 2**bits), eos_token=eos)


if __name__ == "__main__":
    stack = int(sys.argv[1])
    answer_questions(partial(_answer, stack), COMPILE_MEMORY_BYTES + stack, idle_seconds=IDLE_SECONDS)
