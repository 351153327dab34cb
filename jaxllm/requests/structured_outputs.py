"""The text that a request asks for, as a grammar of llguidance's that is known to be enforceable.

Processes of their own find out: llguidance walks chains of rules and `$ref`s on the stack, whose overflow ends a
process; GBNF and choices of odd shapes take minutes. `python -m jaxllm.requests.structured_outputs` is such a process.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxllm.errors import Field, InvalidRequestError, one_line
from jaxllm.own_process import AskedProcesses, Died, TimedOut, answer_questions
from jaxllm.requests.closed_schema import closed
from jaxllm.requests.gbnf import gbnf_to_lark, is_gbnf
from jaxllm.requests.schema import UnenforceableError, plain
from jaxllm.threads import call_with_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_GRAMMAR_LENGTH = 512 * 1024
MAX_ALTERNATIVES = 40_000
"""That may be open at one place of a text: the choices, the properties that may come next."""
MAX_ITEMS_PER_MASK = 500_000
"""Of llguidance's parser, for all tokens that may come next: ten times its default, twice what was ever needed."""
MAX_DEPTH = 127
"""Of JSON within JSON, in llguidance."""
_TOKENS_TRIED = 16
_ALLOWED = 200
"""In the bytes of LLMatcher.compute_logit_bias, one for each token."""
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

JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n {0,32}|\n\t{0,8})?"}
"""Between the tokens of JSON: nothing, a space, or a new line and its indentation. More would let a model never end."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the generated text; exactly one of the first six is set.

    Attributes:
        json: a JSON schema, as a dict, a boolean or JSON text.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches; \\d and \\w are those of ASCII.
        choice: the text is one of these strings.
        grammar: a context-free grammar, in llguidance's Lark dialect (`start: …`) or in GBNF (`root ::= …`).
        structural_tag: {"structures": [{"begin", "schema", "end"}, …], "triggers": [...]}, as a dict or JSON text: free
            text in which each trigger begins one of the structures.
        after: the constraint begins behind this text, such as a reasoning block's end; anything may come before it but
            the answer's end. None constrains from the first token.
        openings: with `after`, texts such as a reasoning block's beginning: an answer that does not begin with one is
            constrained from its first token. Without any the constraint waits for `after` in any case.

    Raises:
        InvalidRequestError: none or several are set, or one is malformed; `param` names it.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    after: str | None = None
    openings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen; normalising happens once, here
        if self.choice is not None:
            set_field(self, "choice", tuple(self.choice))
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                try:
                    set_field(self, name, json.dumps(value))
                except (TypeError, ValueError, RecursionError) as error:
                    raise InvalidRequestError(f"{name} is no JSON value: {one_line(error)}", param=name) from None
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are set" if given else "nothing is set"
            problem = f"structured_outputs: {found}; it must have exactly one of {', '.join(KINDS)}"
            raise InvalidRequestError(problem, param="structured_outputs")
        if self.choice is not None and not (self.choice and all(isinstance(c, str) and c for c in self.choice)):
            problem = f"choice is {list(self.choice)!r}; it must be a list of non-empty strings"
            raise InvalidRequestError(problem, param="choice")

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def grammar_text(outputs: StructuredOutputs) -> str:
    """The grammar that `compile_grammar` gives, found in this process, which a hostile constraint can end."""
    from llguidance import LLMatcher

    kind = outputs.kind
    try:
        grammar = _grammar(outputs)
    except UnenforceableError as error:
        raise InvalidRequestError([Field(kind), f" cannot be enforced: {error}"]) from None
    except KeyError as error:
        raise InvalidRequestError([Field(kind), f" is malformed: {error.args[0]} is missing"]) from None
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, RecursionError) or "recursion limit" in str(error):
            raise InvalidRequestError([Field(kind), f" is nested more than {MAX_DEPTH} deep"]) from None
        raise InvalidRequestError([Field(kind), f" is malformed: {one_line(error)}"]) from None
    check_length(kind, len(grammar))
    problem = LLMatcher.validate_grammar(grammar)
    if problem:
        raise InvalidRequestError([Field(kind), f" cannot be enforced: {one_line(problem)}"])
    return grammar


def new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """What follows tokens through a compiled grammar. It may come with an error: see `failure`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=MAX_ALTERNATIVES, step_max_items=MAX_ITEMS_PER_MASK, verbose_errors=False)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def failure(matcher: LLMatcher) -> str:
    """Why a matcher has given up, on one line; "" if it has not. A matcher that has given up calls itself stopped."""
    problem, _, _ = matcher.get_error().partition("<backtrace>")
    if "NoExtensionBias" in problem:
        return "it accepts no text, or none that begins like this: its rules, or its $ref, lead only to each other"
    if "ff_tokens" in problem:  # what they force was followed up to the limit
        return "it accepts no text that ends: one of its rules always leads to itself again"
    return one_line(problem.replace("<non-verbose/>", ""))


