"""Grammars for calls, in real llguidance: what they allow parses back, and what is no such call they mask."""

from __future__ import annotations

import json
from dataclasses import dataclass

import jsonschema
import numpy as np
import pytest
import tokenizers

from jaxllm.chat.constraint import tool_constraint
from jaxllm.chat.conversation import NamedTool, Tool, ToolChoice
from jaxllm.chat.events import OutputFormats, ParsedOutput, Tags, ToolFormat
from jaxllm.chat.formats import TOOL_FORMATS, detect_formats
from jaxllm.chat.parser import OutputParser
from jaxllm.chat.prompt import grammar_tokens
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.structured_outputs import StructuredOutputs, compile_grammar
from jaxllm.text.reasoning import REASONING_FORMATS
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.weights.source import resolve_model
from tests.serving.parsing.splitting import TOOLS, WEATHER, parse_whole, seen, tool, written

llguidance = pytest.importorskip("llguidance")

ENDINGS = [
    "<|end|><|start|>assistant", "<|end|><|begin|>assistant", "<|tool_arg:end|>", "<|eom|><|start|>assistant",
    "</atem:parameter>",
    "]<]minimax[>[</city>", "</｜DSML｜ parameter>", "<|close|>argument<|sep|>",
    '"}', '"', ")]", "</parameter>", "</｜DSML｜parameter>", "\n</parameter>\n</function>", "</arg_value></tool_call>",
    '<|"|>}', "<escape>}", "}",
]  # fmt: skip
PARIS = ("get_weather", {"city": "Paris", "days": 2})
STRICT = [tool("get_weather", WEATHER, strict=True), tool("get_time")]


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llguidance sees it, and its special tokens."""

    backend: tokenizers.Tokenizer | None
    masks: llguidance.LLTokenizer
    special: dict[str, int]

    def encode(self, text: str) -> list[int]:
        if self.backend is None:
            return list(text.encode())
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        if self.backend is None:
            return bytes(ids).decode(errors="replace")
        return self.backend.decode(ids, skip_special_tokens=False)


def _vocabulary(backend: tokenizers.Tokenizer) -> Vocabulary:
    masks = llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=0)
    return Vocabulary(backend, masks, grammar_tokens(backend))


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Vocabulary]:
    """Bytes, SmolLM2's tokens, and those with every format's markers as special tokens."""
    smollm2 = load_tokenizer(resolve_model("smollm2-135m")).backend
    marked = tokenizers.Tokenizer.from_str(smollm2.to_str())
    marked.add_special_tokens(
        sorted({marker for known in TOOL_FORMATS for marker in known.markers} | {"<think>", "</think>"})
    )
    byte = Vocabulary(None, llguidance.LLTokenizer("byte"), {})
    return {"byte": byte, "smollm2": _vocabulary(smollm2), "marked": _vocabulary(marked)}


def _formats(known: ToolFormat) -> OutputFormats:
    own = next((other for other in REASONING_FORMATS if known.thought and other.name == known.name), None)
    return OutputFormats(known, own or detect_formats("<think>").reasoning)


def _matcher(vocabulary: Vocabulary, outputs: StructuredOutputs | None) -> llguidance.LLMatcher:
    assert outputs is not None
    matcher = llguidance.LLMatcher(vocabulary.masks, compile_grammar(outputs))
    assert matcher.get_error() == ""
    return matcher


def _accepts(vocabulary: Vocabulary, outputs: StructuredOutputs | None, text: str) -> bool:
    matcher = _matcher(vocabulary, outputs)
    ids = vocabulary.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _parsed(known: ToolFormat, text: str, tools: list[Tool]) -> ParsedOutput:
    return parse_whole(OutputParser(_formats(known), tools=tools, in_reasoning=False), text)


each_format = pytest.mark.parametrize("known", TOOL_FORMATS, ids=lambda known: known.name)
each_vocabulary = pytest.mark.parametrize("words", ["byte", "smollm2", "marked"])


@each_format
@each_vocabulary
def test_required_calls(known: ToolFormat, words: str, vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies[words]

    def constraint(choice: ToolChoice, parallel: bool) -> StructuredOutputs | None:
        return tool_constraint(
            _formats(known), TOOLS, choice, parallel=parallel, after=None, special_tokens=vocabulary.special
        )

    one, two = written(known, PARIS), written(known, PARIS, ("get_time", {}))
    assert _accepts(vocabulary, constraint("required", False), one)
    assert _accepts(vocabulary, constraint("required", True), one)
    assert _accepts(vocabulary, constraint("required", True), two)
    assert _accepts(vocabulary, constraint(NamedTool("get_weather"), False), one)
    assert _accepts(vocabulary, constraint(NamedTool("get_weather"), True), one)
    assert not _accepts(vocabulary, constraint(NamedTool("get_weather"), True), written(known, PARIS, PARIS))
    assert not _accepts(vocabulary, constraint("required", False), two)
    assert not _accepts(vocabulary, constraint(NamedTool("get_time"), False), one)
    assert not _accepts(vocabulary, constraint("required", True), "It is sunny in Paris.")
    assert not _accepts(vocabulary, constraint("required", True), written(known, ("get_news", {})))
    assert not _accepts(vocabulary, constraint("required", True), written(known, ("get_weather", {"days": 2})))
    assert not _accepts(vocabulary, constraint("required", True), written(known, ("get_time", {"zone": 1})))
    calls = [(name, json.loads(arguments)) for name, arguments in seen(_parsed(known, two, TOOLS))[2]]
    assert calls == [PARIS, ("get_time", {})]


@each_format
@each_vocabulary
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_whatever_is_allowed_parses_back(
    known: ToolFormat, words: str, choice: str, vocabularies: dict[str, Vocabulary]
) -> None:
    vocabulary = vocabularies[words]
    finished = 0
    for parallel in (False, True):
        outputs = tool_constraint(
            _formats(known), STRICT, choice, parallel=parallel, after=None, special_tokens=vocabulary.special
        )
        if outputs is None:
            assert choice == "auto" and not known.mark
            return
        for seed in range(3):
            text = _random_answer(vocabulary, outputs, seed)
            if text is None:
                continue
            finished += 1
            content, _, calls = seen(_parsed(known, text, STRICT))
            if choice == "required":
                assert content is None and calls and (parallel or len(calls) == 1)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), WEATHER if name == "get_weather" else {"type": "object"})
    assert finished


def _random_answer(vocabulary: Vocabulary, outputs: StructuredOutputs, seed: int) -> str | None:
    """Tokens drawn from the masks, and now and then what ends a free text; None if they come to no end."""
    matcher = _matcher(vocabulary, outputs)
    randomly = np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < 600 and not matcher.is_stopped():
        if matcher.is_accepting() and randomly.random() < 0.3:
            return vocabulary.decode(ids)
        if randomly.random() < 0.2:
            ending = vocabulary.encode(str(randomly.choice(ENDINGS)))
            ids += ending[: matcher.try_consume_tokens(ending)]
            continue
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = allowed[: vocabulary.masks.vocab_size].nonzero()[0]
        assert matcher.get_error() == ""
        allowed = allowed[allowed != vocabulary.masks.eos_token]
        if not len(allowed):
            break
        some = randomly.choice(allowed, 20)
        closing = [token for token in some if vocabulary.masks.decode_bytes([int(token)])[:1] in b'"}]<\n{:c']
        ids.append(int(randomly.choice(closing if closing and randomly.random() < 0.7 else some)))
        matcher.consume_token(ids[-1])
    return vocabulary.decode(ids) if matcher.is_accepting() else None


@each_vocabulary
def test_auto_leaves_text_free_and_holds_calls_to_the_schema(words: str, vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies[words]
    for known in TOOL_FORMATS:
        if not known.mark:
            continue
        outputs = tool_constraint(
            _formats(known), STRICT, "auto", parallel=True, after=None, special_tokens=vocabulary.special
        )
        assert _accepts(vocabulary, outputs, "It is sunny.\nIs it <not>?")
        reasoning = _formats(known).reasoning
        assert reasoning is not None
        thought = f"{reasoning.open}Hm.{reasoning.close}"
        assert _accepts(vocabulary, outputs, f"{thought}Let me see. {written(known, PARIS)}")
        assert not _accepts(vocabulary, outputs, "Let me see. " + written(known, ("get_weather", {"days": 2})))
        assert not _accepts(vocabulary, outputs, written(known, ("get_news", {})))


def test_auto_allows_marks_of_reasoning_that_are_made_of_several_tokens(vocabularies: dict[str, Vocabulary]) -> None:
    formats = detect_formats(None, "kimi_k3", "kimi_k3")
    assert formats.tools is not None
    prose = "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
    vocabulary = vocabularies["marked"]
    outputs = tool_constraint(formats, STRICT, "auto", parallel=True, after=None, special_tokens=vocabulary.special)
    assert _accepts(vocabulary, outputs, prose)
    assert _accepts(vocabulary, outputs, prose + written(formats.tools, PARIS))
    assert not _accepts(vocabulary, outputs, prose + written(formats.tools, ("get_weather", {"days": 2})))


def test_calls_whose_beginning_is_marked_are_held_to_strict_schemas() -> None:
    unmarked = {known.name for known in TOOL_FORMATS if not known.mark}
    assert unmarked == {"harmony", "muse", "functionary_v32", "llama3_json", "llama4_pythonic", "glm4", "json"}


def test_auto_is_free_where_nothing_is_strict() -> None:
    formats = detect_formats(None, "hermes")
    assert tool_constraint(formats, TOOLS, "auto", parallel=True, after=None, special_tokens={}) is None
    nothing = detect_formats(None, "none")
    assert tool_constraint(nothing, STRICT, "required", parallel=True, after=None, special_tokens={}) is None


@pytest.mark.parametrize("known", [known for known in TOOL_FORMATS if known.thought], ids=lambda known: known.name)
@each_vocabulary
def test_calls_come_after_the_thought_that_the_prompt_has_opened(
    known: ToolFormat, words: str, vocabularies: dict[str, Vocabulary]
) -> None:
    assert known.thought is not None
    text = f"Hm.{known.thought[1]}{written(known, PARIS)}"
    for opened in (True, False):
        outputs = tool_constraint(
            _formats(known), TOOLS, "required", parallel=False, after=None,
            special_tokens=vocabularies[words].special, in_reasoning=opened,
        )  # fmt: skip
        assert _accepts(vocabularies[words], outputs, text) is opened
        assert _accepts(vocabularies[words], outputs, written(known, PARIS)) is not opened
    parser = OutputParser(_formats(known), tools=TOOLS, in_reasoning=True)
    content, thought, calls = seen(parse_whole(parser, text))
    assert (content, thought, [json.loads(arguments) for _, arguments in calls]) == (None, "Hm.", [PARIS[1]])


def test_after_reasoning_whitespace_may_come_first(vocabularies: dict[str, Vocabulary]) -> None:
    formats = detect_formats(None, "hermes", "think")
    known = formats.tools
    assert known is not None
    for after, accepted in (("</think>", True), (None, False)):
        outputs = tool_constraint(formats, TOOLS, "required", parallel=False, after=after, special_tokens={})
        assert outputs is not None and outputs.after == after
        assert _accepts(vocabularies["byte"], outputs, "\n\n" + written(known, PARIS)) is accepted


def test_definitions_are_found_and_lenient_schemas_are_not_refused(vocabularies: dict[str, Vocabulary]) -> None:
    parameters = {
        "$defs": {"day": {"enum": ["mon", "tue"]}},
        "properties": {"days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "uniqueItems": True}},
        "required": ["days"],
    }
    for name in ("hermes", "qwen3_coder"):
        formats = detect_formats(None, name)
        assert formats.tools is not None
        outputs = tool_constraint(
            formats, [tool("plan", parameters)], NamedTool("plan"), parallel=False, after=None, special_tokens={}
        )
        good, bad = (written(formats.tools, ("plan", {"days": [day]})).replace("'", '"') for day in ("tue", "sun"))
        assert _accepts(vocabularies["byte"], outputs, good)
        assert not _accepts(vocabularies["byte"], outputs, bad)


def test_a_value_that_ends_its_own_tag_is_masked(vocabularies: dict[str, Vocabulary]) -> None:
    formats = detect_formats(None, "qwen3_coder")
    assert formats.tools is not None
    outputs = tool_constraint(formats, TOOLS, NamedTool("get_weather"), parallel=False, after=None, special_tokens={})
    for city, accepted in (("<b>\nx", True), ("x\n</function>y", False), ("x\n<parameter=unit>", False)):
        text = written(formats.tools, ("get_weather", {"city": city}))
        assert _accepts(vocabularies["byte"], outputs, text) is accepted


@pytest.mark.parametrize(("more", "accepted"), [({}, False), ({"additionalProperties": True}, True)])
def test_properties_that_a_schema_does_not_name_come_only_where_it_says_so(
    more: dict, accepted: bool, vocabularies: dict[str, Vocabulary]
) -> None:
    nested = {"type": "object", "properties": {"x": {"type": "integer"}}, **more}
    parameters = {"type": "object", "properties": {"at": nested}, "required": ["at"]}
    formats = detect_formats(None, "hermes")
    assert formats.tools is not None
    outputs = tool_constraint(
        formats, [tool("go", parameters)], "required", parallel=False, after=None, special_tokens={}
    )
    for arguments, ok in (({"at": {"x": 1}}, True), ({"at": {"x": 1, "y": 2}}, accepted), ({"at": {}, "z": 1}, False)):
        assert _accepts(vocabularies["byte"], outputs, written(formats.tools, ("go", arguments))) is ok


def test_a_tool_whose_parts_count_its_properties_may_get_others(vocabularies: dict[str, Vocabulary]) -> None:
    one = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    at_least_two = {"allOf": [one], "minProperties": 2}
    formats = detect_formats(None, "hermes")
    assert formats.tools is not None
    outputs = tool_constraint(
        formats, [tool("go", at_least_two, strict=True)], "required", parallel=False, after=None, special_tokens={}
    )
    good = written(formats.tools, ("go", {"city": "Paris", "x": 1}))
    assert _accepts(vocabularies["byte"], outputs, good)
    assert not _accepts(vocabularies["byte"], outputs, written(formats.tools, ("go", {"city": 1, "x": 1})))


RAW_STRINGS = [known for known in TOOL_FORMATS if isinstance(known.arguments, Tags) or known.quote]


@pytest.mark.parametrize("known", RAW_STRINGS, ids=lambda known: known.name)
@pytest.mark.parametrize("words", ["byte", "marked"])
@pytest.mark.parametrize(
    ("limits", "city"),
    [
        ({"pattern": "^[A-Z][a-z]+$"}, "Paris"),
        ({"pattern": "^[A-Z][a-z]+$"}, "paris"),
        ({"pattern": "^[A-Z][a-z]+$"}, "Paris!"),
        ({"pattern": "ari"}, "Paris"),
        ({"pattern": "ari"}, "Rome"),
        ({"pattern": "ari"}, "two\nlines\nari </b>"),
        ({"pattern": "^a|b$"}, "axx"),
        ({"pattern": "^a|b$"}, "xxb"),
        ({"pattern": "^a|b$"}, "xab x"),
        ({"pattern": r"^\d{4}-\d\d/[^/]$"}, "2026-11/x"),
        ({"pattern": r"^\d{4}-\d\d/[^/]$"}, "2026-11-x"),
        ({"minLength": 3, "maxLength": 5}, "äöü"),
        ({"minLength": 3, "maxLength": 5}, "äö"),
        ({"minLength": 3, "maxLength": 5}, "abcdef"),
        ({"maxLength": 4, "pattern": "^[a-z]*$"}, "abcd"),
        ({"maxLength": 4, "pattern": "^[a-z]*$"}, "abcde"),
        ({"maxLength": 4, "pattern": "^[a-z]*$"}, "ABC"),
        ({"enum": ["Paris", "New York"]}, "New York"),
        ({"enum": ["Paris", "New York"]}, "New"),
    ],
)
def test_raw_strings_are_held_to_their_schema(
    known: ToolFormat, words: str, limits: dict, city: str, vocabularies: dict[str, Vocabulary]
) -> None:
    """As jsonschema has it, which knows nothing of tags."""
    schema = {"type": "string", **limits}
    parameters = {"type": "object", "properties": {"city": schema}, "required": ["city"]}
    outputs = tool_constraint(
        OutputFormats(known, None), [tool("go", parameters)], "required", parallel=False, after=None,
        special_tokens=vocabularies[words].special,
    )  # fmt: skip
    valid = jsonschema.Draft202012Validator(schema).is_valid(city)
    assert _accepts(vocabularies[words], outputs, written(known, ("go", {"city": city}))) is valid


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("pattern", [r"^(?=a)b$", r"\bx\b", r"(a)\1", "a^b", "(^a|b)c", "(unclosed"])
def test_a_pattern_that_grammars_do_not_know_is_refused_only_if_strict(
    pattern: str, strict: bool, vocabularies: dict[str, Vocabulary]
) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": pattern}},
        "required": ["city"],
    }
    formats = detect_formats(None, "qwen3_coder")
    outputs = tool_constraint(
        formats, [tool("go", parameters, strict)], "required", parallel=False, after=None, special_tokens={}
    )
    assert outputs is not None and formats.tools is not None
    if strict:
        with pytest.raises(InvalidRequestError):
            compile_grammar(outputs)
    else:
        assert _accepts(vocabularies["byte"], outputs, written(formats.tools, ("go", {"city": "anything"})))
