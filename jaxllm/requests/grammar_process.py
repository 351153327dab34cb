"""Compiles grammars in processes of their own, which may crash, hang or run out of memory and hurt nobody.

llguidance walks chains of rules and of `$ref`s on the stack, whose overflow ends a process; GBNF and choices of odd
shapes take minutes. `python -m jaxllm.requests.grammar_process` is such a process: one JSON object a line in, one a
line out. What it accepts has been compiled, and asked for its first tokens, in less stack than `jaxllm.engine` gives.
"""

from __future__ import annotations

import json
import re
import select
import signal
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxllm.errors import Field, InvalidRequestError, one_line
from jaxllm.line_process import Process, ask, end, limit_memory, start
from jaxllm.threads import call_with_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_SECONDS = 10
"""How long one grammar may take."""
COMPILE_STACK_BYTES = 128 * 2**20
COMPILE_MEMORY_BYTES = 2**30
"""Beside the stack."""
MAX_PROCESSES = 4
IDLE_SECONDS = 300
"""A process that nobody asks for so long ends."""

_MASK_STACK_BYTES = 2**20
"""Half of what the threads have on which llguidance fills masks."""
_BYTES_FOLLOWED = 16
MAX_TOKEN_ID = 2**19 - 1
_TOKENS = re.compile(r"<\[[^]]*]>")
"""Tokens by their ids, as llguidance writes them."""


class GrammarProcesses:
    """At most MAX_PROCESSES at once, started when they are needed; whoever waits for one holds up nobody else."""

    def __init__(self, seconds: int = COMPILE_SECONDS, stack_bytes: int = COMPILE_STACK_BYTES) -> None:
        self._seconds = seconds
        self._stack_bytes = stack_bytes
        self._idle: list[Process] = []
        self._asked_now: set[Process] = set()
        self._free = threading.Semaphore(MAX_PROCESSES)

    def compile(self, kind: str, value: Any) -> str:
        """The grammar text of `StructuredOutputs(**{kind: value})`. Blocks; any thread may call it.

        Raises InvalidRequestError when it is refused, or needs more time, stack or memory than it may have.
        """
        line = json.dumps({kind: value}).encode() + b"\n"
        with self._free:
            reply, status = self._asked(line)
            while status == 0:  # it had just ended, for having been idle
                reply, status = self._asked(line)
        if status == -signal.SIGALRM:
            raise InvalidRequestError([Field(kind), f" takes more than {self._seconds} seconds to compile"])
        if status is not None and status < 0:
            problem = (
                " is nested too deeply, or a chain of too many rules or $refs: to compile it takes more than "
                f"{self._stack_bytes:,} bytes of stack or {COMPILE_MEMORY_BYTES:,} of memory"
            )
            raise InvalidRequestError([Field(kind), problem])
        if status is not None:
            raise RuntimeError(f"the process that compiles grammars ended with status {status}")
        if "error" in reply:
            raise InvalidRequestError([Field(kind), reply["error"]])
        return reply["grammar"]

    def close(self) -> None:
        """End the processes; what they compile now is refused, and a later `compile` starts another."""
        for process in list(self._asked_now):
            process.kill()
        while self._idle:
            end(self._idle.pop())

    def _asked(self, line: bytes) -> tuple[dict[str, Any], int | None]:
        """A process's reply, and the exit status of one that died instead."""
        process = self._idle.pop() if self._idle else self._started()
        self._asked_now.add(process)
        reply = None
        try:
            reply = ask(process, line)
        finally:
            self._asked_now.discard(process)
            if reply is not None:
                self._idle.append(process)
            else:
                status = end(process, kill=sys.exc_info()[0] is not None)
        return (reply, None) if reply is not None else ({}, status)

    def _started(self) -> Process:
        return start("jaxllm.requests.grammar_process", str(self._seconds), str(self._stack_bytes))


def main(seconds: int, stack_bytes: int) -> None:
    """Compile what stdin asks for until it closes, or nothing comes for long."""
    limit_memory(COMPILE_MEMORY_BYTES + stack_bytes)
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0] and (line := sys.stdin.buffer.readline()):
        signal.alarm(seconds)  # which ends this process, whatever code it is in then
        reply = _reply(json.loads(line), stack_bytes)
        signal.alarm(0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _reply(fields: dict[str, Any], stack_bytes: int) -> dict[str, str]:
    from jaxllm.requests.structured_outputs import StructuredOutputs, grammar_text, new_matcher

    outputs = StructuredOutputs(**fields)
    try:
        grammar = call_with_stack("compile", stack_bytes, lambda: grammar_text(outputs))
    except InvalidRequestError as error:
        return {"error": str(error.pieces[1])}
    ids = [int(token_id) for token in _TOKENS.findall(grammar) for token_id in re.findall("[0-9]{1,9}", token)]
    vocabulary = _vocabulary(min(max(ids, default=0), MAX_TOKEN_ID).bit_length())
    matcher = call_with_stack("build", stack_bytes, lambda: new_matcher(vocabulary, grammar))
    call_with_stack("follow", _MASK_STACK_BYTES, lambda: _follow(matcher))
    if matcher.is_error():
        problem, _, _ = matcher.get_error().partition("<backtrace>")
        return {"error": f" cannot be enforced: {one_line(problem)}"}
    return {"grammar": grammar}


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


def _follow(matcher: LLMatcher) -> None:
    """Take the first of the bytes allowed, a few times, as an engine will take tokens."""
    for _ in range(_BYTES_FOLLOWED):
        if matcher.is_stopped():  # as one is that has failed
            return
        allowed = matcher.compute_logit_bias()
        matcher.consume_token(next(token for token, bias in enumerate(allowed) if bias))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
