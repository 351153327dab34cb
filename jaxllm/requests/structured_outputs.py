"""What generated text must match, and how that becomes a grammar for llguidance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm.errors import Field, InvalidRequestError, one_line
from jaxllm.requests.closed_schema import closed
from jaxllm.requests.gbnf import gbnf_to_lark, is_gbnf
from jaxllm.requests.plain_schema import UnenforceableError, plain

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_GRAMMAR_LENGTH = 512 * 1024
MAX_ALTERNATIVES = 40_000
"""That may be open at one place of a text: the choices, the properties that may come next."""
MAX_ITEMS_PER_MASK = 500_000
"""Of llguidance's parser, for all tokens that may come next: ten times its default.

At most 242,000 are needed for 1,000 optional properties (Gemma's vocabulary of 262,144 tokens), and 87,000 for an anyOf
of 300 objects with five.
"""
_TOKENS_TRIED = 16
_ALLOWED = 200
"""In the bytes of LLMatcher.compute_logit_bias, one for each token."""
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
            raise InvalidRequestError(
                f"structured_outputs: {found}; it must have exactly one of {', '.join(KINDS)}",
                param="structured_outputs",
            )
        if self.choice is not None and not (self.choice and all(isinstance(c, str) and c for c in self.choice)):
            raise InvalidRequestError(
                f"choice is {list(self.choice)!r}; it must be a list of non-empty strings", param="choice"
            )

    @property
    def kind(self) -> str:
        """Which of the six it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def grammar_text(outputs: StructuredOutputs) -> str:
    """What `compiled_grammars.compile_grammar` gives, found in this process, which a hostile constraint can end.

    Raises as it does.
    """
    from llguidance import LLMatcher

    kind = outputs.kind
    try:
        grammar = _GRAMMARS[kind](outputs)
    except UnenforceableError as error:
        raise InvalidRequestError([Field(kind), f" cannot be enforced: {error}"]) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
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
    """Why a matcher has given up, on one line; "" if it has not.

    Nothing else tells: a matcher that has given up calls itself stopped, and allows the end of the answer.
    """
    problem, _, _ = matcher.get_error().partition("<backtrace>")
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


def _json_grammar(outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    schema = closed(plain(json.loads(outputs.json or "")))
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), JSON_OPTIONS)


def _json_object_grammar(outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema('{"type": "object"}', JSON_OPTIONS)


def _regex_grammar(outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(ascii_classes(outputs.regex or ""))


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


_ASCII = {r"\d": "0-9", r"\D": "^0-9", r"\w": "0-9A-Za-z_", r"\W": "^0-9A-Za-z_"}


def _choice_grammar(outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in outputs.choice or ()))


def _lark_grammar(outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    grammar = outputs.grammar or ""
    return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar) if is_gbnf(grammar) else grammar)


def _structural_tag_grammar(outputs: StructuredOutputs) -> str:
    """Free text with tags in it; see llguidance's StructTag."""
    from llguidance import LLMatcher, StructTag

    tag = json.loads(outputs.structural_tag or "")
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
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


_GRAMMARS = {
    "json": _json_grammar, "json_object": _json_object_grammar, "regex": _regex_grammar, "choice": _choice_grammar,
    "grammar": _lark_grammar, "structural_tag": _structural_tag_grammar,
}  # fmt: skip