def early_failure(matcher: LLMatcher) -> str:
    """The `failure` of a new matcher at one of the first tokens that it allows; without one it begins anew."""
    for _ in range(_TOKENS_TRIED):
        allowed = matcher.compute_logit_bias()
        if matcher.is_stopped():
            break
        matcher.consume_token(allowed.index(_ALLOWED))
    problem = failure(matcher)
    matcher.reset()
    return problem


def check_length(kind: str, length: int) -> None:
    """Raises InvalidRequestError if a constraint, or the grammar that it makes, is longer than a grammar may be."""
    if length > MAX_GRAMMAR_LENGTH:
        problem = f" makes a grammar of {length} characters; it may have {MAX_GRAMMAR_LENGTH}"
        raise InvalidRequestError([Field(kind), problem])


def _grammar(outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    match outputs.kind:
        case "json":
            schema = closed(plain(json.loads(outputs.json or "")))
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), JSON_OPTIONS)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(ascii_classes(outputs.regex or ""))
        case "choice":
            lark = "start: " + " | ".join(map(json.dumps, outputs.choice or ()))
        case "grammar":
            grammar = outputs.grammar or ""
            lark = gbnf_to_lark(grammar) if is_gbnf(grammar) else grammar
        case _:
            lark = _tag_grammar(json.loads(outputs.structural_tag or ""))
    return LLMatcher.grammar_from_lark(lark)


def _tag_grammar(tag: Any) -> str:
    from llguidance import StructTag

    structures, triggers = tag["structures"], tag["triggers"]
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"triggers is {triggers!r}; it must be a list of non-empty strings")
    tags = []
    for structure in structures:
        begin = structure["begin"]
        if not isinstance(begin, str) or not isinstance(structure["end"], str):
            raise ValueError("begin and end of a structure must be strings")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"the structure that begins with {begin!r} begins with none of the triggers {triggers!r}")
        schema = closed(plain(structure["schema"]))
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    if not tags:
        raise ValueError("structures is empty")
    return StructTag.to_grammar(tags, assume_special=False)


_ASCII = {r"\d": "0-9", r"\D": "^0-9", r"\w": "0-9A-Za-z_", r"\W": "^0-9A-Za-z_"}


def ascii_classes(regex: str) -> str:
    r"""\d and \w as JSON schemas and most users mean them: of ASCII. llguidance would take every script's digits.

    Worked example: `ascii_classes(r"\d+[\w.]")` is `[0-9]+[0-9A-Za-z_.]`.
    """
    out, in_class, at = [], False, 0
    while at < len(regex):
        piece = regex[at : at + 2] if regex[at] == "\\" else regex[at]
        if piece in _ASCII:
            inner = _ASCII[piece]
            out.append(inner if in_class and not inner.startswith("^") else f"[{inner}]")
        else:
            out.append(piece)
            in_class = piece == "[" or (in_class and piece != "]")
        at += len(piece)
    return "".join(out)


def compile_grammar(outputs: StructuredOutputs) -> str:
    """The constraint as llguidance's grammar text, known to be enforceable; blocks while another process finds out.

    Raises InvalidRequestError, of the field and the problem: it is malformed, cannot be enforced, or needs too much.
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


class GrammarProcesses(AskedProcesses):
    """At most MAX_PROCESSES at once, started when they are needed; waiting for one does not hold up the others."""

    def __init__(self, seconds: float = COMPILE_SECONDS, stack_bytes: int = COMPILE_STACK_BYTES) -> None:
        super().__init__("jaxllm.requests.structured_outputs", str(stack_bytes), most=MAX_PROCESSES)
        self._seconds, self._stack_bytes = seconds, stack_bytes

    def compile(self, kind: str, value: Any) -> str:
        """The grammar text of `StructuredOutputs(**{kind: value})`, or InvalidRequestError. Any thread may call it."""
        try:
            question = json.dumps({kind: value}).encode()
            reply = json.loads(self.ask(question, processor_seconds=self._seconds))
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


_compiled = GrammarCache(16 * 2**20)
_processes = GrammarProcesses()


def _reply(outputs: StructuredOutputs, stack_bytes: int) -> dict[str, str]:
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

    def answer(asked: bytes) -> bytes:
        return json.dumps(_reply(StructuredOutputs(**json.loads(asked)), stack)).encode()

    answer_questions(answer, COMPILE_MEMORY_BYTES + stack, idle_seconds=IDLE_SECONDS)
