"""Compiles grammars in processes of their own, which may crash, hang or run out of memory and hurt nobody.

llguidance walks chains of rules and of `$ref`s on the stack, whose overflow ends a process; GBNF and choices of odd
shapes take minutes. `python -m jaxllm.requests.grammar_process` is such a process. What it accepts has been compiled,
and asked for its first tokens, in less stack than `jaxllm.engine` gives.
"""

from __future__ import annotations

import json
import re
import sys
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from jaxllm.asked_process import AskedProcesses, Died, TimedOut, answer_questions
from jaxllm.errors import Field, InvalidRequestError
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
"""A process that nobody asks for that long ends."""

_MASK_STACK_BYTES = 2**20
"""Half of what the threads have on which llguidance fills masks."""
MAX_TOKEN_ID = 2**19 - 1
_TOKENS = re.compile(r"<\[[^]]*]>")
"""Tokens by their ids, as llguidance writes them."""


class GrammarProcesses:
    """At most MAX_PROCESSES at once, started when they are needed; whoever waits for one holds up nobody else."""

    def __init__(self, seconds: float = COMPILE_SECONDS, stack_bytes: int = COMPILE_STACK_BYTES) -> None:
        self._seconds = seconds
        self._stack_bytes = stack_bytes
        self._processes = AskedProcesses("jaxllm.requests.grammar_process", str(stack_bytes), most=MAX_PROCESSES)

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


def _answer(stack_bytes: int, asked: bytes) -> bytes:
    return json.dumps(_reply(json.loads(asked), stack_bytes)).encode()


def _reply(fields: dict[str, Any], stack_bytes: int) -> dict[str, str]:
    from jaxllm.requests.structured_outputs import StructuredOutputs, early_failure, grammar_text, new_matcher

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
